"""Does a run fit? Compare its memory with that of the machine, and find the flags that help.

A run "cannot fit" if even the shortest data would exceed the memory. It "does not fit" if the longest data that the
flags allow would; shorter data may still work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from openrlhf.config.workload import Workload
from openrlhf.errors import counted
from openrlhf.plan.estimate import GENERATION, TIGHT, GroupMemory, PhaseMemory, Shapes, engine_of, estimate
from openrlhf.plan.gpus import GIB, Machine
from openrlhf.plan.seconds import PhaseSeconds, phase_seconds
from openrlhf.plan.terms import STATES, largest, least, total

Fit = Literal["fits", "is tight", "does not fit", "cannot fit"]
ADAPTER_RANK = 32  # --lora_rank of the suggestion to train adapters
WORTHWHILE = 0.01  # share of a device's memory that a suggested flag must save
SMALLER_SHARE, LEAST_SHARE = 0.15, 0.2  # steps and end of a suggested --vllm_gpu_memory_utilization
MOST_ROUNDS = 8  # maximum number of flags to combine to make a run fit


@dataclass(frozen=True)
class FlagChange:
    """A change of flags, and the memory of the fullest device after it."""

    flags: str
    peak: float  # bytes
    work: Workload
    learns_differently: bool = False


@dataclass(frozen=True)
class Assessment:
    """A planned run on a machine."""

    work: Workload
    machine: Machine
    shapes: Shapes
    groups: tuple[GroupMemory, ...]
    seconds: tuple[PhaseSeconds, ...]

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        if self.machine.gpu is None:
            return self.machine.host_memory or float("inf")
        return self.machine.gpu.memory

    @property
    def host_peak(self) -> PhaseMemory:
        """The phase that needs the most host memory of a node."""
        return max((group.host_peak for group in self.groups), key=lambda phase: total(phase.host))

    @property
    def host_room(self) -> float:
        """Bytes of host memory on a node; infinite if unknown, or if it is also the device's memory."""
        if self.machine.gpu is None or self.machine.host_memory is None:
            return float("inf")
        return self.machine.host_memory

    def engine_shortage(self, *, certain: bool = False) -> float:
        """Return the bytes that a vLLM engine lacks on each of its devices; negative if it has room."""
        engine = engine_of(self.work, self.machine, self.shapes)
        return 0.0 if engine is None else engine.shortage(certain=certain)

    @property
    def fullest(self) -> GroupMemory:
        """The group whose devices need the most memory."""
        return max(self.groups, key=lambda group: total(group.peak.device))

    @property
    def peak(self) -> float:
        """Bytes that the fullest device needs; more than there is if an engine does not fit."""
        needed, lacking = total(self.fullest.peak.device), self.engine_shortage()
        return needed if lacking <= 0 else max(needed, self.memory + lacking)

    @property
    def needed(self) -> float:
        """Bytes that the fullest device needs even with the shortest data; on a CPU, only weights and optimizer."""
        phases = [phase for group in self.groups for phase in group.phases]
        if self.machine.gpu is None:
            return max(total(term for term in phase.device if term.kind in STATES) for phase in phases)
        return max(least(phase.device) for phase in phases)

    @property
    def fit(self) -> Fit:
        in_host = max(least(phase.host) for group in self.groups for phase in group.phases)
        if self.needed > self.memory or self.engine_shortage(certain=True) > 0 or in_host > self.host_room:
            return "cannot fit"
        if self.peak > self.memory or total(self.host_peak.host) > self.host_room:
            return "does not fit"
        return "is tight" if self.is_tight else "fits"

    @property
    def is_tight(self) -> bool:
        """True if a device is nearly full in a phase other than generation, when the engine fills it anyway."""
        phases = [phase for group in self.groups for phase in group.phases if phase.phase != GENERATION]
        return any(total(phase.device) > TIGHT * self.memory for phase in phases)

    def phase(self, name: str) -> PhaseMemory | None:
        """Return the phase of this name from the group that needs the most memory for it."""
        found = [phase for group in self.groups for phase in group.phases if phase.phase == name]
        return max(found, key=lambda phase: total(phase.device), default=None)

    def problem(self) -> str:
        """Describe in one sentence the phase that needs the most, and its largest terms."""
        lacking = self.engine_shortage()
        if lacking > 0:
            assert self.work.engine is not None
            return (
                f"a vLLM engine on {counted(self.work.engine.devices, 'device')} lacks {lacking / GIB:.1f} GiB on each "
                "for its weights and the KV cache of one sequence"
            )
        peak, host = self.fullest.peak, self.host_peak
        if total(host.host) > self.host_room and total(peak.device) <= self.memory:
            parts = ", ".join(map(str, largest(host.host)))
            return (
                f"{host.phase} needs {total(host.host) / GIB:.1f} GiB of host memory on each node, which has "
                f"{self.host_room / GIB:.1f} GiB: {parts}"
            )
        parts = ", ".join(map(str, largest(peak.device)))
        where = "of host memory" if self.machine.gpu is None else "on each device"
        models = "" if len(self.groups) == 1 else f" of {self.fullest.name}"
        sizes = f"{total(peak.device) / GIB:.1f} GiB of {self.memory / GIB:.1f} GiB"
        return f"{peak.phase} needs {sizes} {where}{models}: {parts}"


