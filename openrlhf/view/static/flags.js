// The flags that the shown runs were started with: those that differ, or all of them.

import { element } from "view/dom.js";

export class FlagsView {
  constructor(root, source, runs) {
    this.source = source;
    this.runs = runs;
    this.known = new Map(); // run id -> flags; fetched again each time, because a run may start over with others
    this.all = element("input", { type: "checkbox", onchange: () => this.draw() });
    this.search = element("input", {
      ...{ type: "search", placeholder: "Filter flags", "aria-label": "Filter flags", spellcheck: "false" },
      oninput: () => this.draw(),
    });
    this.body = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Flags" });
    const everything = element("label", { class: "check" }, this.all, " Also flags that are equal");
    root.append(element("div", { class: "controls" }, this.search, everything), this.body);
  }

  async update() {
    const fetched = this.runs.shown.map(async (run) => this.known.set(run.id, await this.source.flags(run.id)));
    await Promise.all(fetched);
    this.draw();
  }

  draw() {
    const runs = this.runs.shown.filter((run) => this.known.has(run.id));
    const wanted = this.search.value.trim().toLowerCase();
    const names = [...new Set(runs.flatMap((run) => Object.keys(this.known.get(run.id))))].sort();
    const rows = names
      .map((name) => [name, runs.map((run) => shown(this.known.get(run.id)[name]))])
      .filter(([name, values]) => name.includes(wanted) && (this.all.checked || runs.length < 2 || differ(values)));
    if (!rows.length) {
      this.body.replaceChildren(
        element("p", { class: "empty" }, runs.length ? "No such flag differs." : "No run is shown."),
      );
      return;
    }
    const head = element(
      "tr",
      {},
      element("th", { scope: "col" }, "Flag"),
      ...runs.map((run) => element("th", { scope: "col" }, run.name)),
    );
    const lines = rows.map(([name, values]) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, `--${name}`),
        ...values.map((value) => element("td", {}, value)),
      ),
    );
    this.body.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
  }
}

/** True if two runs that have the flag have different values. */
function differ(values) {
  return new Set(values.filter((value) => value !== null)).size > 1;
}

function shown(value) {
  if (value === undefined) return null; // not a flag of that command
  return typeof value === "string" ? value : JSON.stringify(value);
}
