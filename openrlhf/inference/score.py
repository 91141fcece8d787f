"""Scoring for batch_inference: score the answers of a dataset with an outcome or a process reward model.

`batch_inference.run` calls `score` for the answers that are still missing in the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.data.answers import Answer
from openrlhf.data.collate import Layout
from openrlhf.data.retokenization import Retokenizer
from openrlhf.errors import RewardError
from openrlhf.inference.engine import choose_model_device
from openrlhf.inference.parts import OutputParts
from openrlhf.inference.postprocess import ScoredRow
from openrlhf.inference.progress import RowProgress
from openrlhf.models.load import read_config
from openrlhf.monitor import say
from openrlhf.rl.reward_models import OutcomeRewardModel, RewardModel, load_reward_model
from openrlhf.rl.samples import Batching


def score(
    config: BatchInferenceConfig, answers: Sequence[Answer], parts: OutputParts, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Score the missing rows of this process in batches of similar length, longest first."""
    missing = sorted(parts.missing, key=lambda number: -len(answers[number].input_ids))
    if not missing:
        return
    model = open_reward_model(config, tokenizer)
    size = config.task.micro_batch_size
    progress = RowProgress("score", parts)
    with progress:
        for start in range(0, len(missing), size):
            numbers = missing[start : start + size]
            rewards = model.score_rows([answers[number].input_ids for number in numbers]).tolist()
            for number, reward in zip(numbers, rewards, strict=True):
                answer = answers[number]
                if not math.isfinite(reward):
                    raise RewardError(
                        f"the reward of answer {answer.response[:80]!r} is not finite: the model returned {reward}"
                    )
                row: ScoredRow = {"input": answer.prompt, "output": answer.response, "reward": reward}
                if answer.index is not None:
                    row["index"] = answer.index
                parts.write(number, row)
                progress.count(len(answer.input_ids))


def open_reward_model(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    """Load the model in --pretrain; its scores are normalised if its config.json has a mean and std."""
    name = str(config.model.pretrain)
    device = choose_model_device(config.model, name, config.task.local_rank)
    model = load_reward_model(
        name,
        config.model,
        device,
        texts=Retokenizer(tokenizer, tokenizer, shared=True),
        batching=Batching(Layout(packing=False, pad_id=tokenizer.pad_token_id), config.task.micro_batch_size),
        head_prefix=config.head.value_head_prefix,
        normalize=(normalizes := "mean" in read_config(name, config.model).to_dict()),
    )
    if normalizes and isinstance(model, OutcomeRewardModel):
        mean, std = model.mean, model.std
        say(f"rewards are normalised by the mean ({mean:.4g}) and std ({std:.4g}) in the model's config.json")
    return model
