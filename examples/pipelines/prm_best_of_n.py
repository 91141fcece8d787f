"""Best of n by a process reward model: it learns to judge steps, the policy answers n times, its best answer is kept.

    python examples/pipelines/prm_best_of_n.py --policy ./sft --labels ./steps.jsonl --prompts ./prompts.jsonl \\
        --folder ./best --train '--placeholder_token ки --reward_tokens + -'

The model judges a step at the placeholder that ends it. A policy that does not write placeholders gets them by
--mark_steps: $'\\n' $' ки\\n' makes every line a step. --check tells what the chosen answers are truly worth: it is a
reward function as train_ppo takes it, and gets the prompt's field --label_key as label.
"""

import argparse
import runpy
import shlex
from statistics import fmean
from typing import Any

from steps import Run, Steps, read, shared_arguments, write

Rows = list[dict[str, Any]]


def choose(args: argparse.Namespace, run: Run | None = None) -> str:
    steps = Steps(args, run)
    learning = ["--pretrain", args.base or args.policy, "--dataset", args.labels]
    reward = args.reward or steps.trained(args.folder / "prm", "train_prm", *learning)
    answers = steps.answers(args.folder / "answers.jsonl", args.policy, args.prompts, "--best_of_n", args.samples)
    if args.mark_steps:
        answers = write(args.folder / "marked.jsonl", marked(read(answers), args.policy, *args.mark_steps))
    best = steps.scored(args.folder / "best.jsonl", answers, "--post_processor", "rs", reward=reward)
    first = write(args.folder / "first.jsonl", read(answers)[:: args.samples])  # rows come prompt by prompt
    one = steps.scored(args.folder / "first_scored.jsonl", first, reward=reward)
    report(args, read(one), read(best))
    return best


def marked(rows: Rows, policy: str, end: str, mark: str) -> Rows:
    """The answers with a mark for each end of a step; the end of the answer ends the last one."""
    from transformers import AutoTokenizer  # takes seconds, and most runs do without

    eos = str(AutoTokenizer.from_pretrained(policy).eos_token)
    texts = [row["output"].removesuffix(eos).removesuffix(end) + end for row in rows]
    return [{**row, "output": text.replace(end, mark)} for row, text in zip(rows, texts, strict=True)]


def report(args: argparse.Namespace, one: Rows, best: Rows) -> None:
    if unjudged := sum(row["reward"] == 0 for row in best):  # a judged step has some probability, however small
        print(f"# {unjudged} of {len(best)} prompts have no answer with a placeholder: see --mark_steps")
    groups = {"one answer": one, f"the best of {args.samples}": best}
    for name, rows in groups.items():
        print(f"reward of {name}: {fmean(row['reward'] for row in rows):.3f}")
    for name, rows in groups.items() if args.check else ():
        print(f"true worth of {name}: {fmean(worths(args, rows)):.3f}")


def worths(args: argparse.Namespace, rows: Rows) -> list[float]:
    queries, prompts = [row["input"] + row["output"] for row in rows], [row["input"] for row in rows]
    labels = labels_of(rows, args) if args.label_key else [""] * len(rows)
    result = runpy.run_path(args.check)["reward_func"](queries, prompts, labels)
    return [float(worth) for worth in (result["rewards"] if isinstance(result, dict) else result)]


def labels_of(rows: Rows, args: argparse.Namespace) -> list[Any]:
    """From the prompts as generation reads them: an answer's index is its prompt's row number there."""
    from openrlhf.config.commands import BatchInferenceConfig  # as above
    from openrlhf.config.parser import parse as parse_flags
    from openrlhf.launch.batch_inference import load_rows

    records = load_rows(parse_flags(BatchInferenceConfig, ["--dataset", args.prompts, *shlex.split(args.generate)]))
    return [records[row["index"]].value(args.label_key, "--label_key") for row in rows]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = shared_arguments(str(__doc__), samples=8)
    parser.add_argument("--labels", help="dataset with labelled steps, for the process reward model")
    parser.add_argument("--base", help="what the process reward model begins as; none is the policy")
    parser.add_argument("--reward", help="a process reward model that is there, instead of --labels")
    parser.add_argument("--mark_steps", nargs=2, metavar=("END", "MARK"), help="text that ends a step, and its mark")
    parser.add_argument("--check", help="file with a reward function; none checks nothing")
    parser.add_argument("--label_key", help="field of the prompts that the check compares with")
    args = parser.parse_args(argv)
    if not args.labels and not args.reward:
        parser.error("--labels is needed, or a model that learned from them: --reward")
    return args


if __name__ == "__main__":
    choose(parse())
