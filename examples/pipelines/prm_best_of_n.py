"""Best of n with a process reward model: train it to judge steps, sample n answers from the policy, keep the best.

    python examples/pipelines/prm_best_of_n.py --policy ./sft --labels ./steps.jsonl --prompts ./prompts.jsonl \\
        --folder ./best --train '--placeholder_token ки --reward_tokens + -'

The model judges a step at the placeholder that ends it. If the policy does not write placeholders, --mark_steps adds
them: $'\\n' $' ки\\n' makes every line a step. --check measures the true quality of the chosen answers: it is a reward
function in the form that train_ppo takes, and its label is the prompt's field --label_key.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from steps import Run, Steps, read, shared_arguments, write

from openrlhf.errors import OpenRLHFError

Rows = list[dict[str, Any]]
Check = Callable[[Rows], list[float]]


def choose(args: argparse.Namespace, run: Run | None = None) -> str:
    check = open_check(args) if args.check else None  # first, so that a mistake is found before training
    steps = Steps(args, run)
    learning = ["--pretrain", args.base or args.policy, "--dataset", args.labels]
    reward = args.reward or steps.trained(args.folder / "prm", "train_prm", *learning)
    answers = steps.answers(args.folder / "answers.jsonl", args.policy, args.prompts, "--best_of_n", args.samples)
    rows = read(answers)
    if args.mark_steps:
        rows = marked(rows, args.policy, *args.mark_steps)
    judged, first = write(args.folder / "judged.jsonl", rows), write(args.folder / "first.jsonl", first_answers(rows))
    best = steps.scored(args.folder / "best.jsonl", judged, "--post_processor", "rs", reward=reward)
    one = steps.scored(args.folder / "first_scored.jsonl", first, reward=reward)
    report(read(one), read(best), f"the best of {len(rows) // len(read(first))}", check)
    return best


def first_answers(rows: Rows) -> Rows:
    """Return one answer to each prompt, as if only one had been requested."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["index"], row)
    return list(found.values())


def marked(rows: Rows, policy: str, end: str, mark: str) -> Rows:
    """Return the answers with a mark at the end of each step; the last step ends with the answer."""
    from transformers import AutoTokenizer  # takes seconds, and most runs do not need it

    eos = str(AutoTokenizer.from_pretrained(policy).eos_token)
    texts = [row["output"].removesuffix(eos).removesuffix(end) + end for row in rows]
    return [{**row, "output": text.replace(end, mark)} for row, text in zip(rows, texts, strict=True)]


def report(one: Rows, best: Rows, name_of_best: str, check: Check | None) -> None:
    if unjudged := sum(row["reward"] == 0 for row in best):  # the probability of a judged step is above 0
        print(f"# {unjudged} of {len(best)} prompts have no answer with a placeholder: see --mark_steps")
    groups = {"one answer": one, name_of_best: best}
    for name, rows in groups.items():
        print(f"reward of {name}: {fmean(row['reward'] for row in rows):.3f}")
    for name, rows in groups.items() if check else ():
        print(f"true reward of {name}: {fmean(check(rows)):.3f}")


def open_check(args: argparse.Namespace) -> Check:
    """Return a function that computes the true reward of answers."""
    from openrlhf.agents.loading import find_reward, load_module  # as above

    judge = find_reward(load_module(args.check), args.check, flag="--check")
    labels = read_labels(args) if args.label_key else None

    def worths(rows: Rows) -> list[float]:
        queries, prompts = [row["input"] + row["output"] for row in rows], [row["input"] for row in rows]
        result = judge(queries, prompts, [labels[row["index"]] if labels else "" for row in rows])
        return [float(worth) for worth in (result["rewards"] if isinstance(result, dict) else result)]

    return worths


def read_labels(args: argparse.Namespace) -> list[Any]:
    """Return the labels of the prompts in the order of generation, in which an answer's index is a row number."""
    from openrlhf.config.commands import BatchInferenceConfig  # as above
    from openrlhf.config.parser import parse as parse_flags
    from openrlhf.data.sources import load_dataset

    config = parse_flags(BatchInferenceConfig, ["--dataset", args.prompts, *shlex.split(args.generate)])
    records = load_dataset(config.data, seed=config.task.seed, loading=config.model)
    return [record.value(args.label_key, "--label_key") for record in records]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = shared_arguments(str(__doc__), samples=8)
    parser.add_argument("--labels", help="dataset with labelled steps, for the process reward model")
    parser.add_argument("--base", help="initial model of the process reward model (default: the policy)")
    parser.add_argument("--reward", help="an existing process reward model, instead of --labels")
    parser.add_argument("--mark_steps", nargs=2, metavar=("END", "MARK"), help="text that ends a step, and its mark")
    parser.add_argument("--check", help="file with a reward function (default: no check)")
    parser.add_argument("--label_key", help="field of the prompts that the check compares with")
    args = parser.parse_args(argv)
    if not args.labels and not args.reward:
        parser.error("--labels is required, or --reward with a trained process reward model")
    if args.check and not Path(args.check).is_file():
        parser.error(f"--check {args.check}: no such file")
    return args


if __name__ == "__main__":
    try:
        choose(parse())
    except OpenRLHFError as error:
        sys.exit(f"# {error}")
