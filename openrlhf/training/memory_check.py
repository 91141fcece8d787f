"""Memory before and during a run: reject one that cannot fit, and explain an out-of-memory error.

`check_memory` plans a run before its models load (`openrlhf/plan`). It rejects only runs that cannot fit even with the
shortest data, and prints one line about tight ones. `explain_memory` turns an out-of-memory error of a phase into one
that names the largest terms of the plan and the flags that help.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import TrainingConfig
from openrlhf.config.workload import Workload, workload_of
from openrlhf.errors import ConfigError, DeviceMemoryError, first_line
from openrlhf.monitor import say
from openrlhf.plan.assessment import Assessment, assess, remedy, suggestions
from openrlhf.plan.estimate import Phase, Shapes
from openrlhf.plan.gpus import GIB, GPU, Machine, find_gpu
from openrlhf.plan.shapes import read_shape
from openrlhf.plan.terms import largest, total

OVERRIDE = "--skip_memory_check to start anyway"
CUDA_TEXT = "CUDA out of memory"  # in PyTorch's message, which other errors quote
HELPFUL = 3  # flags in a message


def detect_machine(asked: str = "auto") -> Machine:
    """Return this machine, with the GPU of this process or, if there are several processes, the smallest GPU."""
    host = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if asked == "cpu" or not torch.cuda.is_available():
        return Machine(None, host_memory=host)
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    used = devices[torch.cuda.current_device()]
    if world_size() > 1:
        used = min(devices, key=lambda device: device.total_memory)
    # For a GPU that is not in the table, take its own memory and the speed of an A10.
    unknown = GPU(used.name, used.total_memory, teraflops=125.0, bandwidth=600.0, link=25.0, host=20.0)
    return Machine(find_gpu(used.name, used.total_memory) or unknown, len(devices), host_memory=host)


def read_shapes(work: Workload) -> Shapes:
    """Read the shapes of all models of a run."""
    models = {(model.name, model.scalar) for group in work.groups for model in group.models}
    return {(name, scalar): read_shape(name, work.loading, scalar=scalar) for name, scalar in sorted(models)}


def plan_run(config: TrainingConfig, machine: Machine) -> Assessment | None:
    """Plan a run; None if a model's own code fails to build it without weights."""
    work = workload_of(config, world_size())
    try:
        return assess(work, machine, read_shapes(work))
    except Exception:  # noqa: BLE001 - a model's code may raise anything; a prediction must not end a run
        return None


def check_memory(config: TrainingConfig, machine: Machine | None) -> None:
    """Raise if a run cannot fit on the machine; print a line if it is tight. None: the machine is not known."""
    if config.run.skip_memory_check or machine is None:
        return
    plan = plan_run(config, machine)
    if plan is None or plan.fit == "fits":
        return
    if plan.fit == "cannot fit":
        raise ConfigError(f"the run cannot fit: {plan.problem()}", try_this=f"{helpful_flags(plan)}, or {OVERRIDE}")
    if machine.gpu is not None:
        may = "is tight" if plan.fit == "is tight" else "may run out of memory"
        say(f"the run {may}: {plan.problem()}. If it does not fit: {helpful_flags(plan)}")


def helpful_flags(plan: Assessment) -> str:
    """Return the flags that help, in order: those that make the run fit together, or else the most effective ones."""
    chosen = list(dict.fromkeys(change.flags for change in remedy(plan)))
    if chosen:
        return " ".join(chosen)
    found = [change.flags for change in suggestions(plan)[:HELPFUL]]
    return " or ".join([*found, "more or larger devices"])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is PyTorch's out-of-memory error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | DeviceMemoryError) or CUDA_TEXT in str(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@contextmanager
def explain_memory(config: TrainingConfig, phase: Phase, machine: Machine | None) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into a DeviceMemoryError that names the phase and what helps."""
    try:
        yield
    except (RuntimeError, ConfigError) as error:  # a ConfigError if a model's self-test runs out of memory
        if not is_out_of_memory(error) or getattr(error, "explained", False):
            raise
        raise memory_error(config, phase, machine, error) from error


def memory_error(config: TrainingConfig, phase: Phase, machine: Machine | None, cause: Exception) -> DeviceMemoryError:
    """Return the error of a phase that ran out of memory; without a machine, it has no plan."""
    said = first_line(cause).rstrip(".")
    plan = None if machine is None else plan_run(config, machine)
    if plan is None:
        helps = "openrlhf plan, which shows what needs the memory and which flags help"
        return DeviceMemoryError(f"out of GPU memory in {phase}: {said}", try_this=helps, explained=True)
    planned = plan.phase(phase) or plan.fullest.peak
    parts = ", ".join(map(str, largest(planned.device)))
    message = (
        f"out of GPU memory in {phase}, which was planned to need {total(planned.device) / GIB:.1f} of "
        f"{plan.memory / GIB:.1f} GiB ({parts}): {said}"
    )
    found = [change.flags for change in suggestions(plan)[:HELPFUL]]
    helps = " or ".join(found) or "a smaller model, or larger devices"
    return DeviceMemoryError(message, try_this=f"{helps}; openrlhf plan shows the rest", explained=True)
