"""The sandbox for programs that a policy writes, and the hub that models and data come from."""

from __future__ import annotations

import os
from collections.abc import Iterator

from openrlhf.agents.sandbox.program import close_servers, working_isolation
from openrlhf.cluster.doctor.findings import Diagnosis
from openrlhf.data.hub import connection_failure
from openrlhf.errors import ConfigError

AREA = "Services"
HUB = "https://huggingface.co"


def sandbox_findings() -> Iterator[Diagnosis]:
    """Yield a finding about the isolation of programs, after starting one."""
    try:
        yield Diagnosis(AREA, "sandbox", f"programs that a policy writes are isolated by {working_isolation()}")
    except ConfigError as error:
        fix = "docker run --security-opt seccomp=dockerfile/seccomp.json --security-opt apparmor=unconfined, or "
        fix += "apt install bubblewrap (only rewards that run programs need it)"
        yield Diagnosis(AREA, "sandbox", error.message, "warning", fix)
    finally:
        close_servers()


def hub_findings(*, online: bool) -> Iterator[Diagnosis]:
    """Yield a finding about the hub; without `online`, do not contact it."""
    hub = os.environ.get("HF_ENDPOINT") or HUB
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Diagnosis(AREA, "hub", "HF_HUB_OFFLINE is set: only models and data in the cache can be used", "note")
    elif not online:
        yield Diagnosis(AREA, "hub", f"{hub}, not tried (--online tries it)")
    elif reason := connection_failure(hub):
        fix = "check the network or HTTPS_PROXY, set HF_ENDPOINT to a mirror, or use local folders and HF_HUB_OFFLINE=1"
        yield Diagnosis(AREA, "hub", f"{hub} cannot be reached: {reason}", "warning", fix)
    else:
        yield Diagnosis(AREA, "hub", f"{hub} can be reached")
