// The runs of the page: their curves, which grow while a run trains, and the list in which they are shown or hidden.

import { counted, element } from "view/dom.js";

const COLORS = 8; // run colours in style.css

export class Runs {
  constructor(source, list, onToggle) {
    this.source = source;
    this.list = list;
    this.onToggle = onToggle;
    this.all = [];
    this.changed = false; // there are new runs, points or samples to show; the caller resets it
  }

  get shown() {
    return this.all.filter((run) => run.shown);
  }

  /** Fetch new runs and new points; if some cannot be fetched, raise an error after the others. */
  async refresh() {
    for (const found of await this.source.runs()) {
      let run = this.all.find((known) => known.id === found.id);
      if (!run) {
        run = {
          id: found.id,
          shown: true,
          color: `--run-${found.id % COLORS}`,
          curves: new Map(),
          position: { offset: 0 },
        };
        this.all.push(run);
        this.changed = true;
      }
      this.changed ||= run.samples !== found.samples;
      Object.assign(run, { name: found.name, folder: found.folder, samples: found.samples });
    }
    const added = await Promise.allSettled(this.all.map((run) => this.addPoints(run)));
    if (this.changed) this.draw();
    const failed = added.find((result) => result.status === "rejected");
    if (failed) throw failed.reason;
  }

  async addPoints(run) {
    for (let more = true; more;) {
      const part = await this.source.metrics(run.id, run.position);
      more = part.more;
      if (part.restarted && run.curves.size) {
        run.curves.clear();
        this.changed = true;
      }
      run.position = part.position;
      for (const [name, points] of Object.entries(part.curves)) {
        if (!run.curves.has(name)) run.curves.set(name, { steps: [], values: [] });
        const curve = run.curves.get(name);
        curve.steps = curve.steps.concat(points.steps);
        curve.values = curve.values.concat(points.values);
        this.changed = true;
      }
    }
  }

  lastStep(run) {
    return Math.max(0, ...[...run.curves.values()].map((curve) => curve.steps.at(-1) ?? 0));
  }

  draw() {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.value : null;
    this.list.replaceChildren(...this.all.map((run) => this.row(run)));
    this.list.querySelector(`input[value="${focused}"]`)?.focus();
  }

  row(run) {
    const toggle = (event) => {
      run.shown = event.target.checked;
      this.onToggle();
    };
    const about = [counted(this.lastStep(run), "step"), run.samples ? counted(run.samples, "sample") : null];
    return element(
      "li",
      {},
      element(
        "label",
        { title: run.folder, style: { "--color": `var(${run.color})` } },
        element("input", { type: "checkbox", checked: run.shown, value: run.id, onchange: toggle }),
        element("span", { class: "swatch" }),
        element("span", { class: "name" }, run.name),
        element("span", { class: "about" }, about.filter(Boolean).join(" · ")),
      ),
    );
  }
}
