"""The quickstart's verifiable reward: 1 for the sorted digits, plus up to 0.3 for digits in the right position.

openrlhf train_ppo --remote_rm_url examples/rewards/sorted_digits.py --label_key label ...
"""

import re

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, object]:
    answers = [re.sub(r"</s>.*", "", query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    pairs = list(zip(answers, labels, strict=True))
    exact = torch.tensor([float(answer == label) for answer, label in pairs])
    placed = torch.tensor(
        [sum(a == b for a, b in zip(answer, label, strict=False)) / len(label) for answer, label in pairs]
    )
    return {"rewards": exact + 0.3 * placed, "scores": exact, "extra_logs": {"exact": exact}}
