// Starts the page: connects the views to the data, keeps them current while a run trains, and handles keys.

import { CurvesView } from "view/curves.js";
import { connectTabs, element } from "view/dom.js";
import { FlagsView } from "view/flags.js";
import { Runs } from "view/runs.js";
import { SamplesView } from "view/samples.js";
import { openSource } from "view/source.js";

const POLL_MILLISECONDS = 1500;

const byId = (id) => document.getElementById(id);
const source = openSource();
const runs = new Runs(source, byId("runs"), () => views[view].update());
const views = {
  curves: new CurvesView(byId("curves"), runs),
  samples: new SamplesView(byId("samples"), source, runs),
  flags: new FlagsView(byId("flags"), source, runs),
};
let view = "curves";

const open = connectTabs(document.querySelector("[role=tablist]"), (name) => {
  view = name;
  history.replaceState(null, "", `#/${name}`); // not the id of the panel, or the browser would scroll to it
  views[view].update();
});

function drawTitle() {
  byId("title").textContent = source.title;
  const rows = Object.entries(source.summary);
  if (!rows.length) return;
  const lines = rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  byId("summary").append(element("h2", {}, "Results"), element("dl", { class: "summary" }, ...lines));
}

function showStatus(text, state) {
  byId("status").textContent = text;
  byId("status").dataset.state = state;
}

async function refresh() {
  try {
    try {
      await runs.refresh();
    } finally {
      if (runs.changed) await views[view].update(); // also with what arrived before an error
      runs.changed = false;
    }
    showStatus(source.live ? "live" : "report", source.live ? "live" : "");
  } catch (error) {
    const stopped = error instanceof TypeError; // `fetch` raises it if the server does not answer
    showStatus(stopped ? "server stopped" : `error: ${error.message}`, "stopped");
    if (!stopped) throw error;
  }
}

async function keepCurrent() {
  try {
    if (!document.hidden) await refresh();
  } finally {
    if (source.live) setTimeout(keepCurrent, POLL_MILLISECONDS);
  }
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") document.activeElement.blur();
  if (event.key !== "/" || (typing && event.target.type !== "radio" && event.target.type !== "checkbox")) return;
  event.preventDefault();
  views[view].search.focus();
});

drawTitle();
open(location.hash.replace(/^#\/?/, ""));
keepCurrent();
