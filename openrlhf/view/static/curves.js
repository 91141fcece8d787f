// The view of curves: a chart for each metric, in groups, with smoothing and a filter by name.

import { Chart } from "view/chart.js";
import { debounced, element } from "view/dom.js";
import { grouped, splitName } from "view/groups.js";

const CLOSED = ["Optimizer", "More"]; // groups that start folded

export class CurvesView {
  constructor(root, runs) {
    this.runs = runs;
    this.charts = new Map();
    this.sections = new Map();
    this.smoothing = 0;
    this.search = element("input", {
      ...{ type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", spellcheck: "false" },
      oninput: debounced(() => this.update()),
    });
    const slider = element("input", {
      ...{ type: "range", min: "0", max: "0.98", step: "0.02", value: "0" },
      oninput: debounced(() => {
        this.smoothing = Number(slider.value);
        this.update();
      }, 30),
    });
    this.empty = element("p", { class: "empty" });
    this.body = element("div", {});
    const controls = element("div", { class: "controls" }, this.search, element("label", {}, "Smoothing ", slider));
    root.append(controls, this.empty, this.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of this.charts.values()) chart.recolor();
    });
  }

  update() {
    const shown = this.runs.shown;
    const wanted = this.search.value.trim().toLowerCase();
    const all = new Set(shown.flatMap((run) => [...run.curves.keys()]));
    const names = [...all].filter((name) => name.toLowerCase().includes(wanted));
    const groups = new Map(grouped(names));
    for (const [title, section] of this.sections) section.root.hidden = !groups.has(title);
    for (const [title, members] of groups) this.fill(title, members, shown);
    // Groups may appear later, as with the first evaluation. Moving one takes the focus away, so move only if needed.
    const order = [...groups.keys()].map((title) => this.sections.get(title).root);
    const now = [...this.body.children].filter((section) => !section.hidden);
    if (order.some((section, place) => section !== now[place])) this.body.append(...order);
    this.empty.textContent = names.length ? "" : this.explainEmpty(all.size);
  }

  explainEmpty(count) {
    if (count) return "No metric has that name.";
    return this.runs.all.length ? "No metrics yet. They appear with the first step." : "Loading …";
  }

  fill(title, members, shown) {
    const section = this.section(title);
    const kept = new Set(members);
    for (const chart of section.grid.children) chart.hidden = !kept.has(chart.dataset.curve);
    for (const curve of members) {
      const drawn = shown.filter((run) => run.curves.has(curve));
      const lines = drawn.map((run) => ({ name: run.name, color: run.color, ...run.curves.get(curve) }));
      this.chart(curve, section.grid).set(lines, this.smoothing);
    }
    section.count.textContent = members.length;
  }

  section(title) {
    if (!this.sections.has(title)) {
      const count = element("span", { class: "count" });
      const grid = element("div", { class: "grid" });
      const heading = element("summary", {}, element("h2", {}, title), count);
      const root = element("details", { class: "group", open: !CLOSED.includes(title) }, heading, grid);
      this.sections.set(title, { root, grid, count });
    }
    return this.sections.get(title);
  }

  chart(curve, grid) {
    if (!this.charts.has(curve)) {
      const chart = new Chart(splitName(curve).name);
      chart.root.dataset.curve = curve;
      this.charts.set(curve, chart);
      grid.append(chart.root);
    }
    return this.charts.get(curve);
  }
}
