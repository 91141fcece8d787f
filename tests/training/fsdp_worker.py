"""One of several processes that train every FSDP case; each writes its results for test_fsdp.py.

One start of the processes serves all cases, because starting and importing takes longer than training. Four processes
save a checkpoint, and two resume from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from openrlhf.config.sections.model import ModelFlags
from openrlhf.config.sections.training import OptimizerFlags, ShardingFlags
from openrlhf.errors import BackendError
from openrlhf.models.forward import LogProbs, Network
from openrlhf.models.load import load_causal_lm, recompute_activations
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.training import compilation
from openrlhf.training.fsdp import FsdpBackend, FsdpFrozen
from openrlhf.training.fsdp_shards import local_shard
from openrlhf.training.processes import start_processes
from openrlhf.types import Batch
from tests.training.deepspeed_cases import (
    RATE,
    SETTINGS,
    Distil,
    Sft,
    judged_rows,
    load_network,
    make_batch,
    of_rank,
    routed_batch,
    step_batches,
    step_scorer,
    train,
)
from tests.training.fsdp_tensor_parallel import average_cases, omitted_case, resume_cases, train_cases

CPU = torch.device("cpu")
SEVERAL = 8  # micro-batches
DIVIDED = ShardingFlags(expert_parallel_size=2)
SAVED: dict[str, dict[str, Any]] = {  # by name of the checkpoint; divided experts resume undivided, and vice versa
    "full": {},
    "lora": {"lora": True},
    "divided": {"model": "qwen3_moe", "sharding": DIVIDED},
    "undivided": {"model": "qwen3_moe"},
}
RESUMED = SAVED | {"divided": SAVED["undivided"], "undivided": SAVED["divided"]}


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def build(self, model: str = "llama", sharding: ShardingFlags | None = None, **kwargs: Any) -> FsdpBackend:
        network = load_network(self.folder / model, **kwargs)
        return FsdpBackend(network, SETTINGS, sharding or ShardingFlags(), CPU, learning_rate=RATE)

    def mine(self, step: int, *, packed: bool = False) -> Sequence[Batch]:
        """Return this rank's share: of four ranks, three have one micro-batch each and the last one a filler."""
        batches = step_batches(step, packed=packed)
        if self.ranks == 1:
            return batches
        if self.ranks == 2:
            return of_rank(batches, self.rank)
        return [batches[self.rank]] if self.rank < 3 else [replace(batches[0], filler=True)]

    def keep_weights(self, backend: FsdpBackend, name: str) -> None:
        kept = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in backend.weights()}
        if self.rank == 0:
            save_file(kept, self.folder / f"{name}.safetensors")

    def trained(self, name: str, backend: FsdpBackend, *, packed: bool = False) -> dict[str, Any]:
        results = train(backend, [self.mine(step, packed=packed) for step in range(3)])
        self.keep_weights(backend, name)
        return results

    def matrix(self) -> dict[str, Any]:
        results = {}
        for packed in (False, True):
            for lora in (False, True):
                name = f"{self.ranks}-{'packed' if packed else 'padded'}-{'lora' if lora else 'full'}"
                backend = self.build(packed=packed, lora=lora)
                results[name] = self.trained(name, backend, packed=packed)
                if packed:
                    backend.export(self.folder / f"export-{name}")
        return results

    def variants(self) -> dict[str, Any]:
        """Train with options and models that `matrix` does not vary."""
        results = {}
        cases: dict[str, dict[str, Any]] = {
            "tied": {"model": "tied"},
            "experts": {"model": "mixtral", "with_aux_loss": True},
            "recomputed": {},
            "reentrant": {},
        }
        for name, kwargs in cases.items():
            network = load_network(self.folder / kwargs.pop("model", "llama"), **kwargs)
            if name in ("recomputed", "reentrant"):
                recompute_activations(network.model, reentrant=name == "reentrant")
            backend = FsdpBackend(network, SETTINGS, ShardingFlags(), CPU, learning_rate=RATE)
            results[name] = self.trained(name, backend)
            backend.export(self.folder / f"export-{name}")
        return results

    def divided(self) -> dict[str, Any]:
        """Train with the experts split across pairs of ranks; also return how many elements this rank holds."""
        results = {}
        for model, recomputes in (("mixtral", False), ("qwen3_moe", True), ("gpt_oss", False)):
            network = load_network(self.folder / model)
            if recomputes:
                recompute_activations(network.model, reentrant=False)
            backend = FsdpBackend(network, SETTINGS, DIVIDED, CPU, learning_rate=RATE)
            here = sum(local_shard(parameter).numel() for parameter in network.parameters())
            results[model] = self.trained(f"divided-{self.ranks}-{model}", backend) | {"here": here}
            network.routed = RoutedLayers(network.decoder)
            results[model]["routed"] = backend.forward(routed_batch(), LogProbs).log_probs.tolist()
            backend.export(self.folder / f"export-divided-{self.ranks}-{model}")
        return results

    def compiled(self) -> dict[str, Any]:
        """Train a compiled layer for one step; tracing takes seconds per layer."""
        compilation.COMPILER = "eager"
        backend = self.build("shallow", ShardingFlags(deepcompile=True))
        backend.unchecked_steps = 0  # a pass without gradients would be traced again
        layers = compilation.decoder_layers(backend.network)
        results = train(backend, [self.mine(0)])
        return results | {"compiled": all(layer._compiled_call_impl is not None for layer in layers)}

    def shards(self) -> dict[str, Any]:
        """Return how much this rank holds between steps, after passes with and without gradients."""
        backend = self.build()
        backend.evaluate(self.mine(0), Sft())
        train(backend, [self.mine(0)])
        parameters = list(backend.network.parameters())
        states = [tensor for tensor in backend.optimizer_states() if tensor.ndim]
        return {
            "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
            "here": sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor)),
            "whole": sum(parameter.numel() for parameter in parameters),
            "moments": sum(state.numel() for state in states),
        }

    def deferred(self) -> dict[str, Any]:
        """Train models whose weights are read layer by layer while they are sharded, including a frozen one."""
        results = {}
        cases = {"llama": ShardingFlags(), "tied": ShardingFlags(), "gpt_oss": DIVIDED, "qwen3_moe": DIVIDED}
        for model, sharding in cases.items():
            backend = FsdpBackend(self.shell(model), SETTINGS, sharding, CPU, learning_rate=RATE)
            results[model] = self.trained(f"deferred-{model}", backend)
        teacher = FsdpFrozen(self.shell("teacher"), ShardingFlags(), CPU)
        return results | {"look": teacher.forward(make_batch((9, 5), 3, packed=False), LogProbs).log_probs.tolist()}

    def shell(self, model: str) -> Network:
        return Network(load_causal_lm(str(self.folder / model), ModelFlags(), device=CPU, packing=False, defer=True))

    def uneven_chunks(self) -> dict[str, Any]:
        """Train with targets that take several chunks of the head on one rank, and a single chunk on the other."""
        long, short = make_batch([400] * 6, 1, packed=True), make_batch([9, 5], 2, packed=True)
        return train(self.build(packed=True), [[long if self.rank == 0 else short]] * 2)

    def uneven_rounds(self) -> list[float]:
        """Score with a sharded model when a token budget gives the ranks different numbers of micro-batches."""
        teacher = FsdpFrozen(load_network(self.folder / "teacher", packed=True), ShardingFlags(), CPU)
        return step_scorer(teacher).score_rows(judged_rows(self.rank)).tolist()

    def half(self) -> dict[str, Any]:
        """Train in bf16: masters and sums of gradients in fp32, exports in bf16."""
        network = load_network(self.folder / "llama").to(torch.bfloat16)
        backend = FsdpBackend(network, SETTINGS, ShardingFlags(), CPU, learning_rate=RATE)
        backend.forward_backward([make_batch((4,), 1, packed=False)] * SEVERAL, Sft())
        sums = sorted({str(parameter.grad.dtype) for parameter in network.parameters() if parameter.grad is not None})
        return {
            "norm": backend.optim_step(1.0),
            "sums": sums,
            "masters": sorted({str(parameter.dtype) for parameter in network.parameters()}),
            "sent": sorted({str(tensor.dtype) for _, tensor in backend.weights()}),
            "exported": sorted({str(tensor.dtype) for _, tensor in backend.exported()}),
        }

    def half_lora(self) -> list[str]:
        """Train adapters of a bf16 model; return the precision of trained and of frozen weights."""
        network = load_network(self.folder / "llama", lora=True).to(torch.bfloat16)
        backend = FsdpBackend(network, SETTINGS, ShardingFlags(), CPU, learning_rate=RATE)
        train(backend, [self.mine(0)])
        return sorted({f"{parameter.requires_grad} {parameter.dtype}" for parameter in network.parameters()})

    def loss_scale(self) -> dict[str, Any]:
        """Train in fp16 with a loss scale that overflows at first."""
        network = load_network(self.folder / "llama").to(torch.float16)
        backend = FsdpBackend(network, OptimizerFlags(), ShardingFlags(), CPU, learning_rate=1e-4)
        assert backend.loss_scale is not None
        backend.loss_scale.value = 2.0**24
        norms = []
        for _ in range(12):
            backend.forward_backward(self.mine(0), Sft())
            norms.append(backend.optim_step(1.0))
        return {"norms": norms, **backend.loss_scaling(), "steps": backend.steps_taken()}

    def frozen(self) -> dict[str, Any]:
        """Compute log-probs of a sharded teacher, and distil through its head."""
        teacher = FsdpFrozen(load_network(self.folder / "teacher"), ShardingFlags(), CPU)
        batch = make_batch((9, 5), 3, packed=False)
        look = teacher.forward(batch, LogProbs).log_probs.tolist()
        backend = self.build()
        distilled = train(backend, [self.mine(step) for step in range(3)], Distil(teacher))
        metrics = backend.evaluate(self.mine(0), Sft())["gpt_loss"]
        return {
            "look": look,
            "distilled": distilled,
            "evaluated": [metrics.total.item(), metrics.count.item()],
            "forward": backend.forward(batch, LogProbs).log_probs.tolist(),
        }

    def moved(self) -> dict[str, Any]:
        """Give the shards other memory between steps, as moving them to the host and back does."""
        backend, parts = self.build(), []
        for step in range(3):
            backend.root.to(torch.float64).to(torch.float32)
            parts.append(train(backend, [self.mine(step)], first=step))
        self.keep_weights(backend, "moved")
        return {key: [part[key][0] for part in parts] for key in parts[0]}

    def forgotten(self) -> str:
        """Return the error about a layer that nothing uses."""
        network = load_network(self.folder / "llama")
        network.decoder.model.layers[1].extra = torch.nn.Linear(3, 3, bias=False)
        backend = FsdpBackend(network, SETTINGS, ShardingFlags(), CPU, learning_rate=RATE)
        try:
            train(backend, [self.mine(step) for step in range(3)])
        except BackendError as error:
            return error.message
        return ""

    def ring(self) -> dict[str, Any]:
        """Train with both processes on the same packed rows."""
        backend = self.build(sharding=ShardingFlags(ring_attn_size=2), packed=True)
        results = train(backend, [step_batches(step, packed=True) for step in range(3)])
        self.keep_weights(backend, "ring")
        return results

    def save(self) -> dict[str, Any]:
        """Train a step, save, and train the others, which saving must not disturb."""
        results = {}
        for kind, options in SAVED.items():
            backend = self.build(**options)
            before = train(backend, [self.mine(0)])
            backend.save(self.folder / f"checkpoint-{kind}")
            after = train(backend, [self.mine(step) for step in (1, 2)], first=1)
            results[kind] = {key: before[key] + after[key] for key in before}
        return results

    def resume(self) -> dict[str, Any]:
        """Continue the runs that four processes saved."""
        results = {}
        for kind, options in RESUMED.items():
            backend = self.build(**options)
            backend.load(self.folder / f"checkpoint-{kind}")
            results[kind] = train(backend, [self.mine(step) for step in (1, 2)], first=1)
            results[kind]["steps"] = backend.steps_taken()
            self.keep_weights(backend, f"resumed-{kind}")
        return results

    def resume_alone(self) -> dict[str, Any]:
        """Continue a run that four processes saved, after a forward pass with other weights."""
        backend = self.build()
        backend.forward(self.mine(0)[0], LogProbs)
        backend.load(self.folder / "checkpoint-full")
        results = train(backend, [self.mine(step) for step in (1, 2)], first=1)
        self.keep_weights(backend, "resumed-alone")
        return results | {"steps": backend.steps_taken()}

    def refused(self) -> list[str]:
        """Return the errors of loading a checkpoint that is missing, or of another model."""
        messages = []
        for model, name in (("llama", "nowhere"), ("tied", "checkpoint-full")):
            try:
                self.build(model).load(self.folder / name)
            except BackendError as error:
                messages.append(error.message)
        return messages


def main() -> None:
    folder = Path(sys.argv[1])
    start_processes(CPU)
    worker = Worker(folder)
    parts = [worker.matrix]
    if worker.ranks == 1:
        parts += [worker.resume_alone]
    else:
        parts += [worker.shards, worker.divided]
    if worker.ranks == 4:
        parts += [worker.save]
    if worker.ranks == 2:
        parts += [worker.variants, worker.compiled, worker.deferred, worker.uneven_chunks, worker.uneven_rounds]
        parts += [worker.half, worker.half_lora, worker.loss_scale, worker.moved]
        parts += [worker.frozen, worker.forgotten, worker.ring, worker.resume, worker.refused]
    results = {part.__name__: part() for part in parts}
    if worker.ranks > 1:
        results["split"] = train_cases(worker)
        results["average"] = average_cases(worker)
        results["omitted"] = omitted_case(worker)
    if worker.ranks == 2:
        results["split_resumed"] = resume_cases(worker)
    (folder / f"results-{worker.ranks}-{worker.rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
