// The text of a sample, token by token: coloured by a number per token, with the turns of an episode marked. Tokens of
// the environment, which the policy did not sample, are set apart and never coloured.

import { element, formatted } from "view/dom.js";

const MOST = 3000; // tokens shown before the reader asks for more; each is an element

/** Ways to colour tokens; `values` returns a number per token, or null if it was not recorded. */
export const COLORINGS = {
  plain: { label: "Plain" },
  advantage: {
    label: "Advantage",
    values: (sample) => sample.advantages,
    unit: "advantage",
    missing: "Advantages were not recorded.",
  },
  gap: {
    label: "Log-prob gap",
    values: (sample) => logProbGap(sample),
    unit: "engine − trainer",
    missing: "The trainer’s log-probs were not recorded in this run.",
  },
};

function logProbGap({ engine, trainer }) {
  return engine && trainer ? engine.map((value, place) => difference(value, trainer[place])) : null;
}

function difference(one, other) {
  return one == null || other == null ? null : one - other;
}

/** The number with the darkest colour: the largest size. */
export function largest(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
}

export function describeToken(sample, place) {
  const text = sample.texts?.[place];
  const parts = [text == null ? `token ${place + 1}` : `“${visible(text)}”`, `id ${sample.ids[place]}`];
  if (!sample.actions[place]) return [...parts, "environment"].join(" · ");
  const { engine, trainer, advantages } = sample;
  if (advantages) parts.push(`advantage ${formatted(advantages[place])}`);
  if (engine) parts.push(`engine ${formatted(engine[place])}`);
  if (trainer) parts.push(`trainer ${formatted(trainer[place])}`);
  const gap = logProbGap(sample)?.[place];
  if (gap != null) parts.push(`gap ${formatted(gap)}`);
  return parts.join(" · ");
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

export class TokenText {
  constructor(sample, coloring, scale, onToken) {
    this.sample = sample;
    this.values = COLORINGS[coloring].values?.(sample);
    this.scale = scale;
    this.onToken = onToken;
    this.current = null;
    this.root = element("div", {
      ...{ class: "tokens", tabindex: "0", role: "group", "aria-label": "Response, token by token" },
      onmouseover: (event) => this.point(event.target.closest(".token")),
      onmouseleave: () => this.point(null),
      onkeydown: (event) => this.move(event),
      onblur: () => this.point(null),
    });
    this.fill(MOST);
  }

  fill(most) {
    const { texts, actions, ids, response } = this.sample;
    if (!texts && !this.values && this.sample.turns < 2) {
      this.root.replaceChildren(response);
      return;
    }
    const parts = [];
    let turn = 0;
    for (let place = 0; place < Math.min(ids.length, most); place++) {
      if (actions[place] && !actions[place - 1] && this.sample.turns > 1) {
        parts.push(element("span", { class: "turn" }, `turn ${++turn}`));
      } else if (!actions[place] && actions[place - 1]) {
        parts.push(element("span", { class: "turn other" }, "environment"));
      }
      parts.push(this.token(place, texts ? texts[place] : ` ${ids[place]}`));
    }
    if (ids.length > most) {
      const rest = ids.length - most;
      parts.push(
        element(
          "button",
          { type: "button", class: "link", onclick: () => this.fill(Infinity) },
          `show ${rest} more tokens`,
        ),
      );
    }
    this.root.replaceChildren(...parts);
  }

  token(place, text) {
    const value = this.sample.actions[place] ? this.values?.[place] : null;
    const kind = this.sample.actions[place] ? (value > 0 ? "up" : value < 0 ? "down" : "") : "environment";
    const strength = value && this.scale ? Math.abs(value) / this.scale : 0;
    const shown = this.values ? text.replaceAll("\n", "↵\n") : text;
    const style = strength ? { "--strength": `${Math.round(8 + strength * 62)}%` } : {};
    return element("span", { class: `token ${kind}`, "data-place": place, style }, shown);
  }

  point(token) {
    if (token === this.current) return;
    this.current?.classList.remove("current");
    this.current = token;
    token?.classList.add("current");
    this.onToken(token ? Number(token.dataset.place) : null);
  }

  move(event) {
    const tokens = [...this.root.querySelectorAll(".token")];
    const now = tokens.indexOf(this.current);
    const next = {
      ArrowRight: now + 1,
      ArrowLeft: now < 0 ? tokens.length - 1 : now - 1,
      Home: 0,
      End: tokens.length - 1,
    }[event.key];
    if (next == null || !tokens[next]) return;
    event.preventDefault();
    this.point(tokens[next]);
    tokens[next].scrollIntoView({ block: "nearest" });
  }
}
