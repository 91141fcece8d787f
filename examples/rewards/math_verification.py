"""Reward 1 if the final answer of a response equals the label, 0 otherwise; compares mathematics, not text.

The label is the answer as LaTeX or as a plain number. Needs math-verify:

    pip install 'math-verify[antlr4_13_2]'

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data openai/gsm8k@main \\
        --input_key question --label_key answer --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --remote_rm_url examples/rewards/math_verification.py
"""

import time

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError("math_verify is not installed: pip install 'math-verify[antlr4_13_2]'") from None


GROUP_SECONDS = 120  # for all samples of a call; towers of powers must not use up --reward_timeout (180)


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    seconds = min(5, max(1, GROUP_SECONDS // (2 * len(responses))))  # to parse an answer, and to compare it
    deadline = time.monotonic() + GROUP_SECONDS
    graded = [grade(response, label, seconds, deadline) for response, label in zip(responses, labels, strict=True)]
    correct = [float(is_correct) for is_correct, _ in graded]
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {"math_accuracy": correct, "answer_found": [float(found) for _, found in graded]},
    }


def grade(response, label, seconds, deadline):
    """Return whether the answer is correct, and whether there is one; after the deadline, neither is checked."""
    if time.monotonic() > deadline:
        return False, False
    answer = parse(response, parsing_timeout=seconds)
    return verify(gold(label), answer, timeout_seconds=seconds), bool(answer)


def gold(label):
    """Return the reference; in GSM8K it follows #### at the end of a worked solution."""
    answer = str(label).rsplit("####", 1)[-1].strip().replace(",", "")
    return parse(f"\\boxed{{{answer}}}")
