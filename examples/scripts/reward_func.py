"""The reward of train_ppo_with_reward_fn.sh: 1 where the last number of a response is the label's last number.

A label may be a worked solution, as GSM8K has it. Write your own with the same name and arguments; examples/rewards
has some to begin with.
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward_func(queries, prompts, labels, **kwargs):
    """queries are prompts with their responses. Scores between 0 and 1 are what --dynamic_filtering looks at."""
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
