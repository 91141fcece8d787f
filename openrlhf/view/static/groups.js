// Sorts metrics into the groups of the page. The first group whose pattern matches takes a metric. Names are those of
// metrics.jsonl, such as `reward` or `timing/generation`.

const GROUPS = [
  { title: "Evaluation", kind: "eval", pattern: /./ },
  { title: "Engine and trainer", pattern: /^vllm_kl$|log_prob_difference|^is_|staleness/ },
  { title: "Time per phase", pattern: /^timing\// },
  { title: "Throughput", pattern: /per_second|throughput|tok\/s/ },
  { title: "Clip fraction", pattern: /clip/ },
  { title: "KL", pattern: /(^|_)kl($|_(?!loss))/ },
  { title: "Entropy", pattern: /entropy/ },
  { title: "Optimizer", pattern: /(^|_)lr$|grad_norm|loss_scale|skipped_steps/ },
  { title: "Losses", pattern: /loss/ },
  { title: "Length", pattern: /length|truncated|^steps$|^turns$/ },
  { title: "Reward", pattern: /reward|^score$|^return$|^acc_mean$|^values$|pass_rate/ },
];
// Curves that come first in their group, because people look at them first.
const FIRST = [
  "train/reward",
  "train/score",
  "train/group_reward_std",
  "train/acc_mean",
  "train/kl",
  "train/response_length",
  "train/policy_loss",
];
// Curves that come last: with group estimators, such as GRPO, the mean return is about 0 at every step.
const LAST = ["train/return"];
const ORDER = [
  ...["Reward", "Evaluation", "Losses", "KL", "Entropy", "Length", "Clip fraction", "Engine and trainer"],
  ...["Throughput", "Time per phase", "Optimizer", "More"],
];

/** Split `train/reward` at its first slash. */
export function splitName(curve) {
  const end = curve.indexOf("/");
  return { kind: curve.slice(0, end), name: curve.slice(end + 1) };
}

function groupOf(curve) {
  const { kind, name } = splitName(curve);
  return GROUPS.find((group) => (group.kind ?? "train") === kind && group.pattern.test(name))?.title ?? "More";
}

/** Return [title, curves] for each group that has curves; between FIRST and LAST, they keep the metrics file's order. */
export function grouped(curves) {
  const sorted = [
    ...FIRST.filter((curve) => curves.includes(curve)),
    ...curves.filter((curve) => !FIRST.includes(curve) && !LAST.includes(curve)),
    ...LAST.filter((curve) => curves.includes(curve)),
  ];
  return ORDER.map((title) => [title, sorted.filter((curve) => groupOf(curve) === title)]).filter(
    ([, members]) => members.length > 0,
  );
}
