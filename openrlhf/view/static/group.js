// The samples of one prompt side by side, with their tokens coloured on request.

import { counted, element, formatted } from "view/dom.js";
import { COLORINGS, describeToken, largest, TokenText } from "view/tokens.js";

export class GroupView {
  constructor(source, onPrompt) {
    this.source = source;
    this.onPrompt = onPrompt;
    this.coloring = "advantage";
    this.samples = [];
    this.header = element("div", { class: "prompt-head" });
    this.legend = element("p", { class: "legend" });
    this.token = element("p", { class: "token-about", role: "status" });
    this.cards = element("div", { class: "cards" });
    const choices = Object.entries(COLORINGS).map(([value, { label }]) =>
      element(
        "label",
        {},
        element("input", {
          ...{ type: "radio", name: "coloring", value, checked: value === this.coloring },
          onchange: () => this.recolor(value),
        }),
        label,
      ),
    );
    this.choices = element(
      "div",
      { class: "choices", role: "radiogroup", "aria-label": "Colour tokens by" },
      ...choices,
    );
    this.root = element(
      "section",
      { class: "prompt-group", "aria-label": "Samples of this prompt", hidden: true },
      this.header,
      element("div", { class: "coloring" }, this.choices, this.legend),
      this.token,
      this.cards,
    );
  }

  async show(id) {
    this.wanted = id;
    const group = await this.source.group(id);
    if (this.wanted !== id || !group.samples.length) return;
    this.samples = group.samples;
    this.root.hidden = false;
    this.drawHeader(group);
    this.draw();
  }

  drawHeader(group) {
    const { prompt, label, step, prompt_index: index } = this.samples[0];
    const hidden = group.total - this.samples.length;
    const left = hidden ? `, ${hidden} not shown` : "";
    const about = `Step ${step} · prompt ${index} · ${counted(group.total, "sample")}${left}`;
    this.header.replaceChildren(
      element(
        "p",
        { class: "notes" },
        about,
        element(
          "button",
          { type: "button", class: "link", onclick: () => this.onPrompt(index) },
          "this prompt in all steps",
        ),
      ),
      element("pre", { class: "prompt-text", tabindex: "0", "aria-label": "Prompt" }, prompt),
      label ? element("p", { class: "notes" }, "Label: ", element("code", {}, label)) : null,
    );
  }

  recolor(coloring) {
    this.coloring = coloring;
    this.draw();
  }

  draw() {
    const { values, unit, missing } = COLORINGS[this.coloring];
    const scale = values ? largest(this.samples.flatMap((sample) => values(sample) ?? [])) : 0;
    this.token.textContent = "";
    this.legend.replaceChildren(...this.legendParts(values, scale, unit, missing));
    this.cards.replaceChildren(...this.samples.map((sample) => this.card(sample, scale)));
  }

  legendParts(values, scale, unit, missing) {
    if (!values) return [];
    if (this.samples.every((sample) => !values(sample))) return [missing];
    if (!scale) return [`every ${unit} is 0`]; // as if all samples of the prompt have the same reward
    const end = formatted(scale);
    return [`−${end}`, element("span", { class: "ramp", "aria-hidden": "true" }), `+${end} ${unit}`];
  }

  card(sample, scale) {
    const facts = {
      reward: formatted(sample.reward),
      score: sample.score === sample.reward ? null : formatted(sample.score),
      tokens: formatted(sample.length),
      turns: sample.turns > 1 ? sample.turns : null,
      finish: sample.truncated ? "length" : "stop",
      ...Object.fromEntries(Object.entries(sample.extra).map(([name, value]) => [name, formatted(value)])),
    };
    const shown = Object.entries(facts).filter(([, value]) => value != null);
    const text = new TokenText(sample, this.coloring, scale, (place) => {
      this.token.textContent = place == null ? "" : describeToken(sample, place);
    });
    return element(
      "article",
      { class: sample.id === this.wanted ? "card chosen" : "card", "aria-label": `Sample with reward ${facts.reward}` },
      element(
        "dl",
        { class: "facts" },
        ...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
      ),
      text.root,
    );
  }
}
