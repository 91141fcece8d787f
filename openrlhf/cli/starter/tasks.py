"""The tasks of `openrlhf init`: the command of each, sensible values for its flags, and what its rows look like.

The values suit a model of 1.5B parameters. All its weights are trained, which takes a GPU with 48 to 80 GB; lora_rank
needs far less. `recipes/` has files by GPU size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

Value: TypeAlias = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True)
class Starter:
    """How a task is trained."""

    what: str
    command: str
    rows: str  # an example of a row, as JSON
    values: Mapping[str, Value]  # values of the flags that the task sets


def flags(*others: Mapping[str, Value], **values: Value) -> dict[str, Value]:
    """Combine values of flags; later ones override earlier ones."""
    combined: dict[str, Value] = {}
    for other in others:
        combined.update(other)
    return combined | values


MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
PAIR = '{"prompt": "Name a prime.", "chosen": "7 is prime.", "rejected": "8 is prime."}'
QUESTION = '{"question": "What is 2 + 3?", "answer": "5"}'

TRAINING = flags(pretrain=MODEL, packing_samples=True, gradient_checkpointing=True, micro_train_batch_size=2)
SUPERVISED = flags(TRAINING, train_batch_size=64, max_len=2048, max_epochs=1)
ANSWERS = flags(SUPERVISED, input_key="question", output_key="answer", apply_chat_template=True)
PAIRS = flags(SUPERVISED, dataset="./pairs.jsonl", prompt_key="prompt", apply_chat_template=True)
PROMPTS = flags(prompt_data="./prompts.jsonl", input_key="question", apply_chat_template=True)
RL = flags(TRAINING, PROMPTS, rollout_batch_size=32, max_new_tokens=512, actor_learning_rate=1e-6)
GROUPS_OF_4 = flags(RL, n_samples_per_prompt=4, train_batch_size=128)
REWARD_FUNCTION = flags(label_key="answer", remote_rm_url="./reward.py")
GROUPS_OF_8 = flags(RL, n_samples_per_prompt=8, train_batch_size=256, init_kl_coef=0)

STARTERS = {
    "sft": Starter(
        "Supervised fine-tuning on conversations",
        "train_sft",
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}',
        flags(
            SUPERVISED,
            dataset="./chats.jsonl",
            input_key="messages",
            apply_chat_template=True,
            multiturn=True,
            learning_rate=1e-5,
            max_epochs=2,
        ),
    ),
    "rm": Starter("A reward model from pairs of responses", "train_rm", PAIR, flags(PAIRS, learning_rate=9e-6)),
    "dpo": Starter("DPO on pairs of responses", "train_dpo", PAIR, flags(PAIRS, learning_rate=5e-7, beta=0.1)),
    "kto": Starter(
        "KTO on single responses with a label",
        "train_kto",
        '{"question": "Name a prime.", "answer": "7 is prime.", "label": 1}',
        flags(ANSWERS, dataset="./labelled.jsonl", label_key="label", learning_rate=5e-7, beta=0.1),
    ),
    "kd": Starter(
        "Distillation from a teacher with the same vocabulary",
        "train_kd",
        QUESTION,
        flags(
            ANSWERS,
            dataset="./answers.jsonl",
            teacher_model="Qwen/Qwen2.5-3B-Instruct",
            kd_coef=0.4,
            learning_rate=1e-5,
        ),
    ),
    "prm": Starter(
        "A process reward model from labelled steps",
        "train_prm",
        '{"text": "2 + 3 = 5 # 5 + 1 = 7 #", "labels": ["+", "-"]}',
        flags(
            SUPERVISED,
            dataset="./steps.jsonl",
            input_key="text",
            label_key="labels",
            placeholder_token="#",
            reward_tokens=("+", "-"),
            learning_rate=1e-6,
        ),
    ),
    "ppo": Starter(
        "PPO with a critic and a reward model",
        "train_ppo",
        QUESTION,
        flags(
            GROUPS_OF_4,
            reward_pretrain="./runs/rm",
            advantage_estimator="gae",
            critic_learning_rate=9e-6,
            init_kl_coef=0.01,
        ),
    ),
    "grpo": Starter(
        "GRPO with a reward function",
        "train_ppo",
        QUESTION,
        flags(GROUPS_OF_8, REWARD_FUNCTION, advantage_estimator="group_norm"),
    ),
    "reinforce": Starter(
        "REINFORCE++ with a reward function",
        "train_ppo",
        QUESTION,
        flags(GROUPS_OF_4, REWARD_FUNCTION, advantage_estimator="reinforce", init_kl_coef=0.001),
    ),
    "rloo": Starter(
        "RLOO with a reward function",
        "train_ppo",
        QUESTION,
        flags(GROUPS_OF_4, REWARD_FUNCTION, advantage_estimator="rloo", init_kl_coef=0.01),
    ),
    "agent": Starter(
        "GRPO with a multi-turn agent",
        "train_ppo",
        QUESTION,
        flags(
            GROUPS_OF_8,
            label_key="answer",
            agent_func_path="./agent.py",
            max_turns=3,
            max_len=4096,
            advantage_estimator="group_norm",
        ),
    ),
}

# By name: the choices of --task. Each task saves to its own folder.
TASKS: Mapping[str, Starter] = {
    name: replace(starter, values={**starter.values, "save_path": f"./runs/{name}"})
    for name, starter in STARTERS.items()
}
