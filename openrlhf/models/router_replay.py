"""Router replay: record the experts that a mixture of experts chooses for each token, or make it choose those given.

An engine and a trainer round differently. If two experts are almost equally good for a token, they may choose different
ones, and their log-probs differ by far more than rounding error. With --router_replay, the engine reports its choices,
and the policy computes each token with the same experts (arXiv 2510.11370). The router weights them by its own logits,
so it still gets gradients:

    engine   router logits -> topk -> experts 3 5 -> weights from logits 3 5
                                         |
    trainer  router logits -> topk -> experts 3 5 -> weights from logits 3 5

`RoutedLayers` replaces the forward pass of each module that routes tokens. While that runs, calls of `topk` over all
experts are intercepted, so the code of the model family computes everything else as it does without replay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from openrlhf.errors import BackendError, ConfigError
from openrlhf.models.experts import expert_modules, number_of_experts
from openrlhf.types import NOT_RECORDED

LAYER = re.compile(r"\.(\d+)\.")  # the number of a decoder layer in the name of a module


class RoutedLayers:
    """The modules of a model that route tokens to experts, one per layer with experts."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.layers = list(_replace_forwards(decoder))
        self.num_hidden_layers = int(decoder.config.get_text_config().num_hidden_layers)
        if not self.layers:
            raise ConfigError(
                f"--router_replay: {type(decoder).__name__} has no experts, or routes tokens in a way that cannot be"
                " replayed",
                try_this="without --router_replay",
            )

    def replay(self, recorded: Tensor | None) -> None:
        """Choose these experts in all further passes, [tokens, layers, k], or let the routers choose if None.

        Choices stay in place until the next call, because a backward pass may recompute activations. A token whose
        numbers are NOT_RECORDED, or not k different ones, is routed as usual: some engines report zeros for tokens that
        they did not record. `layers` may also count the layers without experts.
        """
        if recorded is None:
            for layer in self.layers:
                layer.replayed = None
            return
        self._check_numbers(recorded)
        found = recorded.transpose(0, 1).long()  # [layers, tokens, k]
        if len(found) not in (len(self.layers), self.num_hidden_layers):
            raise BackendError(
                f"the engine reported experts of {len(found)} layers: expected {len(self.layers)}, the layers with"
                " experts",
                try_this="without --router_replay",
            )
        repeated = (found.sort(-1).values.diff(dim=-1) == 0).any(-1, keepdim=True)  # [layers, tokens, 1]
        found = found.masked_fill(repeated, NOT_RECORDED)
        for place, layer in enumerate(self.layers):
            layer.replayed = found[place if len(found) == len(self.layers) else layer.number]

    def _check_numbers(self, recorded: Tensor) -> None:
        """Reject indices of experts that do not exist, which would fail an assertion in a GPU kernel."""
        experts = self.layers[0].experts
        if not recorded.numel():
            return
        lowest, highest = torch.stack(recorded.aminmax()).tolist()
        if highest >= experts or lowest < min(NOT_RECORDED, 0):
            wrong = highest if highest >= experts else lowest
            raise BackendError(
                f"the engine reported expert {wrong}: expected numbers below {experts}, the number of experts",
                try_this="without --router_replay",
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the routers choose, and record their choices for `chosen`."""
        self.replay(None)
        for layer in self.layers:
            layer.records = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.records, layer.chosen = False, None

    @property
    def is_recording(self) -> bool:
        return self.layers[0].records

    def chosen(self) -> Tensor:
        """Return the experts chosen in the last pass while recording: [tokens, layers, k] int16."""
        found = [layer.chosen for layer in self.layers if layer.chosen is not None]
        return torch.stack(found, dim=1).to(torch.int16)


@dataclass(eq=False)
class RoutedLayer:
    """The forward pass of a module that routes tokens to experts."""

    module: Any  # a module of a Transformers model
    number: int  # number of its decoder layer, from 0
    experts: int
    replayed: Tensor | None = None  # [tokens, k]: choose these experts
    records: bool = False
    chosen: Tensor | None = None  # [tokens, k]: choices of the last pass, if recorded

    @torch.compiler.disable
    def __call__(self, *arguments: object, **named: object) -> object:
        if self.replayed is None and not self.records:
            return type(self.module).forward(self.module, *arguments, **named)
        with ExpertChoice(self) as choice:
            outputs = type(self.module).forward(self.module, *arguments, **named)
        if not choice.is_made:
            raise BackendError(
                f"{type(self.module).__name__} did not choose its experts by topk, so they cannot be replayed",
                try_this="without --router_replay",
            )
        return outputs

    def choose(self, scores: Tensor, own: Tensor) -> Tensor:
        """Return the experts to use, [tokens, k], given the scores [tokens, experts] and the router's own choice."""
        chosen = own
        if self.replayed is not None:
            if self.replayed.shape != own.shape:
                expected, found = list(own.shape), list(self.replayed.shape)
                raise BackendError(f"recorded experts of layer {self.number}: expected {expected} numbers, got {found}")
            chosen = torch.where(self.replayed == NOT_RECORDED, own, self.replayed)
        if self.records:
            self.chosen = chosen
        return chosen


class ExpertChoice(TorchFunctionMode):
    """Intercepts `topk` over the scores of all experts, [tokens, experts]."""

    def __init__(self, layer: RoutedLayer) -> None:
        super().__init__()
        self.layer = layer
        self.is_made = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.ndim != 2 or scores.shape[1] != self.layer.experts:  # such as a topk over groups of experts
            return found
        self.is_made = True
        chosen = self.layer.choose(scores, found.indices)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


def _replace_forwards(decoder: PreTrainedModel) -> Iterator[RoutedLayer]:
    """Replace the forward pass of the module around the experts of each layer."""
    from peft.tuners.lora import LoraLayer

    modules, holders = dict(decoder.named_modules()), set(expert_modules(decoder))
    for name in [name for name, module in modules.items() if module in holders]:
        around = name.rpartition(".")[0]
        while isinstance(modules[around], LoraLayer):  # adapters of experts wrap them
            around = around.rpartition(".")[0]
        number = LAYER.search(name)
        if number is not None:
            module: nn.Module = modules[around]
            layer = RoutedLayer(module, int(number.group(1)), number_of_experts(decoder.config))
            vars(module)["forward"] = layer
            yield layer