def assess(work: Workload, machine: Machine, shapes: Shapes) -> Assessment:
    """Plan a run on a machine."""
    return Assessment(work, machine, shapes, estimate(work, machine, shapes), phase_seconds(work, machine, shapes))


def suggestions(plan: Assessment) -> list[FlagChange]:
    """Return the changes that save memory on the fullest device, the most effective first."""
    found = []
    for flags, work, differs in changes(plan.work, plan.machine):
        peak = assess(work, plan.machine, plan.shapes).peak
        if plan.peak - peak > WORTHWHILE * plan.memory:
            found.append(FlagChange(flags, peak, work, differs))
    return sorted(found, key=lambda one: one.peak)


def remedy(plan: Assessment) -> list[FlagChange]:
    """Return changes that together make the run fit; those that change what is learned come last. Empty if none do."""
    chosen: list[FlagChange] = []
    current = plan
    while current.fit != "fits" and len(chosen) < MOST_ROUNDS:
        options = suggestions(current)
        best = next((one for one in options if not one.learns_differently), options[0] if options else None)
        if best is None:
            return []
        chosen.append(best)
        current = assess(best.work, plan.machine, plan.shapes)
    return chosen if current.fit == "fits" else []


def changes(work: Workload, machine: Machine) -> Iterator[tuple[str, Workload, bool]]:
    """Yield the changes of flags that may save memory, and whether they change what is learned."""
    several, sharding = work.groups[0].devices > 1, work.sharding
    sharded = work.fsdp or (several and sharding.zero_stage == 3)
    if not sharding.gradient_checkpointing:
        yield "--gradient_checkpointing", replace(work, sharding=replace(sharding, gradient_checkpointing=True)), False
    if work.train_tokens > work.sequence:
        half = max(work.sequence, work.train_tokens // 2)
        name = "--train_max_tokens_per_gpu" if work.by_tokens else "--micro_train_batch_size"
        value = half if work.by_tokens else max(1, half // work.sequence)
        smaller = replace(work, train_tokens=half, micro_batches=work.micro_batches * 2)
        yield f"{name} {value}", smaller, False
    if several and not sharded and not work.loading.load_in_4bit and not sharding.deepcompile:
        yield "--zero_stage 3", replace(work, sharding=replace(sharding, zero_stage=3)), False
    if not sharding.adam_offload and machine.gpu is not None and (not several or work.fsdp or sharding.zero_stage >= 1):
        yield "--adam_offload", replace(work, sharding=replace(sharding, adam_offload=True)), False
    yield from offloading(work)
    ring = 2 * sharding.ring_attn_size
    if several and work.train_tokens <= work.sequence and work.groups[0].devices % ring == 0:
        yield f"--ring_attn_size {ring}", replace(work, sharding=replace(sharding, ring_attn_size=ring)), False
    yield from engine_changes(work, machine)
    names = "" if work.lora.lora_rank else f"--lora_rank {ADAPTER_RANK}"
    adapted = replace(work, lora=replace(work.lora, lora_rank=work.lora.lora_rank or ADAPTER_RANK))
    if names:
        yield names, adapted, True
    if not work.loading.load_in_4bit and not sharded and machine.gpu is not None:
        quantised = replace(adapted, loading=replace(work.loading, load_in_4bit=True))
        yield f"{names} --load_in_4bit".strip(), quantised, True


def offloading(work: Workload) -> Iterator[tuple[str, Workload, bool]]:
    """Yield the flags that keep frozen or idle models in host memory."""
    roles = {model.role for group in work.groups for model in group.models if not model.trained and not model.offloaded}
    if roles:
        moved = [
            replace(group, models=tuple(replace(model, offloaded=not model.trained) for model in group.models))
            for group in work.groups
        ]
        name = "--ref_reward_offload" if work.trains_policy else "--ref_offload"
        yield "--teacher_offload" if "teacher" in roles else name, replace(work, groups=tuple(moved)), False
    shares = work.engine is not None and work.engine.vllm and any(group.has_engine for group in work.groups)
    if work.trains_policy and not work.sleeps and shares:
        yield "--deepspeed_enable_sleep", replace(work, sleeps=True), False


def engine_changes(work: Workload, machine: Machine) -> Iterator[tuple[str, Workload, bool]]:
    """Yield the flags that give engines less memory, or more devices."""
    engine = work.engine
    if engine is None or not engine.vllm:
        return
    shares = any(group.has_engine for group in work.groups)
    if shares and not engine.sleeps:
        yield "--vllm_enable_sleep", replace(work, engine=replace(engine, sleeps=True)), False
    share = round(engine.memory_share - SMALLER_SHARE, 2)
    if shares and share >= LEAST_SHARE:
        smaller = replace(work, engine=replace(engine, memory_share=share))
        yield f"--vllm_gpu_memory_utilization {share:g}", smaller, False
    size = 2 * engine.devices
    if size <= machine.per_node and engine.count % 2 == 0 and engine.per_gpu == 1:
        wider = replace(work, engine=replace(engine, devices=size, count=engine.count // 2))
        yield f"--vllm_tensor_parallel_size {size} --vllm_num_engines {engine.count // 2}", wider, False
