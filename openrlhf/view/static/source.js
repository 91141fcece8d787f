// Where the data comes from: the server of `openrlhf view`, or the report that this page is part of. Both answer the
// same questions, so that the rest of the page does not know the difference.

export function openSource() {
  const report = document.getElementById("report");
  return report ? new ReportSource(JSON.parse(report.textContent)) : new ServerSource();
}

class ServerSource {
  live = true;
  title = "openrlhf";
  summary = {};

  runs = () => this.ask("runs");
  flags = (run) => this.ask("flags", { run });
  metrics = (run, position) => this.ask("metrics", { run, ...position });
  samples = (query) => this.ask("samples", query);
  group = (sample) => this.ask("group", { sample });

  async ask(what, parameters = {}) {
    const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null);
    const response = await fetch(`/api/${what}?${new URLSearchParams(given)}`);
    if (!response.ok) throw new Error(`${what}: status ${response.status}`);
    return response.json();
  }
}

const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  best: (a, b) => b.reward - a.reward,
  worst: (a, b) => a.reward - b.reward,
  longest: (a, b) => b.length - a.length,
  shortest: (a, b) => a.length - b.length,
};

/** A report holds all curves and some samples; it filters them itself, as `sample_index.py` does for the server. */
class ReportSource {
  live = false;
  pageSize = 50;

  constructor(report) {
    this.report = report;
    this.title = report.title;
    this.summary = report.summary;
  }

  async runs() {
    return this.report.runs.map((run) => ({ ...run, samples: run.samples.length }));
  }

  async flags(run) {
    return this.report.runs[run].flags;
  }

  async metrics(run, position) {
    const curves = position.offset ? {} : this.report.runs[run].curves;
    return { curves, position: { file: "report", offset: 1 }, restarted: false, more: false, unreadable: 0 };
  }

  async samples(query) {
    const all = this.report.runs[query.run].samples;
    const within = (value, low, high) => (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
    const matches = all.filter(
      (sample) =>
        within(sample.step, query.step_from, query.step_to) &&
        within(sample.reward, query.reward_from, query.reward_to) &&
        within(sample.length, query.length_from, query.length_to) &&
        (query.finish === "" || sample.truncated === (query.finish === "length")) &&
        (query.prompt_index == null || sample.prompt_index === query.prompt_index) &&
        hasWords([sample.prompt, sample.response], query.text),
    );
    matches.sort(ORDERS[query.order]); // stable: equal samples stay in the order of the record
    const start = query.page * this.pageSize;
    const rows = matches.slice(start, start + this.pageSize);
    return { rows, total: matches.length, indexed: all.length, unreadable: 0, page_size: this.pageSize };
  }

  async group(number) {
    for (const { samples } of this.report.runs) {
      const one = samples.find((sample) => sample.id === number);
      if (!one) continue;
      const same = samples.filter((other) => other.step === one.step && other.prompt_index === one.prompt_index);
      return { samples: same, total: same.length };
    }
    return { samples: [], total: 0 };
  }
}

/** Characters of Chinese and Japanese, each of which counts as a word; `sample_index.py` has the same ranges. */
const UNSPACED =
  /[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\u{20000}-\u{3ffff}]/gu;

function splitWords(text) {
  return text.toLowerCase().replace(UNSPACED, " $& ").match(/[\p{L}\p{N}]+/gu) ?? [];
}

/** True if each word of the search begins a word of a text; a search without any word finds nothing. */
function hasWords(texts, search) {
  if (!search.trim()) return true;
  const phrases = (search.match(/[\p{L}\p{N}_]+/gu) ?? []).map(splitWords).filter((phrase) => phrase.length);
  const words = texts.map(splitWords);
  return phrases.length > 0 && phrases.every((phrase) => words.some((all) => hasPhrase(all, phrase)));
}

/** True if the words of a phrase follow each other; the last one may be the beginning of a longer word. */
function hasPhrase(words, phrase) {
  const last = phrase.length - 1;
  const follows = (start) => phrase.slice(0, last).every((word, place) => words[start + place] === word);
  return words.some((_, start) => follows(start) && words[start + last]?.startsWith(phrase[last]));
}
