"""Memory of a run by group of devices and phase, from the models that are on a device in each phase and their work.

A phase ends before the next one begins, so each has its own peak. Sleeping models are in host memory, and pinned
buffers stay there for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from openrlhf.config.workload import WorkGroup, Workload, WorkModel
from openrlhf.plan.activations import forward_terms, training_terms
from openrlhf.plan.engine import ROLE, EnginePlace
from openrlhf.plan.gpus import GIB, Machine
from openrlhf.plan.shapes import ModelShape
from openrlhf.plan.states import FP32, ModelPlace, gathered_terms, outer_parameters, resting_terms, weight_terms
from openrlhf.plan.terms import STATES, Term, times, total

Phase = str
LOADING, GENERATION, EXPERIENCE = "loading", "generation", "experience"
TRAINING, SYNC, SAVING = "training", "sync", "saving"
Shapes = Mapping[tuple[str, bool], ModelShape]  # keys: name of the model, and whether its head is scalar

CONTEXT_BYTES = 0.6 * GIB  # taken by CUDA and cuBLAS in each process on a GPU
NCCL_BYTES = 0.7 * GIB  # buffers of a process that communicates with others
RESERVE_SHARE = 0.15  # share of temporary tensors' memory that PyTorch's allocator loses to fragmentation
MIN_SYNC_BUCKET, MAX_SYNC_BUCKET, BUCKETS_PER_MODEL = 1 << 28, 1 << 30, 16  # rollout/bucket.py
HOST_PROCESS = 4 * GIB  # host memory of Python, PyTorch and CUDA in one process
LOADED_FILE = 5 * GIB  # part of a checkpoint that each process holds while it reads it under ZeRO-3
TIGHT = 0.92  # share of the memory above which a run is tight


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of one phase."""

    phase: Phase
    device: tuple[Term, ...]  # on each device
    host: tuple[Term, ...]  # on each node


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the phases of a group of devices that hold the same models."""

    name: str
    devices: int
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs the most device memory."""
        return max(self.phases, key=lambda phase: total(phase.device))

    @property
    def host_peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: total(phase.host))


@dataclass(frozen=True)
class GroupPlaces:
    """The models of a group, and the engines on its devices."""

    work: Workload
    group: WorkGroup
    models: tuple[ModelPlace, ...]
    engine: EnginePlace | None

    @property
    def trained(self) -> list[ModelPlace]:
        return [place for place in self.models if place.model.trained]

    @property
    def frozen(self) -> list[ModelPlace]:
        return [place for place in self.models if not place.model.trained]


def estimate(work: Workload, machine: Machine, shapes: Shapes) -> tuple[GroupMemory, ...]:
    """Return the memory of each group of devices; engines with their own devices are also a group."""
    found: list[GroupMemory] = []
    engine = engine_of(work, machine, shapes)
    for group in work.groups:
        places = tuple(place_of(work, group, model, shapes, machine) for model in group.models)
        here = GroupPlaces(work, group, places, engine if group.has_engine else None)
        found.append(group_memory(here, machine))
    if engine is not None and not any(group.has_engine for group in work.groups):
        context = Term(ROLE, "CUDA context", CONTEXT_BYTES + NCCL_BYTES, certain=False)
        host = Term(ROLE, "processes", HOST_PROCESS * min(engine.engine.devices, machine.per_node), certain=False)
        needed = PhaseMemory(GENERATION, (*engine.terms(), context), (host,))
        found.append(GroupMemory("engines", work.devices - sum(group.devices for group in work.groups), (needed,)))
    return tuple(found)


def engine_of(work: Workload, machine: Machine, shapes: Shapes) -> EnginePlace | None:
    """Return the engines of a run; None for a supervised command."""
    policy = work.groups[0].models[0]
    return None if work.engine is None else EnginePlace(work, work.engine, shapes[policy.name, policy.scalar], machine)


