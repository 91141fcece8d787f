"""One of two processes that train every DeepSpeed case; each writes its results for test_deepspeed.py.

One start of the processes serves all cases, because starting and importing takes longer than training.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import BackendError
from openrlhf.models.forward import LogProbs
from openrlhf.training import compilation
from openrlhf.training import deepspeed as backends
from openrlhf.training.audit import Audit
from openrlhf.training.deepspeed import DeepSpeedBackend, DeepSpeedFrozen
from openrlhf.training.deepspeed_shards import keep_gathered, put_to_sleep, wake_up
from openrlhf.training.processes import sharded_loading, start_distributed
from tests.training.deepspeed_cases import (
    RATE,
    SETTINGS,
    Distil,
    Sft,
    judged_rows,
    load_network,
    make_batch,
    of_rank,
    step_batches,
    step_scorer,
    train,
    train_average,
)

CPU = torch.device("cpu")
MANY = 384  # micro-batches


@contextmanager
def offloading() -> Iterator[None]:
    """Make backends configure DeepSpeed as for a GPU; on a CPU they would not ask it to offload."""
    here = backends._facts
    backends._facts = lambda network, device: replace(here(network, device), device_type="cuda")
    try:
        yield
    finally:
        backends._facts = here


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()

    def build(self, sharding: ShardingFlags, model: str = "llama", **kwargs: Any) -> DeepSpeedBackend:
        return DeepSpeedBackend(
            load_network(self.folder / model, **kwargs), SETTINGS, sharding, CPU, learning_rate=RATE
        )

    def mine(self, step: int, *, packed: bool = False) -> list[Any]:
        return of_rank(step_batches(step, packed=packed), self.rank)

    def keep_weights(self, backend: DeepSpeedBackend, name: str) -> None:
        kept = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in backend.weights()}
        if self.rank == 0:
            save_file(kept, self.folder / f"{name}.safetensors")

    def matrix(self) -> dict[str, Any]:
        results = {}
        for stage in range(4):
            for packed in (False, True):
                for lora in (False, True):
                    name = f"zero{stage}-{'packed' if packed else 'padded'}-{'lora' if lora else 'full'}"
                    backend = self.build(ShardingFlags(zero_stage=stage), packed=packed, lora=lora)
                    results[name] = train(backend, [self.mine(step, packed=packed) for step in range(3)])
                    self.keep_weights(backend, name)
                    if stage in (2, 3) and packed:
                        backend.export(self.folder / f"export-{name}")
        return results

    def variants(self) -> dict[str, Any]:
        """Train with options and models that `matrix` does not vary."""
        results = {}
        cases = {
            "overlap": (ShardingFlags(zero_stage=2, overlap_comm=True, grad_accum_dtype="fp32"), {}),
            "hierarchy": (ShardingFlags(zero_stage=3, zpg=2), {}),
            "compiled": (ShardingFlags(zero_stage=2, deepcompile=True), {}),
            "tied": (ShardingFlags(zero_stage=3), {"model": "tied"}),
            "experts": (ShardingFlags(zero_stage=3), {"model": "mixtral", "with_aux_loss": True}),
        }
        compilation.COMPILER = "eager"
        for name, (sharding, kwargs) in cases.items():
            backend = self.build(sharding, **kwargs)
            results[name] = train(backend, [self.mine(step) for step in range(3)])
            layers = backend.network.decoder.model.layers
            results[name]["compiled"] = all(layer._compiled_call_impl is not None for layer in layers)
            self.keep_weights(backend, name)
            if name != "overlap":
                backend.export(self.folder / f"export-{name}")
        return results

    def offloaded(self) -> dict[str, Any]:
        """Train with the optimizer in host memory, using DeepSpeed's GPU code; the rest sleeps between steps."""
        results: dict[str, Any] = {}
        for stage in (1, 2, 3):
            with offloading():
                backend = self.build(ShardingFlags(zero_stage=stage, adam_offload=True))
            name = f"offloaded-zero{stage}"
            results[name] = self.with_naps(backend, stage) | {
                "offloads": backend.engine.zero_offload_optimizer().device == "cpu"
            }
            self.keep_weights(backend, name)
        return results

    def uneven_chunks(self) -> dict[str, Any]:
        """Train with targets that take several chunks of the head on one rank, and a single chunk on the other."""
        long, short = make_batch([400] * 6, 1, packed=True), make_batch([9, 5], 2, packed=True)
        backend = self.build(ShardingFlags(zero_stage=3), packed=True)
        return train(backend, [[long if self.rank == 0 else short]] * 2)

    def uneven_rounds(self) -> list[float]:
        """Score with a sharded model when a token budget gives the ranks different numbers of micro-batches."""
        teacher = DeepSpeedFrozen(load_network(self.folder / "teacher", packed=True), ShardingFlags(zero_stage=3), CPU)
        return step_scorer(teacher).score_rows(judged_rows(self.rank)).tolist()

    def long_sum(self) -> float | None:
        """Return the norm of a step with so many equal micro-batches that a sum in bf16 would stop growing, at 256."""
        network = load_network(self.folder / "llama").to(torch.bfloat16)
        backend = DeepSpeedBackend(network, SETTINGS, ShardingFlags(zero_stage=1), CPU, learning_rate=RATE)
        backend.forward_backward([make_batch((4,), 1, packed=False)] * MANY, Sft())
        return backend.optim_step(1.0)

    def resume(self, stage: int, *, lora: bool) -> dict[str, Any]:
        """Save after the first step into a folder that is then renamed, and continue in a new engine."""
        sharding, name = ShardingFlags(zero_stage=stage), f"resumed-zero{stage}-{'lora' if lora else 'full'}"
        writing, written = self.folder / f".{name}.writing", self.folder / f"checkpoint-{name}"
        first = self.build(sharding, lora=lora)
        before = train(first, [self.mine(0)])
        first.save(writing)
        if self.rank == 0:
            writing.rename(written)
        dist.barrier()
        second = self.build(sharding, lora=lora)
        second.load(written)
        after = train(second, [self.mine(step) for step in (1, 2)], first=1)
        self.keep_weights(second, name)
        again = train(first, [self.mine(step) for step in (1, 2)], first=1)  # saving must not disturb the first engine
        return {"joined": {key: before[key] + after[key] for key in before}, "again": again}

    def naps(self) -> dict[str, Any]:
        """Move states to host memory and back between steps; DeepSpeed takes its buffers apart even on a CPU."""
        results = {}
        for stage in range(4):
            for lora in (False, True):
                backend = self.build(ShardingFlags(zero_stage=stage), lora=lora)
                name = f"zero{stage}-{'lora' if lora else 'full'}"
                results[name] = self.with_naps(backend, stage)
        return results

    def with_naps(self, backend: DeepSpeedBackend, stage: int) -> dict[str, Any]:
        parts = []
        for step in range(3):
            put_to_sleep(backend.engine, backend.network, backend.optimizer, stage, backend.host)
            wake_up(backend.engine, stage, backend.host)
            keep_gathered(backend.head_parameters)
            parts.append(train(backend, [self.mine(step)], first=step))
        return {key: [part[key][0] for part in parts] for key in parts[0]}

    def audits(self) -> dict[str, Any]:
        """Report what the audit saw in three steps; then the same with a layer that nothing uses."""
        results: dict[str, Any] = {}
        cases: dict[str, tuple[ShardingFlags, dict[str, Any]]] = {
            f"zero{stage}-{'lora' if lora else 'full'}": (ShardingFlags(zero_stage=stage), {"lora": lora})
            for stage in range(4)
            for lora in (False, True)
        }
        cases["offload"] = (ShardingFlags(zero_stage=2, adam_offload=True), {})
        cases["experts"] = (ShardingFlags(zero_stage=3), {"model": "mixtral"})
        for name, (sharding, kwargs) in cases.items():
            network = load_network(self.folder / kwargs.pop("model", "llama"), **kwargs)
            with offloading() if name == "offload" else nullcontext():
                backend = DeepSpeedBackend(network, SETTINGS, sharding, CPU, learning_rate=RATE)
            train(backend, [self.mine(step) for step in range(3)])
            results[name] = seen_by(backend.audit)
        for stage in range(4):
            network = load_network(self.folder / "llama")
            network.decoder.model.layers[1].extra = torch.nn.Linear(3, 3, bias=False)
            backend = DeepSpeedBackend(network, SETTINGS, ShardingFlags(zero_stage=stage), CPU, learning_rate=RATE)
            try:
                train(backend, [self.mine(step) for step in range(3)])
            except BackendError as error:
                results[f"forgotten-zero{stage}"] = error.message
        return results

    def sharded(self) -> dict[str, Any]:
        sharding = ShardingFlags(zero_stage=3)
        with sharded_loading(sharding, torch.float32):
            network = load_network(self.folder / "llama")
            adapted = load_network(self.folder / "llama", lora=True)
        here = sum(parameter.numel() for parameter in network.parameters())
        backend = DeepSpeedBackend(network, SETTINGS, sharding, CPU, learning_rate=RATE)
        loaded = DeepSpeedBackend(adapted, SETTINGS, sharding, CPU, learning_rate=RATE)
        self.keep_weights(backend, "sharded-loading")
        return {
            "numbers_here": here,
            "full": train(backend, [self.mine(step) for step in range(3)]),
            "lora": train(loaded, [self.mine(step) for step in range(3)]),
        }

    def frozen(self) -> dict[str, Any]:
        """Compute log-probs of a sharded teacher, and distil through its head."""
        sharding = ShardingFlags(zero_stage=3)
        teacher = DeepSpeedFrozen(load_network(self.folder / "teacher"), sharding, CPU)
        replica = DeepSpeedFrozen(load_network(self.folder / "teacher"), ShardingFlags(zero_stage=2), CPU, offload=True)
        batch = make_batch((9, 5), 3, packed=False)
        looks = [model.forward(batch, LogProbs).log_probs for model in (teacher, replica)]
        backend = self.build(sharding)
        distilled = train(backend, [self.mine(step) for step in range(3)], Distil(teacher))
        metrics = backend.evaluate(self.mine(0), Sft())["gpt_loss"]
        outputs = backend.forward(batch, LogProbs).log_probs
        return {
            "looks": [look.tolist() for look in looks],
            "distilled": distilled,
            "evaluated": [metrics.total.item(), metrics.count.item()],
            "forward": outputs.tolist(),
            "sum": backend.sum_over_ranks(torch.tensor([1.0 + self.rank, 2.0])).tolist(),
        }

    def tensor_parallel(self) -> dict[str, Any]:
        """Train with both processes as one replica, so that both see every micro-batch."""
        results = {}
        for stage in (0, 2, 3):
            for model in ("llama", "tied"):
                name = f"tensor-parallel-zero{stage}-{model}"
                backend = self.build(ShardingFlags(zero_stage=stage, ds_tensor_parallel_size=2), model)
                results[name] = train(backend, [step_batches(step, packed=False) for step in range(2)])
                self.keep_weights(backend, f"early-{name}")
                last = train(backend, [step_batches(2, packed=False)], first=2)
                results[name] = {key: results[name][key] + last[key] for key in last}
                self.keep_weights(backend, name)
                backend.export(self.folder / f"export-{name}")
        return results

    def tensor_parallel_audit(self) -> dict[str, Any]:
        backend = self.build(ShardingFlags(zero_stage=2, ds_tensor_parallel_size=2), "tied")
        train(backend, [step_batches(step, packed=False) for step in range(3)])
        return seen_by(backend.audit)

    def averages(self) -> dict[str, Any]:
        """Average the weights, with shards and without, and resume an average of shards; return what is held here."""
        held = {}
        for stage in (2, 3):
            steps = [self.mine(step) for step in range(3)]
            written = self.folder / f"checkpoint-average-zero{stage}"
            average = train_average(self.build(ShardingFlags(zero_stage=stage)), steps, write=written)
            average.export(self.folder / f"average-zero{stage}")
            held[f"zero{stage}"] = sum(tensor.numel() for tensor in average.tensors.values())
            average = train_average(self.build(ShardingFlags(zero_stage=stage)), steps[1:], resume=written)
            average.export(self.folder / f"average-zero{stage}-resumed")
        return held

    def tensor_parallel_resume(self) -> dict[str, Any]:
        sharding, written = (
            ShardingFlags(zero_stage=2, ds_tensor_parallel_size=2),
            self.folder / "checkpoint-tensor-parallel",
        )
        first = self.build(sharding)
        before = train(first, [step_batches(0, packed=False)])
        first.save(written)
        second = self.build(sharding)
        second.load(written)
        after = train(second, [step_batches(step, packed=False) for step in (1, 2)], first=1)
        return {key: before[key] + after[key] for key in before}


