"""Reward 1 if the answer of a response matches the label, 0 otherwise.

The answer is the last line "Answer: ...", else the last \\boxed{...}. Answers are compared as text and as numbers, and
with math-verify (pip install 'math-verify[antlr4_13_2]') as mathematics.

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data zhuzilin/dapo-math-17k \\
        --input_key prompt --label_key label --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --remote_rm_url examples/python/math_reward_func.py
"""

import re

from openrlhf.utils import extract_boxed_answer, grade_answer

ANSWER = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


def reward_func(queries, prompts, labels, **kwargs):
    found = [answer_in(query.removeprefix(prompt)) for query, prompt in zip(queries, prompts, strict=True)]
    right = [float(grade_answer(answer, label)) for answer, label in zip(found, labels, strict=True)]
    return {
        "rewards": right,
        "scores": right,
        "extra_logs": {"math_accuracy": right, "answered": [float(answer is not None) for answer in found]},
    }


def answer_in(response):
    lines = ANSWER.findall(response)
    return lines[-1].strip() if lines else extract_boxed_answer(response)