def place_of(work: Workload, group: WorkGroup, model: WorkModel, shapes: Shapes, machine: Machine) -> ModelPlace:
    return ModelPlace(work, group, model, shapes[model.name, model.scalar], on_cpu=machine.gpu is None)


def group_memory(here: GroupPlaces, machine: Machine) -> GroupMemory:
    """Return the phases of a group."""
    makers: dict[Phase, Callable[[GroupPlaces], list[Term]]] = {LOADING: on_load}
    if here.engine is not None:
        makers[GENERATION] = in_generation
    if any(place.model.trained is False or place.work.trains_policy for place in here.models):
        makers[EXPERIENCE] = in_experience
    if here.trained:
        makers[TRAINING] = in_training
    if here.work.trains_policy and here.models[0].model.role == "policy":
        makers[SYNC] = in_sync
    if here.trained:
        makers[SAVING] = on_save
    per_node = max(1, here.group.devices // here.group.nodes)
    per_node = min(per_node, machine.per_node) if machine.gpu is not None else per_node
    phases = [
        PhaseMemory(phase, with_overhead(here, make(here), machine), in_host_memory(here, phase, per_node))
        for phase, make in makers.items()
    ]
    return GroupMemory(here.group.name, here.group.devices, tuple(phases))


def with_overhead(here: GroupPlaces, found: Sequence[Term], machine: Machine) -> tuple[Term, ...]:
    """Add what CUDA and PyTorch's allocator take, and drop empty terms."""
    if machine.gpu is None:
        return tuple(term for term in found if term.size > 0)
    passing = total(term for term in found if not term.certain and term.role != ROLE)
    separate = here.engine is not None and here.engine.engine.vllm and here.group.name != "model"
    contexts = CONTEXT_BYTES * (1 + separate) + (NCCL_BYTES if here.group.devices > 1 else 0.0)
    added = (
        Term("PyTorch", "allocator reserve", RESERVE_SHARE * passing, certain=False),
        Term("PyTorch", "CUDA context", contexts, certain=False),
    )
    return tuple(term for term in (*found, *added) if term.size > 0)


# What is on a device in each phase.


def resident(places: Sequence[ModelPlace]) -> list[Term]:
    return [term for place in places for term in resting_terms(place)[0]]


def engine_terms(here: GroupPlaces, *, awake: bool, weights: bool = False) -> list[Term]:
    """Return the engines' memory: all of it, only the weights, or nothing while they sleep."""
    if here.engine is None:
        return []
    found = here.engine.terms()
    if not here.engine.engine.vllm:  # the cache exists only during generation
        return found if awake else [term for term in found if term.kind == "weights"]
    if awake or not here.engine.engine.sleeps:
        return found
    return [term for term in found if weights and term.kind == "weights"]


def awake(here: GroupPlaces, place: ModelPlace | None) -> list[Term]:
    """Return the states of the models on the device while one trained model is in use."""
    kept = here.trained if not here.work.sleeps else [place] if place is not None else []
    return [*resident(here.frozen), *resident(kept)]


def on_load(here: GroupPlaces) -> list[Term]:
    """All models are on the device before the first one goes to sleep; PyTorch's moments exist after the first step."""
    states = [
        term
        for place in here.models
        for term in resting_terms(place)[0]
        if term.kind != "optimizer states" or place.deepspeed
    ]
    return [*states, *engine_terms(here, awake=False)]


def in_generation(here: GroupPlaces) -> list[Term]:
    shared = here.engine is not None and not here.engine.engine.own_weights
    policy = here.trained[0] if shared and here.trained else None
    return [*awake(here, policy), *engine_terms(here, awake=True)]


def in_experience(here: GroupPlaces) -> list[Term]:
    """Models score one after the other; the critic's or the policy's states may be on the device at the same time."""
    scored = [p for p in here.trained if p.model.role == "critic" or here.work.scores_policy]
    options: list[list[Term]] = [[*awake(here, place), *forward_terms(place)] for place in scored]
    for place in here.frozen:
        moved = weight_terms(place) if place.model.offloaded else []
        options.append([*awake(here, scored[0] if scored else None), *moved, *forward_terms(place)])
    best = max(options, key=total, default=awake(here, None))
    return [*best, *engine_terms(here, awake=False)]


def in_training(here: GroupPlaces) -> list[Term]:
    options = [[*awake(here, place), *training_terms(place)] for place in here.trained]
    return [*max(options, key=total), *engine_terms(here, awake=False)]


def in_sync(here: GroupPlaces) -> list[Term]:
    policy = here.models[0]
    shares = here.engine is not None and not here.engine.engine.own_weights
    model = policy.width * policy.shape.parameters
    bucket = min(MAX_SYNC_BUCKET, max(MIN_SYNC_BUCKET, model / BUCKETS_PER_MODEL))
    buffers = 0.0 if shares else 2 * bucket + policy.width * policy.shape.largest
    sent = [Term("policy", "sync buffers", buffers), *gathered_terms(policy)]
    return [*awake(here, policy), *sent, *engine_terms(here, awake=False, weights=True)]


def on_save(here: GroupPlaces) -> list[Term]:
    options = [awake(here, place) for place in here.trained]
    return [*max(options, key=total), *engine_terms(here, awake=False)]


# What is in the host memory of a node.


def in_host_memory(here: GroupPlaces, phase: Phase, per_node: int) -> tuple[Term, ...]:
    """Return the terms of all processes of a node."""
    found: list[Term] = [Term("all", "processes", HOST_PROCESS, certain=False)]
    for place in here.models:
        if place.on_cpu:
            continue
        device, host = resting_terms(place)
        found += host
        pinned = total(term for term in host if term.kind in ("fp32 masters", "offloaded"))
        if here.work.sleeps and place.model.trained and phase != LOADING:
            states = total(term for term in device if term.kind in STATES)
            found.append(place.term("asleep", states))
            pinned += states
        if not place.deepspeed:  # PyTorch rounds up each tensor, and DeepSpeed joins them into a few large ones
            found.append(place.term("rounding of pinned memory", (place.shape.rounding - 1) * pinned, certain=False))
    if phase == LOADING and here.models and not here.models[0].on_cpu:
        found.append(max((loading_term(place) for place in here.models), key=lambda term: term.size))
    if phase == SAVING:
        found.append(max((saving_term(place) for place in here.trained), key=lambda term: term.size))
    each = list(times(found, per_node))
    if here.work.moving_average and here.models[0].model.role == "policy":
        policy = here.models[0]  # each process averages its shard; without shards, the first one averages everything
        share = per_node / policy.ranks if policy.is_sharded and policy.split == 1 else 1.0
        each.append(policy.term("moving average", share * FP32 * policy.trained))
    return tuple(term for term in each if term.size > 0)


def loading_term(place: ModelPlace) -> Term:
    """Return the host memory of a process that loads a model; under ZeRO-3, only language models are loaded in shards.

    Under FSDP, weights are mapped from files, and trained ones are widened to fp32 one layer at a time.
    """
    whole = place.width * place.shape.parameters
    if place.fsdp and not place.shape.routed:  # experts are joined while they load
        widened = FP32 if place.model.trained and not place.adapted else place.width
        return place.term("loading", widened * max(place.shape.layer, outer_parameters(place)), certain=False)
    sharded = place.is_sharded and not place.model.scalar
    size = min(whole, place.weights / place.ranks + LOADED_FILE) if sharded else whole
    size = min(whole, LOADED_FILE) if place.work.loading.load_in_4bit else size
    return place.term("loading", size, certain=False)


def saving_term(place: ModelPlace) -> Term:
    """Return the host memory of a process that writes a checkpoint; without DeepSpeed, all states are held together."""
    states = 3 * FP32 * place.trained / (place.ranks if place.fsdp else 1)
    if place.deepspeed or not place.work.resumable:
        states = 0.0
    return place.term("files being written", states, certain=False)
