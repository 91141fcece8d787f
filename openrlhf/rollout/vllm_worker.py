"""What is added to vLLM's workers, in whichever process they live: new weights, without a restart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from openrlhf.errors import RolloutError
from openrlhf.rollout.channel import PerWorker
from openrlhf.rollout.checksum import checksum

COPIED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # loading these is copying into place


@dataclass(frozen=True)
class Received:
    """What one worker saw of a set of weights."""

    checksums: dict[str, int]  # by checkpoint name; empty unless asked for
    missing: tuple[str, ...] = ()  # parameters of the model that nothing came for
    cut_short: str = ""  # why no more came: the model is sound, but its weights are old and new ones mixed


class WeightLoading:
    """vLLM makes its worker class inherit from this one, and calls the method by name in every worker."""

    vllm_config: Any
    model_runner: Any
    rank: int

    @torch.no_grad()
    def receive_weights(self, weights: Iterable[tuple[str, Tensor]], *, verify: bool) -> Received:
        """Goes through `weights` once."""
        _settle()
        model: Any = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        own = weights.of(self.rank) if isinstance(weights, PerWorker) else weights
        at_once = loads_by_copying(model)
        arrivals = Arrivals(own, verify=verify, kept=not at_once)
        with set_current_vllm_config(self.vllm_config):
            if not at_once:
                initialize_layerwise_reload(model)
            try:
                loaded, cut_short = model.load_weights(arrivals), ""
            except RolloutError as error:  # the sender's. Raised here, it would leave other workers' answers unread
                loaded, cut_short = None, error.message
            if not at_once:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
        _settle()
        if cut_short:
            return Received({}, cut_short=cut_short)
        absent = expected - loaded if loaded is not None else set()
        fused = getattr(model, "packed_modules_mapping", {})
        return Received(arrivals.checksums, tuple(sorted(absent | _absent_parts(expected, fused, arrivals.names))))


class Arrivals:
    """Weights on their way into the model, remembered by name.

    A tensor holds until the next one is asked for, so it is copied where it is `kept` until its layer is complete.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], *, verify: bool, kept: bool) -> None:
        self.weights = weights
        self.verify = verify
        self.kept = kept
        self.names: set[str] = set()
        self.checksums: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            self.names.add(name)
            if self.verify:
                self.checksums[name] = checksum(tensor)
            yield name, tensor.clone() if self.kept else tensor


def _settle() -> None:
    """vLLM works on a stream of its own, which knows nothing of the trainer's.

    Before loading the trainer's last kernels must have written the weights; after it the trainer may change them.
    """
    if not current_platform.is_cpu():
        torch.accelerator.synchronize()


def loads_by_copying(model: nn.Module) -> bool:
    """False where vLLM keeps weights in another form than the checkpoint's, so that loading must make that form anew.

    On CPU matrices are packed for its kernels; experts may be shuffled; latent attention keeps products of weights.
    """
    return not current_platform.is_cpu() and not any(
        isinstance(module, MLAAttention) or not isinstance(_method(module), (*COPIED, type(None)))
        for module in model.modules()
    )


def _method(module: nn.Module) -> QuantizeMethodBase | None:
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def _absent_parts(parameters: set[str], fused: dict[str, list[str]], names: set[str]) -> set[str]:
    """vLLM counts a fused matrix as loaded when one of its parts came (q of q, k and v): the names of the others."""
    absent = set()
    for parameter in parameters:
        for whole, parts in fused.items():
            if f".{whole}." in parameter:
                of_parts = {parameter.replace(f".{whole}.", f".{part}.") for part in parts}
                if not names.isdisjoint(of_parts):
                    absent |= of_parts - names
    return absent
