"""Run folders for the page: written by hand, line by line as the trainers write them, or by a real tiny run."""

import json
import random

from tests.commands import run_command
from tests.rl.toy_task import SMALL, make_prompts
from tests.tiny import make_model, make_tokenizer
from tests.toy_data import ANSWERS, answers, write_rows

HOSTILE = "<img src=x onerror=alert(1)></script><script>document.title='owned'</script>"
TEXTS = ["请把数字排序", "数と字をソートする", "set my_var = 1", "my own variable", "myvar"]
SEARCHES = [  # a search, and the indices of the texts that it finds
    ("排序", [0]),
    ("序排", []),
    ("数字", [0]),
    ("字", [0, 1]),
    ("ソート 数", [1]),
    ("my", [2, 3, 4]),
    ("my_v", [2]),
    ("my v", [2, 3]),
    ("var", [2, 3]),
    ("_ my_", [2, 3, 4]),
    ("_", []),
]
TOKENIZER = make_tokenizer()
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        done = self.turn == 2
        feedback = "" if done else "again!"
        reward = sum(letter.islower() for letter in states["action_text"]) / 8
        return {"rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done, "extra_logs": {}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def write_metrics(run_dir, rows):
    """Write metrics.jsonl; each row is (kind, step, values)."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        for kind, step, values in rows:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")


def record(step, index, response, *, reward=0.5, prompt="sort 31>", truncated=False):
    """Return a line of a record."""
    encode = TOKENIZER.backend_tokenizer.encode
    before, after = (encode(text, add_special_tokens=False).ids for text in (prompt, response))
    mask = [False] * len(before) + [True] * len(after)
    return {
        "advantages": [(reward - 0.5) * acts for acts in mask],
        "old_log_probs": [(-0.25 + 0.05 * (place % 3)) * acts for place, acts in enumerate(mask)],
        "step": step,
        "prompt": {"index": index, "text": prompt, "input_ids": [], "label": "13", "datasource": "default"},
        "input_ids": before + after,
        "action_mask": mask,
        "rollout_log_probs": [-0.25 * acts for acts in mask],
        "reward": reward,
        "score": float(reward > 0.5),
        "truncated": truncated,
        "version": step - 1,
        "extra_logs": {"exact": 1.0},
        "response": response,
    }


def write_step(run_dir, step, rows):
    """Write the record of a step; a row is a dict or a line as it is."""
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"step_{step:06d}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_run(save_path, *, steps=30, recorded=3, flags=None):
    """Write a --save_path with a tokenizer and a run: all kinds of metrics, and four samples for each of 3 prompts."""
    run_dir = save_path / "run"
    rng = random.Random(0)
    rows = [("eval", 0, {"eval_default_reward": 0.1})]
    for step in range(1, steps + 1):
        values = {
            "return": 0.0,
            "group_reward_std": 0.3,
            "reward": step / steps,
            "kl": 0.01 * step,
            "entropy": 2 - step / steps,
            "response_length": 5.0,
            "ppo_clip_ratio": rng.random() / 10,
            "vllm_kl": 1e-7,
            "policy_loss": rng.random(),
            "timing/generation": 0.5,
            "actor_lr": 1e-4,
            "mine": float(step),
        }
        rows.append(("train", step, values))
    write_metrics(run_dir, [*rows, ("eval", steps, {"eval_default_reward": 0.9})])
    for step in range(1, recorded + 1):
        write_step(
            run_dir,
            step,
            [
                record(step, index, f"word{index} a{sample}", reward=(index + sample) / 6, truncated=sample == 3)
                for index in range(3)
                for sample in range(4)
            ],
        )
    content = {"flags": {"pretrain": "org/model", "max_ckpt_mem": float("inf")} | (flags or {}), "cwd": str(save_path)}
    (run_dir / "config.json").write_text(json.dumps(content))
    TOKENIZER.save_pretrained(save_path)
    return run_dir


def train_with_agent(folder):
    """Train two steps with an agent of two turns; return the --save_path."""
    (folder / "agent.py").write_text(AGENT)
    flags = SMALL | {
        "pretrain": make_model(folder / "model"),
        "prompt_data": write_rows(folder / "prompts.jsonl", make_prompts(8)),
        "agent_func_path": str(folder / "agent.py"),
        "max_steps": 2,
        "num_episodes": 2,
        "max_len": 64,
        "save_path": str(folder / "agent"),
        "ckpt_path": str(folder / "agent_ckpt"),
        "device": "cpu",
    }
    run_command("train_ppo", flags)
    return folder / "agent"


def train_supervised(folder):
    """Train one epoch of SFT; return the --save_path."""
    flags = ANSWERS | {
        "pretrain": make_model(folder / "base"),
        "dataset": write_rows(folder / "rows.jsonl", answers(16)),
        "train_batch_size": 8,
        "micro_train_batch_size": 8,
        "max_epochs": 1,
        "save_path": str(folder / "sft"),
        "ckpt_path": str(folder / "sft_ckpt"),
        "device": "cpu",
    }
    run_command("train_sft", flags)
    return folder / "sft"
