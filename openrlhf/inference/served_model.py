"""The reward model behind serve_rm: it turns texts into tokens, and tokens into rewards.

`serve` opens it, `serve_app` calls `tokenize` on one thread and the `Batcher` calls `score` on another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from openrlhf.config.commands import ServeRMConfig
from openrlhf.data.collate import Layout
from openrlhf.data.retokenization import Retokenizer
from openrlhf.errors import ConfigError
from openrlhf.models.load import load_tokenizer, read_config, usable_length
from openrlhf.rl.reward_models import RewardModel, Row, load_reward_model
from openrlhf.rl.samples import Batching


@dataclass(frozen=True)
class ServedModel:
    """Tokenizer and reward model; each may be used by one thread at a time."""

    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    max_len: int  # maximum tokens to score per text

    def tokenize(self, texts: Sequence[str]) -> list[Row]:
        """Tokenise each text unchanged: no special tokens are added, and nothing is truncated."""
        ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int32) for row in ids]

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the normalised rewards of the rows, from one forward."""
        return self.model.score_rows(rows).tolist()


def open_served_model(config: ServeRMConfig, device: torch.device) -> ServedModel:
    """Load the model of --reward_pretrain after checking that it gives one score per text."""
    flags, name = config.server, str(config.server.reward_pretrain)
    settings = read_config(name, config.model)
    check_is_outcome_model(name, settings)
    tokenizer = load_tokenizer(name, config.model)
    layout = Layout(flags.packing_samples, tokenizer.pad_token_id)
    model = load_reward_model(
        name,
        config.model,
        device,
        texts=Retokenizer(tokenizer, tokenizer, shared=True),
        batching=Batching(layout, size=sys.maxsize),  # the server's own batcher already chose the rows of a forward
        head_prefix=config.head.value_head_prefix,
        normalize=flags.normalize_reward,
    )
    return ServedModel(model, tokenizer, usable_length(name, settings, flags.max_len))


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
            f"{name} is a classifier with {settings.num_labels} classes: expected a reward model with one output"
            " (num_labels 1)"
        )
