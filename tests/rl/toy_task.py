"""A toy RL task that a model of a few thousand parameters learns in a second: answer in lowercase letters."""

import json

import pyarrow.parquet as pq

from tests.toy_data import write_rows

LENGTH = 8  # tokens of a response
REWARD = f"""
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = [sum(letter.islower() for letter in answer) / {LENGTH} for answer in answers]
    return {{"rewards": rewards, "scores": rewards, "extra_logs": {{"labelled": [len(label) for label in labels]}}}}
"""
LABEL_REWARD = """
def reward_func(queries, prompts, labels):
    rewards = [float(label) for label in labels]
    return {"rewards": rewards, "scores": rewards}
"""
SMALL = {  # flags that suit a tiny model: one optimizer step of 32 samples per rollout
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "micro_rollout_batch_size": 16,
    "train_batch_size": 32,
    "micro_train_batch_size": 16,
    "prompt_max_len": 16,
    "generate_max_len": LENGTH,
    "init_kl_coef": 0.0,
    "actor_learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "lr_warmup_ratio": 0.0,
    "lr_scheduler": "constant",
    "advantage_estimator": "group_norm",
    "label_key": "label",
}


def make_prompts(count, label="x"):
    """Return different prompts of two to five letters."""
    texts = [chr(97 + number % 26) + chr(97 + number // 26) + "c" * (number % 4) for number in range(count)]
    return [{"input": text, "label": label} for text in texts]


def task_flags(folder, rows, source=REWARD):
    """Write the prompts and the reward function; return the flags that name them."""
    (folder / "reward.py").write_text(source)
    return {"prompt_data": write_rows(folder / "prompts.jsonl", rows), "remote_rm_url": str(folder / "reward.py")}


def read_rollouts(ran, step):
    """Return the recorded samples of a step."""
    rows = pq.read_table(ran.save_path / "run" / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    for row in rows:
        row["step_rewards"] = [(own["place"], own["reward"]) for own in row["step_rewards"]]
        row["extra_logs"] = json.loads(row["extra_logs"])
    return rows
