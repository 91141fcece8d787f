"""The extension of vLLM's workers, in whichever process they run: load new weights without a restart.

`build_engine` names `WeightLoading` as the worker extension, and `StepLoop` calls its method by name on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.platforms import current_platform

from openrlhf.errors import RolloutError
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.vllm_layers import COPIED, Sampled, method_of, read_back, reloading, sampled
from openrlhf.rollout.weight_receiver import WeightsPerWorker


@dataclass(frozen=True)
class Received:
    """One worker's report about the weights that arrived."""

    checksums: dict[str, int]  # by checkpoint name; empty unless requested
    read_back: frozenset[str] = frozenset()  # names of tensors that were read back from the layers as they arrived
    missing: tuple[str, ...] = ()  # parameters of the model for which no weights arrived
    cut_short: str = ""  # why the transfer stopped early: the model is intact, but mixes old and new weights


class WeightLoading:
    """Base class that vLLM adds to its worker class; the method is called by name in every worker."""

    vllm_config: Any
    model_runner: Any
    rank: int

    @torch.no_grad()
    def receive_weights(self, weights: Iterable[tuple[str, Tensor]], *, verify: bool) -> Received:
        """Load `weights`, iterating over them once, and report what arrived."""
        _settle()
        model: Any = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        own = weights.by_worker[self.rank] if isinstance(weights, WeightsPerWorker) else weights
        at_once = loads_by_copying(model)
        model_config = self.vllm_config.model_config
        arrivals = Arrivals(own, verify=verify, kept=not at_once, dtype=model_config.dtype)
        with set_current_vllm_config(self.vllm_config):
            with nullcontext() if at_once else reloading(model, model_config):
                try:
                    loaded, cut_short = model.load_weights(arrivals), ""
                except RolloutError as error:  # from the sender. Raising it would leave other workers' answers unread
                    loaded, cut_short = None, error.message
            _settle()
            if cut_short:
                return Received({}, cut_short=cut_short)
            absent = _not_loaded(expected, loaded) if loaded is not None else set()
            fused = getattr(model, "packed_modules_mapping", {})
            missing = tuple(sorted(absent | _absent_parts(expected, fused, arrivals.names)))
            return Received(arrivals.checksums, read_back(model, fused, arrivals.sampled), missing)


class Arrivals:
    """Weights on their way into the model; records their names and, with `verify`, their checksums.

    A tensor is valid only until the next one is requested, so it is copied if it is `kept` until its layer is complete.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], *, verify: bool, kept: bool, dtype: torch.dtype) -> None:
        self.weights = weights
        self.verify = verify
        self.kept = kept
        self.dtype = dtype  # of the engine
        self.names: set[str] = set()
        self.checksums: dict[str, int] = {}
        self.sampled: dict[str, Sampled] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.names.add(name)
            if self.verify:
                self.checksums[name] = checksum(tensor)
                self.sampled[name] = sampled(tensor, self.dtype)
            yield name, tensor.clone() if self.kept else tensor


def _settle() -> None:
    """Synchronise the device: vLLM works on a stream of its own, which is not ordered with the trainer's.

    Before loading, the trainer's last kernels must have written the weights; after it, the trainer may change them.
    """
    if not current_platform.is_cpu():
        torch.accelerator.synchronize()


def loads_by_copying(model: nn.Module) -> bool:
    """Return False if vLLM stores weights in another form than the checkpoint, which loading must produce again.

    On CPU, matrices are packed for its kernels; experts may be shuffled; latent attention stores products of weights.
    """
    return not current_platform.is_cpu() and not any(
        isinstance(module, MLAAttention) or not isinstance(method_of(module), (*COPIED, type(None)))
        for module in model.modules()
    )


def _not_loaded(parameters: set[str], loaded: Iterable[str]) -> set[str]:
    """Return parameters that the loader did not report.

    vLLM 0.26 reports experts without the module that holds them.
    """
    reported = set(loaded)
    return {name for name in parameters if not reported & {name, name.replace(".routed_experts.", ".")}}


def _absent_parts(parameters: set[str], fused: dict[str, list[str]], names: set[str]) -> set[str]:
    """Return the missing parts of fused matrices.

    vLLM counts a fused matrix as loaded as soon as one of its parts (q of q, k and v) has arrived.
    """
    absent = set()
    for parameter in parameters:
        for whole, parts in fused.items():
            if f".{whole}." in parameter:
                of_parts = {parameter.replace(f".{whole}.", f".{part}.") for part in parts}
                if not names.isdisjoint(of_parts):
                    absent |= of_parts - names
    return absent
