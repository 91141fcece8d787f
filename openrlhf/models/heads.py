"""Scalar heads of reward models and critics: how they begin, and how plain Transformers reads them back."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCALAR_HEAD = "score"  # the name that AutoModelForSequenceClassification gives its head


def init_scalar_head(model: PreTrainedModel) -> None:
    """Small enough that the first rewards are near zero: a standard deviation of 1 / (hidden + 1)."""
    head: Any = model.get_submodule(SCALAR_HEAD)
    with torch.no_grad():
        head.weight.normal_(mean=0.0, std=1.0 / (head.in_features + 1))


def separate_pad_from_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A pad id that is not EOS, in model and tokenizer.

    Transformers pools a sequence classifier at the last token that is not the pad token. Where EOS is the pad, that
    would be the token before the end, while we score at the end.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        spare = [tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
        token = next((token for token in spare if token and token != tokenizer.eos_token), None)
        if token is None:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
            embeddings: Any = model.get_input_embeddings()
            if len(tokenizer) > embeddings.weight.shape[0]:
                model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # padding is never looked at
        else:
            tokenizer.pad_token = token
    config: Any = model.config
    config.pad_token_id = tokenizer.pad_token_id


def finishing_of(config: Any) -> tuple[float | None, float]:
    """(soft cap, factor) that a model applies to its logits after the head; (None, 1) for most.

    Gemma caps, Cohere multiplies by logit_scale, Granite divides by logits_scaling.
    """
    values = config.to_dict()
    cap = values.get("final_logit_softcapping")
    return cap, float(values.get("logit_scale") or 1.0) / float(values.get("logits_scaling") or 1.0)


class VocabularyHead:
    """The projection to the vocabulary with everything that the model does to its logits."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module = module
        self.cap, self.factor = finishing_of(config)

    @property
    def is_plain(self) -> bool:
        """True where the module's output is the logits."""
        return self.cap is None and self.factor == 1.0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.module(hidden)
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits
