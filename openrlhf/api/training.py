"""The training commands as Python functions.

The functions take the flags of their command as keywords, with the same names, defaults, checks and errors. Datasets,
rewards and agents may also be objects. Errors are raised as `OpenRLHFError`s, which are also standard errors such as
ValueError. Ctrl-C ends a run after its step with a checkpoint and raises KeyboardInterrupt; `load_checkpoint=True`
resumes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from openrlhf.api.arguments import as_arguments
from openrlhf.api.keywords import (
    DPOKeywords,
    KDKeywords,
    KTOKeywords,
    PRMKeywords,
    RLKeywords,
    RMKeywords,
    SFTKeywords,
    takes_flags,
)
from openrlhf.api.result import OnStep, StepCallback, TrainResult, read_history
from openrlhf.api.start import prepare, run_and_restore
from openrlhf.config.commands import TrainingConfig


@takes_flags("train_sft", SFTKeywords)
def train_sft(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Fine-tune a model on prompts and responses.

    >>> rows = [{"question": "1+1", "answer": "2"}, {"question": "2+1", "answer": "3"}]
    >>> result = train_sft(
    ...     pretrain="./model", dataset=rows, input_key="question", output_key="answer", save_path="./sft"
    ... )
    >>> result.model
    PosixPath('sft')
    """
    return train("train_sft", keywords, on_step)


@takes_flags("train_rm", RMKeywords)
def train_rm(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a reward model on pairs of responses.

    >>> pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    >>> train_rm(pretrain="./model", dataset=pairs, prompt_key="prompt", save_path="./rm").steps
    1
    """
    return train("train_rm", keywords, on_step)


@takes_flags("train_dpo", DPOKeywords)
def train_dpo(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a model on pairs of responses with DPO, IPO or cDPO.

    >>> pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}]
    >>> result = train_dpo(pretrain="./model", dataset=pairs, prompt_key="prompt", beta=0.1, save_path="./dpo")
    >>> sorted(result.metrics)[:3]
    ['acc', 'acc_mean', 'chosen_reward']
    """
    return train("train_dpo", keywords, on_step)


@takes_flags("train_kto", KTOKeywords)
def train_kto(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a model on single responses that are labelled as good or bad (KTO).

    >>> rows = [{"input": "1+1=", "output": "2", "label": 1}, {"input": "1+1=", "output": "3", "label": 0}]
    >>> train_kto(pretrain="./model", dataset=rows, output_key="output", save_path="./kto").steps
    1
    """
    return train("train_kto", keywords, on_step)


@takes_flags("train_kd", KDKeywords)
def train_kd(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a model to predict like a larger one (knowledge distillation).

    >>> rows = [{"input": "1+1=", "output": "2"}]
    >>> train_kd(pretrain="./model", teacher_model="./model", dataset=rows, save_path="./student").steps
    1
    """
    return train("train_kd", keywords, on_step)


@takes_flags("train_prm", PRMKeywords)
def train_prm(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a process reward model on texts with a label for each step.

    >>> rows = [{"input": "1+1=2#2+1=4#", "label": ["+", "-"]}]
    >>> train_prm(
    ...     pretrain="./model", dataset=rows, placeholder_token="#", reward_tokens=["+", "-"], save_path="./prm"
    ... ).steps
    1
    """
    return train("train_prm", keywords, on_step)


@takes_flags("train_ppo", RLKeywords)
def train_ppo(*, on_step: OnStep | None = None, **keywords: object) -> TrainResult:
    """Train a policy with PPO, REINFORCE++, RLOO, GRPO or Dr. GRPO.

    `reward` is a function `(queries, prompts, labels)`, sync or async, that returns one reward per query; `agent` is a
    subclass of `AgentInstanceBase`, an executor or a function. Both may also be files or, for a reward, addresses.
    Objects run in a thread of this process; files run in separate processes, so a crash does not end the run.

    >>> def brevity(queries, prompts, labels):
    ...     return [-len(query) for query in queries]
    >>> result = train_ppo(
    ...     pretrain="./model",
    ...     prompt_data=[{"input": "1+1="}, {"input": "2+1="}],
    ...     reward=brevity,
    ...     advantage_estimator="group_norm",
    ...     n_samples_per_prompt=4,
    ...     generate_max_len=4,
    ...     init_kl_coef=0,
    ...     save_path="./grpo",
    ... )
    >>> len(result.curve("reward")[1])
    1
    """
    return train("train_ppo", keywords, on_step)


def train(command: str, keywords: Mapping[str, object], on_step: OnStep | None) -> TrainResult:
    """Run a training command with keywords; call `on_step` after each logged step and evaluation."""
    with as_arguments(command, keywords) as argv:
        config: TrainingConfig = prepare(command, argv)
        outcome = run_and_restore(command, config, [] if on_step is None else [StepCallback(on_step)])

    from openrlhf.training import checkpoint  # imports torch, so only after the checks
    from openrlhf.training.run_directory import run_folder

    run_dir = run_folder(config)
    return TrainResult(
        model=Path(config.checkpoints.save_path),
        run_dir=run_dir,
        checkpoints=tuple(checkpoint.finished(Path(config.checkpoints.ckpt_path))),
        steps=outcome.steps if outcome else 0,
        metrics=outcome.train if outcome else {},
        evaluation=outcome.evaluation if outcome else {},
        history=read_history(run_dir) if outcome else (),
    )
