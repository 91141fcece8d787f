"""Reward responses that think in <think>, answer correctly in <answer>, and are brief.

The format earns 0.2, the right answer 0.8, and beyond TARGET words the reward shrinks, to half at twice as many.
Dynamic filtering considers only the answer.

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data data.jsonl \\
        --input_key question --label_key answer --apply_chat_template --advantage_estimator reinforce_baseline \\
        --n_samples_per_prompt 8 --dynamic_filtering --remote_rm_url examples/rewards/format_and_length.py
"""

import re

TARGET = 200  # words
SHAPE = re.compile(r"\s*<think>(?P<thought>.+?)</think>\s*<answer>(?P<answer>.+?)</answer>", re.DOTALL)


def reward_func(queries, prompts, labels, **kwargs):
    rewards, scores, well_formed, lengths = [], [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query.removeprefix(prompt)
        found = SHAPE.match(response)
        right = found is not None and same(found["answer"], label)
        words = len(response.split())
        rewards.append((0.2 * (found is not None) + 0.8 * right) * min(1.0, TARGET / max(words, 1)))
        scores.append(float(right))
        well_formed.append(float(found is not None))
        lengths.append(float(words))
    return {
        "rewards": rewards,
        "scores": scores,
        "extra_logs": {"well_formed": well_formed, "words": lengths},
    }


def same(answer, label):
    """Equal up to case, spaces and a full stop."""
    return tidy(answer) == tidy(str(label))


def tidy(text):
    return " ".join(text.lower().split()).rstrip(".")
