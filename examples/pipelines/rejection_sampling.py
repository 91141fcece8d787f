"""Rejection sampling: the policy answers several times and learns the answer that the reward model scores highest.

python examples/pipelines/rejection_sampling.py --policy ./sft --reward ./rm --prompts ./prompts.jsonl --folder ./rs
"""

import argparse

from steps import COMPLETE, Run, Steps, arguments


def iterate(args: argparse.Namespace, run: Run | None = None) -> str:
    steps = Steps(args, run)
    steps.mean_reward("before", args.policy)
    policy = args.policy
    for number in range(args.iterations):
        folder = args.folder / f"iteration{number}"
        part = ["--iter", number, "--rollout_batch_size", args.prompts_per_iteration]
        answers = steps.answers(folder / "answers.jsonl", policy, args.prompts, *part, "--best_of_n", args.samples)
        best = steps.scored(folder / "best.jsonl", answers, "--post_processor", "rs")
        policy = steps.trained(folder / "policy", "train_sft", "--pretrain", policy, "--dataset", best, *COMPLETE)
    steps.mean_reward("after", policy)
    return policy


if __name__ == "__main__":
    iterate(arguments(str(__doc__), iterations=10, samples=4).parse_args())
