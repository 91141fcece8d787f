"""Reward 1 if the final answer of a response equals the label, 0 otherwise; compares mathematics, not text.

The label is the answer as LaTeX or as a plain number. Needs math-verify:

    pip install 'math-verify[antlr4_13_2]'

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data openai/gsm8k@main \\
        --input_key question --label_key answer --apply_chat_template --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --remote_rm_url examples/rewards/math_verification.py
"""

try:
    from math_verify import parse, verify
except ImportError:
    raise ImportError("math_verify is not installed: pip install 'math-verify[antlr4_13_2]'") from None


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    parsed = [parse(response) for response in responses]
    correct = [float(verify(gold(label), answer)) for label, answer in zip(labels, parsed, strict=True)]
    return {
        "rewards": correct,
        "scores": correct,
        "extra_logs": {"math_accuracy": correct, "answer_found": [float(bool(answer)) for answer in parsed]},
    }


def gold(label):
    """Return the reference; in GSM8K it follows #### at the end of a worked solution."""
    answer = str(label).rsplit("####", 1)[-1].strip().replace(",", "")
    return parse(f"\\boxed{{{answer}}}")