def seen_by(audit: Audit) -> dict[str, Any]:
    return {"seen": audit.ever.all(1).tolist(), "hooks": len(audit.hooks), "steps": audit.steps}


def main() -> None:
    folder = Path(sys.argv[1])
    device = start_distributed(torch.device("cpu"))
    assert device == CPU
    worker = Worker(folder)
    gc.freeze()  # DeepSpeed collects garbage at each offload, which takes 0.4 s with all imported objects
    results: dict[str, Any] = {}
    only = sys.argv[2:]
    parts = {
        "matrix": worker.matrix,
        "variants": worker.variants,
        "offloaded": worker.offloaded,
        "uneven_chunks": worker.uneven_chunks,
        "uneven_rounds": worker.uneven_rounds,
        "long_sum": worker.long_sum,
        "resume": lambda: {
            "resumed-zero3-full": worker.resume(3, lora=False),
            "resumed-zero3-lora": worker.resume(3, lora=True),
            "resumed-zero2-full": worker.resume(2, lora=False),
            "resumed-zero0-lora": worker.resume(0, lora=True),
        },
        "naps": worker.naps,
        "audits": worker.audits,
        "sharded": worker.sharded,
        "frozen": worker.frozen,
        "averages": worker.averages,
        "tensor_parallel": worker.tensor_parallel,
        "tensor_parallel_audit": worker.tensor_parallel_audit,
        "tensor_parallel_resume": worker.tensor_parallel_resume,
    }
    for name, part in parts.items():
        if not only or name in only:
            results[name] = part()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if worker.rank == 0:
        (folder / "results.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
