"""The plan command: predict the memory and time of a training command from its flags and the models' config.json."""

from __future__ import annotations

import sys
from dataclasses import replace

from openrlhf.config.commands import TrainingConfig
from openrlhf.config.plan import PlanFlags
from openrlhf.config.workload import workload_of
from openrlhf.errors import OpenRLHFError
from openrlhf.plan.assessment import Assessment, assess, remedy
from openrlhf.plan.gpus import GIB, Machine, parse_gpus
from openrlhf.plan.report import render, to_json
from openrlhf.training.memory_check import detect_machine, read_shapes

GBIT = 1 / 8  # GB


def run(name: str, config: TrainingConfig, flags: PlanFlags) -> Assessment:
    """Print the plan of a command; raise if the run does not fit. The config must already be checked."""
    machine = machine_of(config, flags)
    work = workload_of(config, machine.devices)
    plan = assess(work, machine, read_shapes(work))
    sys.stdout.write(to_json(plan, name) if flags.json else render(plan, name))
    if plan.fit in ("does not fit", "cannot fit"):
        chosen = " ".join(dict.fromkeys(change.flags for change in remedy(plan)))
        raise OpenRLHFError(f"the run {plan.fit} on {machine}", try_this=chosen or "more or larger devices")
    return plan


def machine_of(config: TrainingConfig, flags: PlanFlags) -> Machine:
    """Return the machine that the flags describe, or else this one."""
    host = None if flags.host_memory is None else flags.host_memory * GIB
    if flags.gpus is None:
        found = detect_machine(config.model.device)
        return replace(found, nodes=flags.nodes, host_memory=host or found.host_memory, network=flags.network * GBIT)
    count, gpu = parse_gpus(flags.gpus)
    return Machine(gpu, count, flags.nodes, host, flags.network * GBIT)
