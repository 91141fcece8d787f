"""The reward of train_ppo_with_reward_fn.sh: 1 if the last number in a response equals the last number in the label.

A label may be a worked solution, as in GSM8K. Write your own with this name and these arguments; see examples/rewards.
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward_func(queries, prompts, labels, **kwargs):
    """`queries` are prompts followed by responses. --dynamic_filtering uses the scores, which are between 0 and 1."""
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    found = [last_number(response) for response in responses]
    wanted = [last_number(str(label)) for label in labels]
    right = [float(one is not None and one == other) for one, other in zip(found, wanted, strict=True)]
    return {
        "rewards": right,
        "scores": right,
        "extra_logs": {"answered": [float(number is not None) for number in found]},
    }


def last_number(text):
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
