// One chart: a metric of one or several runs over steps, drawn by uPlot. Values follow the mouse or the arrow keys, and
// all charts point at the same step.

import { element, formatted } from "view/dom.js";

const HEIGHT = 150;
const FEW = 40; // curves with fewer points show each point

export class Chart {
  constructor(name) {
    this.name = name;
    this.plot = null;
    this.runs = [];
    this.visible = false;
    this.readout = element("ul", { class: "readout" });
    this.step = element("span", { class: "at" });
    this.box = element("div", {
      class: "plot",
      tabindex: "0",
      role: "img",
      onkeydown: (event) => this.move(event),
      onblur: () => this.plot?.setCursor({ left: -10, top: -10 }),
    });
    this.root = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("span", { class: "metric", title: name }, name), this.step),
      this.box,
      this.readout,
    );
    new ResizeObserver(() => this.resize()).observe(this.box);
    new IntersectionObserver(([entry]) => this.show(entry.isIntersecting), { rootMargin: "200px" }).observe(this.root);
  }

  /** Set the curves: a list of {name, color, steps, values}; drawing waits until the chart can be seen. */
  set(runs, smoothing) {
    const same = this.runs.map((run) => run.name).join("\n") === runs.map((run) => run.name).join("\n");
    this.rebuild ||= !same || this.smoothing !== smoothing;
    this.runs = runs;
    this.smoothing = smoothing;
    this.stale = true;
    if (this.visible) this.draw();
  }

  show(visible) {
    this.visible = visible;
    if (visible && this.stale) this.draw();
  }

  draw() {
    this.stale = false;
    // Each run is one curve, or two when smoothed: the measured values, faint, and the smoothed ones.
    const curves = this.runs.flatMap((run) =>
      this.smoothing
        ? [
            { ...run, faint: true },
            { ...run, values: smoothed(run.values, this.smoothing) },
          ]
        : [run],
    );
    this.data = aligned(curves);
    if (this.plot && !this.rebuild) {
      this.plot.setData(this.data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    } else {
      this.plot?.destroy();
      this.zoomed = this.rebuild = false;
      this.plot = new uPlot(this.options(curves), this.data, this.box);
    }
    this.read(null);
  }

  options(curves) {
    const color = (name) => getComputedStyle(this.root).getPropertyValue(name).trim();
    const axis = {
      stroke: () => color("--muted"),
      grid: { stroke: () => color("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    return {
      width: this.box.clientWidth || 300,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", scales: ["x", null] }, y: false, points: { size: 6 }, focus: { prox: -1 } },
      scales: { x: { time: false, range: wide }, y: { range: roomy } },
      axes: [
        { ...axis, size: 22, gap: 2, space: 45, incrs: WHOLE, values: labels },
        { ...axis, size: labelWidth, gap: 4, space: 30, values: labels },
      ],
      series: [
        {},
        ...curves.map((curve) => ({
          label: curve.name,
          stroke: () => color(curve.color) + (curve.faint ? "44" : ""),
          width: curve.faint ? 1 : 1.6,
          spanGaps: true,
          points: { show: !curve.faint && curve.steps.length <= FEW, size: 4, fill: () => color(curve.color) },
        })),
      ],
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.idx)],
        setScale: [(plot) => (this.zoomed = isZoomed(plot))],
      },
    };
  }

  /** Show the values at a place of the shared axis; null shows the last ones. */
  read(place) {
    const [steps, ...columns] = this.data;
    const perRun = this.smoothing ? 2 : 1;
    const at = place ?? steps.length - 1;
    this.step.textContent = place == null ? "" : `step ${formatted(steps[at])}`;
    const values = this.runs.map((_, number) => valueAt(columns[(number + 1) * perRun - 1], at, place == null));
    this.readout.replaceChildren(
      ...this.runs.map((run, number) =>
        element(
          "li",
          { style: { "--color": `var(${run.color})` } },
          element("span", { class: "swatch" }),
          element("span", { class: "name" }, run.name),
          element("b", {}, formatted(values[number])),
        ),
      ),
    );
    const said = this.runs.map((run, number) => `${run.name} ${formatted(values[number])}`).join(", ");
    this.box.setAttribute("aria-label", `${this.name} at step ${formatted(steps[at])}: ${said}`);
  }

  move(event) {
    const steps = this.data?.[0] ?? [];
    const now = this.plot?.cursor.idx;
    const last = steps.length - 1;
    const next = {
      ArrowLeft: () => Math.max(0, (now ?? steps.length) - 1),
      ArrowRight: () => Math.min(last, (now ?? -1) + 1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (!next || last < 0) return;
    event.preventDefault();
    this.plot.setCursor({ left: this.plot.valToPos(steps[next()], "x"), top: HEIGHT / 3 });
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  /** Draw again in the current colours. */
  recolor() {
    this.plot?.redraw(false, true);
  }
}

const WHOLE = [1, 2, 5].flatMap((digit) => [...Array(9)].map((_, power) => digit * 10 ** power)).sort((a, b) => a - b);

const labels = (_, ticks) => ticks.map((tick) => formatted(tick));
const labelWidth = (_, texts) => 10 + 6.5 * Math.max(2, ...(texts ?? []).map((text) => text.length));
const wide = (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

/** True if a part of the curves is outside the chart. */
function isZoomed({ data: [steps], scales: { x } }) {
  return x.min > steps[0] || x.max < steps.at(-1);
}

/** Room above and below a curve, even around a constant one. */
function roomy(_, low, high) {
  if (low == null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** Put curves with different steps on one axis; if a step occurs twice in a curve, the later value counts. */
function aligned(curves) {
  const tables = curves.map(({ steps, values }) => {
    const pairs = [...new Map(steps.map((step, place) => [step, values[place]]))].sort((a, b) => a[0] - b[0]);
    return [pairs.map(([step]) => step), pairs.map(([, value]) => value)];
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

/** The value at a place or, between two steps of a run, the one before; after the run's end only if `last`. */
function valueAt(column, place, last) {
  if (!last && column.slice(place).every((value) => value == null)) return null;
  for (let at = place; at >= 0; at--) if (column[at] != null) return column[at];
  return null;
}

/** Exponential moving average without bias towards the first value; gaps stay gaps. */
function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}
