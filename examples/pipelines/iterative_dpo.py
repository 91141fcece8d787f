"""Iterative DPO: the policy answers, the reward model ranks the answers, DPO trains on best against worst, and repeat.

    python examples/pipelines/iterative_dpo.py --policy ./sft --reward ./rm --prompts ./prompts.jsonl --folder ./dpo

Each iteration takes the next slice of the prompts. The reference is the initial model throughout.
"""

import argparse

from steps import Run, Steps, arguments


def iterate(args: argparse.Namespace, run: Run | None = None) -> str:
    steps = Steps(args, run)
    steps.mean_reward("before", args.policy)
    policy = args.policy
    for number in range(args.iterations):
        folder = args.folder / f"iteration{number}"
        part = ["--iter", number, "--rollout_batch_size", args.prompts_per_iteration]
        answers = steps.answers(folder / "answers.jsonl", policy, args.prompts, *part, "--best_of_n", args.samples)
        pairs = steps.scored(folder / "pairs.jsonl", answers, "--post_processor", "iter_dpo")
        models = ["--pretrain", policy, "--ref_pretrain", args.policy]
        policy = steps.trained(folder / "policy", "train_dpo", *models, "--dataset", pairs, "--prompt_key", "prompt")
    steps.mean_reward("after", policy)
    return policy


if __name__ == "__main__":
    iterate(arguments(str(__doc__), iterations=5, samples=8).parse_args())
