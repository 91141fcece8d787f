"""A plan as text for a terminal, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from openrlhf.monitor import shown_count
from openrlhf.plan.assessment import Assessment, remedy, suggestions
from openrlhf.plan.estimate import GroupMemory, PhaseMemory
from openrlhf.plan.gpus import GIB
from openrlhf.plan.terms import Term, total

SHOWN = 6  # suggestions
LENGTHS = "Sizes are for the longest sequences that the flags allow; shorter data needs less."


def render(plan: Assessment, command: str) -> str:
    """Return the tables of a plan, followed by the verdict and the suggested changes."""
    each = "" if plan.machine.gpu is None else f", {plan.memory / GIB:.1f} GiB each"
    lines = [f"{command} on {plan.machine}{each}", *model_lines(plan)]
    for group in plan.groups:
        models = "" if len(plan.groups) == 1 else f": {group.name}"
        if plan.machine.gpu is None:
            lines += ["", *table("GiB of host memory", group, lambda phase: phase.device)]
            continue
        devices = "the GPU" if group.devices == 1 else f"each of {group.devices} GPUs"
        lines += ["", *table(f"GiB on {devices}{models}", group, lambda phase: phase.device)]
        lines += ["", *table(f"GiB of host memory on a node{models}", group, lambda phase: phase.host)]
    if plan.seconds:
        lines += ["", "seconds of a step, limited by"]
        lines += [f"  {one.phase:<12}{one.seconds:>9.1f}  {one.limit}" for one in plan.seconds]
    return "\n".join(line.rstrip() for line in [*lines, "", *verdict(plan), "", LENGTHS]) + "\n"


def model_lines(plan: Assessment) -> list[str]:
    lines: list[str] = []
    for group in plan.work.groups:
        for model in group.models:
            shape = plan.shapes[model.name, model.scalar]
            active = f", {shown_count(round(shape.active))} active" if shape.routed else ""
            lines.append(f"  {model.role:<14}{shown_count(round(shape.parameters))} parameters{active}  {model.name}")
    return lines


def table(title: str, group: GroupMemory, of: Callable[[PhaseMemory], Sequence[Term]]) -> list[str]:
    """Return one row per role and kind, one column per phase."""
    rows = list(dict.fromkeys((term.role, term.kind) for phase in group.phases for term in of(phase)))
    wide = max([len(title), *(len(f"  {role} {kind}") for role, kind in rows)])
    lines = [f"{title:<{wide}}" + "".join(f"{phase.phase:>12}" for phase in group.phases)]
    for role, kind in rows:
        sizes = [total(term for term in of(phase) if (term.role, term.kind) == (role, kind)) for phase in group.phases]
        lines.append(f"{f'  {role} {kind}':<{wide}}" + "".join(f"{gib(size):>12}" for size in sizes))
    sums = [total(of(phase)) for phase in group.phases]
    return [*lines, f"{'  total':<{wide}}" + "".join(f"{gib(size):>12}" for size in sums)]


def gib(size: float) -> str:
    return "" if size < 0.05 * GIB else f"{size / GIB:.1f}"


def verdict(plan: Assessment) -> list[str]:
    """Return lines that say whether the run fits, what needs the most memory, and which flags help."""
    lines = [f"The run {plan.fit}: {plan.problem()}."]
    if plan.work.devices > plan.machine.devices:
        lines.append(f"It uses {plan.work.devices} devices, but there are only {plan.machine.devices}.")
    found = suggestions(plan)
    if found and plan.fit != "fits":
        lines += ["", "what to change, by effect" + " " * 20 + "GiB after it"]
        lines += [f"  {one.flags:<45}{one.peak / GIB:>10.1f}" for one in found[:SHOWN]]
        chosen = remedy(plan)
        flags = " ".join(dict.fromkeys(one.flags for one in chosen))
        nothing = (
            "No combination of these fits. Try: shorter or fewer samples, a smaller model, or more or larger devices"
        )
        lines.append(f"It fits with {flags}" if chosen else nothing)
    return lines


def to_json(plan: Assessment, command: str) -> str:
    """Return a plan as JSON; sizes are in bytes."""
    values = {
        "command": command,
        "machine": asdict(plan.machine),
        "fit": plan.fit,
        "groups": [asdict(group) for group in plan.groups],
        "seconds": [asdict(one) for one in plan.seconds],
        "suggestions": [{"flags": one.flags, "peak": one.peak} for one in suggestions(plan)],
    }
    return json.dumps(values, indent=2) + "\n"
