"""Seconds of a step by phase, and what limits each phase.

The constants are from the runs on one H200 in docs/performance.md. Times for several GPUs have not been measured: they
assume that collectives reach 70% of the link speed in the data sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from openrlhf.config.workload import WorkGroup, Workload
from openrlhf.plan.engine import HF_ROWS, SEQUENCES, EnginePlace
from openrlhf.plan.estimate import (
    EXPERIENCE,
    GENERATION,
    SYNC,
    TRAINING,
    Phase,
    Shapes,
    engine_of,
    place_of,
)
from openrlhf.plan.flops import StepSize, step_flops
from openrlhf.plan.gpus import GPU, Machine
from openrlhf.plan.states import FP32, ModelPlace, layer_part, resting_terms
from openrlhf.plan.terms import STATES, total

COMPUTE, BANDWIDTH, HOST_LINK, HOST, LINK, SCHEDULER = (
    *("FLOPs", "memory bandwidth", "copies to and from host memory"),
    *("optimizer on the CPU", "interconnect", "the engine's Python scheduler"),
)
# Shares of the data sheet's peak.
PLAIN, COMPILED, FORWARD = 0.354, 0.459, 0.5
RECOMPUTED = 0.82  # throughput with gradient checkpointing, relative to without
# Throughput with LoRA, relative to full training: small matrix products, and inputs widened to fp32.
ADAPTED, ADAPTED_COMPILED = 0.54, 0.69
REACHED_BANDWIDTH, REACHED_LINK = 0.7, 0.7
UPDATE_BYTES = 30  # read and written by Adam per parameter
HOST_UPDATE = 2.6e-9  # seconds per parameter of Adam on 16 cores
SCHEDULED_ROW = 30e-6  # seconds of vLLM's scheduler per sequence and token
LAUNCHED_LAYER = 0.85e-3  # seconds per layer and token to launch kernels without CUDA graphs
GIGA = 1e9


@dataclass(frozen=True)
class PhaseSeconds:
    """Predicted seconds of a phase in one step."""

    phase: Phase
    seconds: float
    limit: str  # what takes most of the time, such as memory bandwidth


def phase_seconds(work: Workload, machine: Machine, shapes: Shapes) -> tuple[PhaseSeconds, ...]:
    """Return the seconds of each phase of a step; empty on a CPU."""
    gpu = machine.gpu
    if gpu is None:
        return ()
    parts: dict[Phase, list[tuple[str, float]]] = {}
    groups = [
        (group, [place_of(work, group, model, shapes, machine) for model in group.models]) for group in work.groups
    ]
    engine = engine_of(work, machine, shapes)
    if engine is not None and engine.shortage() <= 0:
        parts[GENERATION] = generation(engine, gpu)
    scored = [
        [scoring(place, machine) for place in places if not place.model.trained or scores(work, place)]
        for _, places in groups
    ]
    if any(scored):
        parts[EXPERIENCE] = longest([[part for model in models for part in model] for models in scored])
    trained = [[training(place, machine) for place in places if place.model.trained] for _, places in groups]
    parts[TRAINING] = longest([[part for model in models for part in model] for models in trained])
    if work.trains_policy:
        parts[SYNC] = syncing(groups[0][0], groups[0][1][0], machine)
    return tuple(summed(phase, found) for phase, found in parts.items())


def longest(options: Sequence[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Return the parts of the slowest group; groups work at the same time."""
    return max(options, key=lambda parts: sum(seconds for _, seconds in parts))


def summed(phase: Phase, parts: Sequence[tuple[str, float]]) -> PhaseSeconds:
    sums: dict[str, float] = {}
    for limit, seconds in parts:
        sums[limit] = sums.get(limit, 0.0) + seconds
    return PhaseSeconds(phase, sum(sums.values()), max(sums, key=lambda limit: sums[limit], default=COMPUTE))


def scores(work: Workload, place: ModelPlace) -> bool:
    return place.model.role == "critic" or (place.model.role == "policy" and work.scores_policy)


def moved_bytes(place: ModelPlace) -> float:
    """Return the bytes that a model moves when it wakes up or goes to sleep, or if it is offloaded."""
    if place.model.trained:
        return total(term for term in resting_terms(place)[0] if term.kind in STATES) * place.work.sleeps
    return total(resting_terms(place)[1])


