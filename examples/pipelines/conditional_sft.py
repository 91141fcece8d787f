"""Conditional SFT: train on every answer, prefixed by its reward; then request a high reward.

    python examples/pipelines/conditional_sft.py --policy ./sft --reward ./rm --prompts ./prompts.jsonl --folder ./csft

The answers are the policy's own or, with --answers, those of a dataset with the fields input and output. Rewards are
normalised, so --wish 2 requests an answer two standard deviations above the mean.
"""

import argparse

from steps import COMPLETE, Run, Steps, arguments


def learn(args: argparse.Namespace, run: Run | None = None) -> str:
    steps = Steps(args, run)
    steps.mean_reward("before", args.policy)
    answers = args.answers or steps.answers(
        args.folder / "answers.jsonl", args.policy, args.prompts, "--best_of_n", args.samples
    )
    how = ["--post_processor", "csft", "--normalize_reward"]
    rows = steps.scored(args.folder / "conditional.jsonl", answers, *how)
    policy = steps.trained(args.folder / "policy", "train_sft", "--pretrain", args.policy, "--dataset", rows, *COMPLETE)
    steps.mean_reward("after", policy, condition=f"<rm_score>: {args.wish:.2f}")
    return policy


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(str(__doc__), iterations=1, samples=4)
    parser.add_argument("--answers", help="dataset with answers (default: the policy generates them)")
    parser.add_argument("--wish", type=float, default=2.0, help="the requested reward, in standard deviations")
    return parser.parse_args(argv)


if __name__ == "__main__":
    learn(parse())
