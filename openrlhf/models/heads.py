"""Heads: the scalar head of reward models and critics, and the projection to the vocabulary.

`Network` computes hidden states with the decoder and applies a head to the ones it needs. Some models scale or cap the
logits after the vocabulary head. To support them all without special cases, the model's own forward is run with its
decoder, and in `logit_factor` also its head, replaced:

    the model's forward      decoder  ->  head  ->  scale, cap, ...  ->  logits
    `finished_logits`        given hidden states  ->  head  ->  scale, cap, ...  ->  logits
    `logit_factor`           given hidden states  ->  identity  ->  scale, cap, ...  ->  is it a constant factor?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.errors import ConfigError
from openrlhf.models.deferred import deferred_weights

SCALAR_HEAD = "score"  # the name that AutoModelForSequenceClassification gives its head


def init_scalar_head(model: PreTrainedModel) -> None:
    """Initialise the scalar head so that the first rewards are near zero: standard deviation 1 / (hidden + 1)."""
    weight = model.get_parameter(f"{SCALAR_HEAD}.weight")  # [1, hidden]
    with torch.no_grad():
        weight.normal_(mean=0.0, std=1.0 / (weight.shape[1] + 1))


def separate_pad_from_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give model and tokenizer a pad token other than EOS.

    A sequence classifier of Transformers scores the last token that is not the pad token. If the pad token is EOS, that
    is the token before EOS, whereas `Network` scores EOS.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        spare = [tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
        token = next((token for token in spare if token and token != tokenizer.eos_token), None)
        if token is None:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
            add_missing_embeddings(model, tokenizer)
        else:
            tokenizer.pad_token = token
    model.config.pad_token_id = tokenizer.pad_token_id


def add_missing_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add an embedding for a padding token that was added to the tokenizer; its value is never used."""
    embeddings = model.get_input_embeddings()
    if len(tokenizer) > embeddings.get_parameter("weight").shape[0]:
        deferred_weights(model).fill(embeddings.parameters())
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


@dataclass(frozen=True)
class VocabularyHead:
    """Map from hidden states to logits, exactly as in the model's own forward.

    Models may scale or cap their logits, or transform the hidden states first, with different code in each family. So
    the model's forward is run with a stand-in for the decoder that returns the given hidden states. If the model only
    multiplies the output of its head by a constant (`factor`), just the head is called.
    """

    model: PreTrainedModel
    factor: float | None  # see `logit_factor`

    @property
    def module(self) -> nn.Module:
        return output_embeddings(self.model)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states [tokens, hidden] to logits [tokens, vocabulary]."""
        if self.factor is None:
            return finished_logits(self.model, hidden[None])[0]
        logits = self.module(hidden)
        return logits if self.factor == 1.0 else logits * self.factor


def output_embeddings(model: PreTrainedModel) -> nn.Module:
    """Return a model's projection to the vocabulary; raise a ConfigError if it has none."""
    module = model.get_output_embeddings()
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no projection to the vocabulary: expected a language model")
    return module


@torch.no_grad()
def logit_factor(model: PreTrainedModel) -> float | None:
    """Return the constant by which a model multiplies the output of its head; None if it does anything else.

    The head is replaced by the identity, so no weights are needed, and the model may be sharded or not loaded.
    """
    size = model.config.get_text_config().hidden_size
    hidden = torch.randn(1, 8, size, generator=torch.Generator().manual_seed(0)) * 8.0
    try:
        finished = finished_logits(model, hidden.to(model.device), identity=True)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # the forward needs more than the output of the head
    if finished.shape != hidden.shape:
        return None
    factor = float(finished.cpu().double().flatten()[0] / hidden.double().flatten()[0])
    return factor if torch.allclose(finished.cpu().float(), hidden * factor, rtol=1e-5, atol=1e-6) else None


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the attribute that holds a model's decoder, without the head."""
    name = model.base_model_prefix
    if name in model._modules:
        return name
    inner = [name for name, child in model._modules.items() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise ConfigError(
            f"{type(model).__name__} cannot be used: expected its decoder and its head to be separate modules"
        )
    return inner[0]


def finished_logits(model: PreTrainedModel, hidden: Tensor, *, identity: bool = False) -> Tensor:
    """Return the logits of a model's own forward for last hidden states [rows, tokens, hidden].

    With `identity`, its head is replaced by the identity.
    """
    name = decoder_name(model)
    swaps: list[tuple[nn.Module, str, nn.Module]] = [
        (model, name, StandIn(model._modules[name], DecoderOutput(hidden)))
    ]
    if identity:
        head = output_embeddings(model)
        places = [
            (parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is head
        ]
        if not places:
            raise AttributeError("the head is not a module of the model")
        swaps.append((*places[0], StandIn(head, output=None)))
    kept = [parent._modules[name] for parent, name, _ in swaps]
    for parent, name, module in swaps:
        parent._modules[name] = module
    try:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)  # [rows, tokens], not used
        return model.forward(input_ids=ids).logits
    finally:
        for (parent, name, _), module in zip(swaps, kept, strict=True):
            parent._modules[name] = module


class StandIn(nn.Module):
    """Stand-in for a module, with the same attributes; forward returns `output`, or its input if that is None."""

    def __init__(self, original: nn.Module | None, output: DecoderOutput | None) -> None:
        super().__init__()
        # Bypass nn.Module.__setattr__, which would register the original as a submodule of two parents.
        self.__dict__ |= {"original": original, "output": output}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        output = self.__dict__["output"]
        return args[0] if output is None else output

    @property
    def decoder(self) -> StandIn:
        """Return this object itself, for models whose decoder contains another decoder."""
        return self


@dataclass(frozen=True)
class DecoderOutput:
    """A decoder's output with the last hidden states; all other fields are None."""

    last_hidden_state: Tensor  # [rows, tokens, hidden]

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None

    def __getattr__(self, name: str) -> None:
        return None