def generation(engine: EnginePlace, gpu: GPU) -> list[tuple[str, float]]:
    """Return the time to decode the longest responses, one token at a time."""
    work, flags = engine.work, engine.engine
    room = SEQUENCES if flags.vllm else HF_ROWS
    if flags.vllm:
        room = max(1, min(room, int(engine.cache / (work.sequence * engine.token_bytes))))
    rows = min(engine.rows, room)
    rounds = -(-engine.rows // rows) * work.response
    weights = engine.width * engine.shape.parameters * flags.per_gpu / flags.devices
    read = weights + rows * flags.per_gpu * work.sequence / 2 * engine.token_bytes
    on_gpu = read / (REACHED_BANDWIDTH * gpu.bandwidth * GIGA)
    launching = engine.shape.layers * LAUNCHED_LAYER if flags.eager or not flags.vllm else 0.0
    on_host = max(rows * SCHEDULED_ROW, launching)
    prompts = engine.rows * max(0, work.sequence - work.response)
    prefill = 2 * engine.shape.active * prompts / (FORWARD * gpu.teraflops * 1e12 * flags.devices)
    step = (BANDWIDTH, on_gpu) if on_gpu > on_host else (SCHEDULER, on_host)
    return [(step[0], rounds * step[1]), (COMPUTE, prefill)]


def scoring(place: ModelPlace, machine: Machine) -> list[tuple[str, float]]:
    """Return the time of the forward passes over all samples of a step."""
    work, gpu = place.work, machine.gpu
    assert gpu is not None
    samples = work.samples or work.step_samples
    flops = 2 * place.shape.active * samples * work.sequence / place.group.devices
    parts = [(COMPUTE, flops / (FORWARD * gpu.teraflops * 1e12))]
    times = 2 if not place.model.trained or place.model.role == "critic" else 1  # the policy stays awake
    return [*parts, (HOST_LINK, times * moved_bytes(place) / (gpu.host * GIGA))]


def training(place: ModelPlace, machine: Machine) -> list[tuple[str, float]]:
    """Return the time of the optimizer steps of a rollout, or of one step of a supervised command."""
    work, gpu = place.work, machine.gpu
    assert gpu is not None
    tokens = work.step_samples * work.sequence
    if work.response:  # samples of a prompt that meet in a micro-batch share it
        sharing = max(1, min(work.samples_per_prompt, work.train_tokens // work.sequence))
        tokens -= work.step_samples * (work.sequence - work.response) * (1 - 1 / sharing)
    targets = work.step_samples * (work.response or work.sequence)
    sizes = place.shape.matrices
    if place.adapted:
        sizes = replace(
            sizes, trained=place.trained, frozen=sizes.trained, trained_head=0.0, frozen_head=sizes.trained_head
        )
    reached = COMPILED if work.sharding.deepcompile else PLAIN
    reached *= RECOMPUTED if work.sharding.gradient_checkpointing else 1.0
    if place.adapted:
        reached *= ADAPTED_COMPILED if work.sharding.deepcompile else ADAPTED
    flops = step_flops(sizes, StepSize(tokens, tokens * work.sequence / 2, targets)) / place.group.devices
    compute = flops / (reached * gpu.teraflops * 1e12)
    sending = collective_bytes(place) / (REACHED_LINK * slowest_link(place.group, machine) * GIGA)
    passes = (LINK, sending) if sending > compute else (COMPUTE, compute)  # they overlap
    shards = place.ranks if place.stage >= 1 else 1
    update = (BANDWIDTH, UPDATE_BYTES * place.trained / shards / (REACHED_BANDWIDTH * gpu.bandwidth * GIGA))
    if work.sharding.adam_offload:
        update = (HOST, HOST_UPDATE * place.trained / shards)
    asleep = (HOST_LINK, 2 * moved_bytes(place) / (gpu.host * GIGA) if place.model.role == "critic" else 0.0)
    steps = work.optimizer_steps
    return [(passes[0], steps * passes[1]), (update[0], steps * update[1]), asleep]


def collective_bytes(place: ModelPlace) -> float:
    """Return the bytes that a process sends in an optimizer step to gather weights and reduce gradients."""
    if place.ranks == 1:
        return 0.0
    if place.fsdp:  # weights twice per micro-batch, even if activations are recomputed, and gradients in fp32
        moved = (2 * place.width * place.parameters + FP32 * place.trained) * layer_part(place) / place.shape.layer
        return place.work.micro_batches * moved
    gathers = 3 if place.work.sharding.gradient_checkpointing else 2
    whole, gradients = place.weights, place.width * place.trained
    if place.stage == 3:
        return place.work.micro_batches * (gathers * whole + gradients)
    if place.stage == 2:
        return place.work.micro_batches * gradients + gradients
    return 2 * gradients


def slowest_link(group: WorkGroup, machine: Machine) -> float:
    """Return the speed of the slowest link that a group's collectives use, in GB/s."""
    assert machine.gpu is not None
    inside = group.devices <= machine.per_node
    return machine.gpu.link if inside else min(machine.gpu.link, machine.network)


def syncing(group: WorkGroup, policy: ModelPlace, machine: Machine) -> list[tuple[str, float]]:
    """Return the time to send the policy's weights to the engines."""
    work, gpu = policy.work, machine.gpu
    assert gpu is not None
    assert work.engine is not None
    if not work.engine.own_weights:
        return [(HOST_LINK, moved_bytes(policy) / (gpu.host * GIGA))]
    sent = policy.width * policy.shape.parameters
    inside = group.has_engine and group.devices == 1
    speed = gpu.bandwidth / 4 if inside else slowest_link(group, machine) if group.has_engine else machine.network
    if not group.has_engine and machine.nodes == 1:
        speed = gpu.link
    parts = [(BANDWIDTH if inside else LINK, sent / (REACHED_LINK * speed * GIGA))]
    return [*parts, (HOST_LINK, 3 * moved_bytes(policy) / (gpu.host * GIGA))]
