"""The sandbox for programs that a policy writes, and the hub that models and data come from."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from urllib.error import HTTPError, URLError

from openrlhf.agents.sandbox.program import close_servers, working_isolation
from openrlhf.cluster.doctor.findings import Finding
from openrlhf.errors import ConfigError

AREA = "Services"
HUB = "https://huggingface.co"
SECONDS = 5.0


def sandbox_findings() -> Iterator[Finding]:
    """Yield how programs would be isolated; start one to find out."""
    try:
        yield Finding(AREA, "sandbox", f"programs that a policy writes are isolated by {working_isolation()}")
    except ConfigError as error:
        fix = "docker run --security-opt seccomp=dockerfile/seccomp.json --security-opt apparmor=unconfined, or "
        fix += "apt install bubblewrap (only rewards that run programs need it)"
        yield Finding(AREA, "sandbox", error.message, "warning", fix)
    finally:
        close_servers()


def hub_findings(*, online: bool) -> Iterator[Finding]:
    """Yield whether the hub answers; without `online`, nothing is sent."""
    hub = os.environ.get("HF_ENDPOINT") or HUB
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding(AREA, "hub", "HF_HUB_OFFLINE is set: only models and data in the cache can be used", "note")
    elif not online:
        yield Finding(AREA, "hub", f"{hub}, not tried (--online tries it)")
    else:
        yield try_hub(hub)


def try_hub(hub: str) -> Finding:
    """Send one request to the hub."""
    fix = "check the network or HTTPS_PROXY, set HF_ENDPOINT to a mirror, or use local folders and HF_HUB_OFFLINE=1"
    try:
        with urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=SECONDS):
            pass
    except HTTPError:  # it answered
        pass
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding(AREA, "hub", f"{hub} cannot be reached: {reason}", "warning", fix)
    return Finding(AREA, "hub", f"{hub} answers")
