"""Extension of vLLM's workers, in any process, that loads new weights without a restart.

`build_engine` (vllm.py) names `WeightLoading` as the worker extension, and `StepLoop.load` (vllm_loop.py) calls
`receive_weights` by name on all workers. Each worker iterates over the weights, which may come from the trainer in the
same process or through a channel, passes them to vLLM's own loader, and reports what arrived as `Received`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention import MLAAttention
from vllm.platforms import current_platform

from openrlhf.errors import RolloutError
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.engine import Weights
from openrlhf.rollout.vllm_layers import COPIED, Sampled, method_of, read_back, reloading, sampled
from openrlhf.rollout.weight_receiver import WeightsPerWorker
from openrlhf.subprocesses import die_with_parent


@dataclass(frozen=True)
class Received:
    """One worker's report about the weights that arrived."""

    checksums: dict[str, int]  # by checkpoint name; empty unless requested
    read_back: frozenset[str] = frozenset()  # names of tensors that were read back from the layers as they arrived
    missing: tuple[str, ...] = ()  # parameters of the model for which no weights arrived
    failure: str = ""  # why the transfer stopped early; the model then mixes old and new weights


class WeightLoading:
    """Base class that vLLM adds to its worker class; the methods are called by name in every worker."""

    vllm_config: Any  # vllm.config.VllmConfig
    model_runner: Any  # depends on the device
    rank: int

    def end_with_parent(self) -> None:
        """Ask the kernel to end this worker when the process that started it ends.

        vLLM's workers notice the end of their parent only between steps, and not at all while they wait for a worker on
        another node. Until then, they would occupy the memory of their GPU.
        """
        die_with_parent()

    def make_stage_inputs(self) -> None:
        """Allocate the input of a pipeline stage, which vLLM on CPU does only if it compiles the model."""
        runner = self.model_runner
        if current_platform.is_cpu() and not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.vllm_config.model_config.dtype, device=runner.device
            )

    @torch.no_grad()
    def receive_weights(self, weights: Weights, verify: bool) -> Received:
        """Load `weights`, iterating over them once, and report what arrived.

        vLLM and the trainer use different CUDA streams, so both are synchronised twice: before loading, because the
        trainer's last kernels must have written the weights, and after it, because the trainer may then change them.
        """
        on_cpu = current_platform.is_cpu()
        if not on_cpu:
            torch.accelerator.synchronize()
        model: Any = self.model_runner.get_model()
        model_config = self.vllm_config.model_config
        expected = {name for name, _ in model.named_parameters()}
        # vLLM may store weights in a different form from the checkpoint, and every load must convert them: on CPU,
        # matrices are packed for its kernels; experts may be shuffled; latent attention stores products of weights.
        by_copying = not on_cpu and not any(
            isinstance(module, MLAAttention) or not isinstance(method_of(module), (*COPIED, type(None)))
            for module in model.modules()
        )
        arrived: set[str] = set()
        checksums: dict[str, int] = {}
        samples: dict[str, Sampled] = {}

        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights.by_worker[self.rank] if isinstance(weights, WeightsPerWorker) else weights:
                arrived.add(name)
                if verify:
                    checksums[name] = checksum(tensor)
                    samples[name] = sampled(tensor, model_config.dtype)
                # A tensor is valid only until the next one is requested, and a reload keeps it until its layer is
                # complete.
                yield name, tensor if by_copying else tensor.clone()

        with set_current_vllm_config(self.vllm_config):
            with nullcontext() if by_copying else reloading(model, model_config):
                try:
                    loaded, failure = model.load_weights(recorded()), ""
                except RolloutError as error:  # from the sender; if raised, other workers' results would stay unread
                    loaded, failure = None, error.message
            if not on_cpu:
                torch.accelerator.synchronize()
            if failure:
                return Received({}, failure=failure)
            fused = getattr(model, "packed_modules_mapping", {})
            missing = missing_parameters(expected, loaded, fused, arrived)
            return Received(checksums, read_back(model, fused, samples), tuple(sorted(missing)))


def missing_parameters(
    expected: set[str], loaded: Iterable[str] | None, fused: Mapping[str, Sequence[str]], arrived: set[str]
) -> set[str]:
    """Return the names of parameters, or of parts of fused parameters, that did not arrive.

    `loaded` are the names that vLLM's loader reported, None if it reports none. `fused` maps the name of a fused module
    to its parts: vLLM counts a fused matrix as loaded as soon as one part (q of q, k and v) has arrived.
    """
    missing: set[str] = set()
    if loaded is not None:
        reported = set(loaded)
        # vLLM 0.26 reports experts without the module that holds them.
        missing = {name for name in expected if not reported & {name, name.replace(".routed_experts.", ".")}}
    for name in expected:
        for whole, parts in fused.items():
            if f".{whole}." in name:
                names = {name.replace(f".{whole}.", f".{part}.") for part in parts}
                if not arrived.isdisjoint(names):
                    missing |= names - arrived
    return missing
