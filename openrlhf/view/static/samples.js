// The browser of samples: filters, a list in pages, and next to it the samples of the chosen prompt.

import { counted, debounced, element, formatted } from "view/dom.js";
import { GroupView } from "view/group.js";

const ORDERS = {
  newest: "newest first",
  oldest: "oldest first",
  best: "best reward first",
  worst: "worst reward first",
  longest: "longest first",
  shortest: "shortest first",
};

export class SamplesView {
  constructor(root, source, runs) {
    this.source = source;
    this.runs = runs;
    this.page = 0;
    this.prompt = null; // index of the only prompt to list
    this.chosen = null; // id of the sample whose group is shown
    this.rows = [];
    this.group = new GroupView(source, (prompt) => this.choosePrompt(prompt));
    this.form = this.makeForm();
    this.count = element("p", { class: "found", role: "status" });
    this.list = element("ol", {
      ...{ class: "list", role: "listbox", "aria-label": "Samples", tabindex: "0" },
      onkeydown: (event) => this.moveInList(event),
      onclick: (event) => this.choose(Number(event.target.closest("[role=option]")?.dataset.id)),
    });
    const turn = (pages) => () => {
      this.page += pages;
      this.load();
    };
    this.back = element("button", { type: "button", onclick: turn(-1) }, "← Previous");
    this.next = element("button", { type: "button", onclick: turn(1) }, "Next →");
    this.place = element("span", {});
    const pages = element("nav", { class: "pages", "aria-label": "Pages" }, this.back, this.place, this.next);
    root.append(
      this.form,
      element(
        "div",
        { class: "browser" },
        element("div", { class: "found-list" }, this.count, this.list, pages),
        this.group.root,
      ),
    );
  }

  makeForm() {
    const reload = debounced(() => {
      this.page = 0;
      this.load();
    });
    const changed = (event) => {
      if (event.target.name === "run") this.chosen = null; // choose the first sample of that run
      reload();
    };
    const range = (name, label, step) =>
      element(
        "fieldset",
        {},
        element("legend", {}, label),
        element("input", {
          type: "number",
          step,
          name: `${name}_from`,
          placeholder: "from",
          "aria-label": `${label} from`,
        }),
        element("input", { type: "number", step, name: `${name}_to`, placeholder: "to", "aria-label": `${label} to` }),
      );
    const choice = (name, label, options) =>
      element(
        "label",
        {},
        label,
        element(
          "select",
          { name, "aria-label": label },
          ...Object.entries(options).map(([value, text]) => element("option", { value }, text)),
        ),
      );
    this.search = element("input", {
      ...{ type: "search", name: "text", placeholder: "Search prompts and responses", spellcheck: "false" },
      "aria-label": "Search prompts and responses",
    });
    this.promptFilter = element("button", {
      type: "button",
      class: "chip",
      hidden: true,
      onclick: () => this.choosePrompt(null),
    });
    this.runChoice = choice("run", "Run", {});
    return element(
      "form",
      { class: "controls", onsubmit: (event) => event.preventDefault(), oninput: changed },
      this.search,
      this.runChoice,
      range("step", "Step", "1"),
      range("reward", "Reward", "any"),
      range("length", "Tokens", "1"),
      choice("finish", "Finish", { "": "any", stop: "stop", length: "length" }),
      choice("order", "Order", ORDERS),
      this.promptFilter,
    );
  }

  /** Offer the runs with samples, and look for new samples. */
  async update() {
    const select = this.runChoice.querySelector("select");
    const recorded = this.runs.all.filter((run) => run.samples > 0);
    const offered = [...select.options].map((option) => Number(option.value));
    for (const run of recorded.filter((one) => !offered.includes(one.id))) {
      select.append(element("option", { value: run.id }, run.name));
    }
    this.form.hidden = recorded.length === 0;
    await this.load();
  }

  query() {
    const fields = Object.fromEntries(new FormData(this.form));
    return { ...fields, run: Number(fields.run), prompt_index: this.prompt, page: this.page };
  }

  async load() {
    if (this.form.hidden) {
      this.count.textContent = "No samples. Reinforcement learning records them; supervised training has none.";
      return;
    }
    const query = this.query();
    const asked = (this.asked = JSON.stringify(query));
    const found = await this.source.samples(query);
    if (asked !== this.asked) return; // a later question is on its way
    const restricted = found.total < found.indexed ? ` of ${found.indexed.toLocaleString("en-US")}` : "";
    const broken = found.unreadable ? `; ${counted(found.unreadable, "unreadable record")} left out` : "";
    this.count.textContent = `${counted(found.total, "sample")}${restricted}${broken}`;
    const pages = Math.max(1, Math.ceil(found.total / found.page_size));
    this.place.textContent = `${this.page + 1} / ${pages}`;
    this.back.disabled = this.page === 0;
    this.next.disabled = this.page >= pages - 1;
    if (JSON.stringify(found.rows) !== JSON.stringify(this.rows)) {
      this.rows = found.rows;
      this.list.replaceChildren(...this.rows.map((row) => this.row(row)));
      this.mark();
    }
    this.list.dataset.run = query.run;
    if (this.chosen == null && this.rows.length) this.choose(this.rows[0].id);
  }

  row(row) {
    const notes = [`step ${row.step}`, `${row.length} tok`, row.turns > 1 ? `${row.turns} turns` : null];
    return element(
      "li",
      { role: "option", id: `sample-${row.id}`, "data-id": row.id },
      element("span", { class: "reward" }, formatted(row.reward, 3)),
      element("span", { class: "text" }, row.response || "(empty)"),
      element("span", { class: "prompt" }, row.prompt),
      element(
        "span",
        { class: "notes" },
        notes.filter(Boolean).join(" · "),
        row.truncated ? element("em", {}, "cut off") : null,
      ),
    );
  }

  mark() {
    for (const item of this.list.children)
      item.setAttribute("aria-selected", String(Number(item.dataset.id) === this.chosen));
    const chosen = this.list.querySelector("[aria-selected=true]");
    if (chosen) this.list.setAttribute("aria-activedescendant", chosen.id);
    else this.list.removeAttribute("aria-activedescendant");
    return chosen;
  }

  choose(id) {
    if (!id && id !== 0) return;
    this.chosen = id;
    this.mark()?.scrollIntoView({ block: "nearest" });
    this.group.show(id);
  }

  moveInList(event) {
    const now = this.rows.findIndex((row) => row.id === this.chosen);
    const last = this.rows.length - 1;
    const next = { ArrowDown: Math.min(last, now + 1), ArrowUp: Math.max(0, now - 1), Home: 0, End: last }[event.key];
    if (next == null || last < 0) return;
    event.preventDefault();
    this.choose(this.rows[next].id);
  }

  /** Restrict the list to one prompt, in all steps; null shows all prompts. */
  choosePrompt(index) {
    this.prompt = index;
    this.page = 0;
    this.promptFilter.hidden = index == null;
    this.promptFilter.textContent = `prompt ${index} ✕`;
    this.load();
  }
}
