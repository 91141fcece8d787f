"""Memory of a rollout engine on one of its devices: weights, KV cache, CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.config.workload import WorkEngine, Workload
from openrlhf.plan.gpus import GIB, Machine
from openrlhf.plan.shapes import ModelShape
from openrlhf.plan.terms import Term

ROLE = "engine"
GRAPHS = 1.5 * GIB  # CUDA graphs of vLLM
PREFILL_TOKENS, SEQUENCES = 8192, 1024  # vLLM reserves room for these at its start
HF_ROWS = 256  # maximum rows that the Transformers engine decodes together
SAMPLING_BYTES = 12  # per logit of a row: fp32 logits, their softmax and a copy


@dataclass(frozen=True)
class EnginePlace:
    """The engines of a device, which all hold the policy's weights."""

    work: Workload
    engine: WorkEngine
    shape: ModelShape
    machine: Machine

    @property
    def width(self) -> int:
        return 4 if self.machine.gpu is None or self.work.loading.param_dtype == "fp32" else 2

    @property
    def weights(self) -> float:
        """Bytes on one device, of all engines that share it; their weights are never quantised."""
        if not self.engine.own_weights:
            return 0.0
        return self.width * self.shape.parameters * self.engine.per_gpu / self.engine.devices

    @property
    def budget(self) -> float:
        """Bytes of a device that vLLM reserves, even if it needs less."""
        memory = 0.0 if self.machine.gpu is None else self.machine.gpu.memory
        return self.engine.memory_share * memory

    @property
    def working(self) -> float:
        """Bytes of vLLM's activations, sampling and CUDA graphs on one device."""
        layer = self.width * (4 * self.shape.hidden + 3 * self.shape.mlp / self.engine.devices)
        sampling = SEQUENCES * self.shape.vocabulary * SAMPLING_BYTES / self.engine.devices
        graphs = 0.0 if self.engine.eager else GRAPHS
        return self.engine.per_gpu * (PREFILL_TOKENS * layer + sampling + graphs)

    @property
    def token_bytes(self) -> float:
        """Bytes of the KV cache per token on one device."""
        return self.width * self.shape.cached * self.shape.layers / self.engine.devices

    @property
    def rows(self) -> int:
        """Sequences of a rollout that one engine generates."""
        return -(-self.work.samples // self.engine.count)

    @property
    def cache(self) -> float:
        """Bytes of the KV cache on one device."""
        if self.engine.vllm:
            return max(0.0, self.budget - self.weights - self.working)
        return min(HF_ROWS, self.rows) * self.work.sequence * self.token_bytes

    def shortage(self, *, certain: bool = False) -> float:
        """Return the bytes that vLLM lacks for one sequence; `certain` counts only weights and growing KV caches."""
        if not self.engine.vllm or self.machine.gpu is None:
            return 0.0
        share = self.shape.growing / self.shape.layers if certain else 1.0
        needed = self.weights + share * self.work.sequence * self.token_bytes * self.engine.per_gpu
        return needed + (0.0 if certain else self.working) - self.budget

    def terms(self) -> list[Term]:
        """Return the memory of the engines while they generate."""
        if not self.engine.vllm:
            rows = min(HF_ROWS, self.rows)
            sampling = rows * self.shape.vocabulary * (self.width + SAMPLING_BYTES)
            return [
                Term(ROLE, "weights", self.weights),
                Term(ROLE, "KV cache", self.cache, certain=False),
                Term(ROLE, "activations", sampling, certain=False),
            ]
        return [
            Term(ROLE, "weights", self.weights),
            Term(ROLE, "activations", self.working, certain=False),
            Term(ROLE, "KV cache", self.cache),
        ]
