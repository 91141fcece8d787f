"""Collect the findings and print them: a table and what to fix, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from openrlhf.cluster.doctor.devices import device_findings
from openrlhf.cluster.doctor.findings import Diagnosis
from openrlhf.cluster.doctor.host import host_findings
from openrlhf.cluster.doctor.packages import package_findings
from openrlhf.cluster.doctor.services import hub_findings, sandbox_findings
from openrlhf.config.commands import DoctorConfig
from openrlhf.errors import OpenRLHFError, counted


def run(config: DoctorConfig) -> None:
    """Print the report; raise if something that every run needs is broken."""
    findings = examine(online=config.report.online)
    as_json = json.dumps([asdict(one) for one in findings], indent=2)
    sys.stdout.write(f"{as_json if config.report.json else render(findings)}\n")
    broken = [one.subject for one in findings if one.status == "broken"]
    if broken:
        raise OpenRLHFError(f"no run works on this machine yet: {', '.join(broken)}", try_this="the fixes above")


def examine(*, online: bool) -> list[Diagnosis]:
    """Return all findings about this machine."""
    hub = hub_findings(online=online)
    return [*package_findings(), *device_findings(), *host_findings(), *sandbox_findings(), *hub]


def render(findings: Sequence[Diagnosis]) -> str:
    """Return the findings as text, by area, followed by the fixes."""
    wide = max(len(one.subject) for one in findings)
    lines: list[str] = []
    for area, members in groupby(findings, key=lambda one: one.area):
        lines += [area, *(f"  {one.status:<9}{one.subject:<{wide}}  {one.value}" for one in members), ""]
    wrong = [one for one in findings if one.fix]
    if not wrong:
        return "\n".join([*lines, "Nothing to fix."])
    fixes = [f"  {number}. {one.subject} ({one.status}): {one.fix}" for number, one in enumerate(wrong, start=1)]
    return "\n".join([*lines, f"{counted(len(wrong), 'thing')} to fix", *fixes])
