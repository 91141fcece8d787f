"""The reward model of the server: it turns texts into tokens, and tokens into rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from openrlhf.config.commands import ServeRMConfig
from openrlhf.data.collate import Layout
from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.models.load import load_scalar_model, load_tokenizer, read_config, usable_length
from openrlhf.monitor import say
from openrlhf.rl.reward_models import scores_of
from openrlhf.training.backend import Frozen
from openrlhf.training.local import LocalFrozen

Row = NDArray[np.int32]


@dataclass(frozen=True)
class RewardModel:
    """Tokenizer and frozen scalar model; each may be used by one thread at a time."""

    model: Frozen
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    max_len: int
    mean: float = 0.0
    std: float = 1.0

    def read(self, texts: Sequence[str]) -> list[Row]:
        """Tokenise each text unchanged: no special tokens are added, and nothing is truncated."""
        ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int32) for row in ids]

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the normalised rewards of the rows, from one forward."""
        scores = scores_of(rows, self.model, self.layout)  # [rows]
        return ((scores - self.mean) / self.std).tolist()


def load_reward_model(config: ServeRMConfig, device: torch.device) -> RewardModel:
    """Load the model of --reward_pretrain after checking that it gives one score per text."""
    flags, name = config.server, str(config.server.reward_pretrain)
    settings = read_config(name, config.model)
    check_is_outcome_model(name, settings)
    tokenizer = load_tokenizer(name, config.model)
    model = load_scalar_model(
        name,
        config.model,
        device=device,
        packing=flags.packing_samples,
        head_prefix=config.head.value_head_prefix,
    )
    mean, std = saved_statistics(name, settings.to_dict()) if flags.normalize_reward else (0.0, 1.0)
    return RewardModel(
        LocalFrozen(Network(model, self_test=not config.model.skip_self_test), device),
        tokenizer,
        Layout(flags.packing_samples, tokenizer.pad_token_id),
        usable_length(name, settings, flags.max_len),
        mean,
        std,
    )


def check_is_outcome_model(name: str, settings: PretrainedConfig) -> None:
    """Reject process reward models and classifiers with several outputs."""
    if "placeholder_token" in settings.to_dict():
        raise ConfigError(
            f"{name} is a process reward model, which scores steps; train_ppo uses it without a server",
            try_this=f"openrlhf train_ppo --reward_pretrain {name}",
        )
    classifies = any("SequenceClassification" in kind for kind in settings.architectures or ())
    if classifies and settings.num_labels != 1:
        raise ConfigError(
            f"{name} sorts texts into {settings.num_labels} classes; a reward model has one output (num_labels 1)"
        )


def saved_statistics(name: str, saved: dict[str, Any]) -> tuple[float, float]:
    """Return the mean and std in the model's config.json; without them, (0, 1) and a notice."""
    if "mean" not in saved:
        say(f"--normalize_reward: {name} has no mean and std in its config.json, so its scores stay as they are")
    return saved.get("mean", 0.0), saved.get("std", 1.0)
