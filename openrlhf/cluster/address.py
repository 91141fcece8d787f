"""Find the Ray cluster that a run joins.

It is the one that RAY_ADDRESS or a Ray job names, else one that runs on this machine. If there is none, `driver`
starts one. Clusters are probed first, because Ray itself is slow to notice that one is gone.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

from openrlhf.errors import ConfigError
from openrlhf.monitor import say

SECONDS_TO_REACH = 3.0
SECONDS_TO_ANSWER = 20.0  # including one or two for importing Ray
NEEDS_TOKEN = 3  # exit code of ASK

# Runs in a separate process, because Ray waits 40 seconds for a server that does not answer, and aborts the process if
# a token is missing.
ASK = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit({NEEDS_TOKEN})
"""

State = Literal["alive", "needs a token", "dead"]


def find_cluster(environ: MutableMapping[str, str]) -> str | None:
    """Return the address of the cluster to join, or None to start one.

    It is an error if a cluster was named explicitly but does not answer. If the cluster requires a token and one is
    available, RAY_AUTH_MODE is set in `environ`.
    """
    given = environ.get("RAY_ADDRESS") or ("auto" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ else None)
    if given == "local":
        return None
    if given is not None and "://" in given:
        raise ConfigError(
            f"RAY_ADDRESS is {given}, an address for submitting jobs or for clients, and a run is neither",
            try_this="ray job submit -- python -m openrlhf.cli.train_ppo_ray ..., or RAY_ADDRESS=auto on a node",
        )
    named = given not in (None, "auto")
    address = given if named else address_on_this_machine(environ)
    if address is not None and is_alive(address, environ):
        return address
    if given is not None:
        raise nobody_there(given, address)
    if address is not None:
        say(f"Ray at {address} is gone, though {address_file(environ)} still names it")
    return None


def is_alive(address: str, environ: MutableMapping[str, str]) -> bool:
    """Return whether Ray answers at the address; switch to token authentication if it is needed and possible."""
    state = probe(address, environ)
    if state == "needs a token" and "RAY_AUTH_MODE" not in environ and has_token(environ):
        environ["RAY_AUTH_MODE"] = "token"
        state = probe(address, environ)
    if state == "needs a token":
        raise token_error(address)
    return state == "alive"


def address_file(environ: Mapping[str, str]) -> Path:
    """Return the file in which `ray start` records this machine's cluster; it remains there when Ray dies."""
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    return Path(folder) / "ray" / "ray_current_cluster"


def address_on_this_machine(environ: Mapping[str, str]) -> str | None:
    try:
        return address_file(environ).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def probe(address: str, environ: Mapping[str, str]) -> State:
    """Check within seconds whether Ray answers at the address."""
    if not is_reachable(address):
        return "dead"
    if environ.get("RAY_AUTH_MODE", "").lower() == "token" and not has_token(environ):
        return "needs a token"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK, address], env=environ, capture_output=True, timeout=SECONDS_TO_ANSWER
        )
    except subprocess.TimeoutExpired:
        return "dead"
    if asked.returncode == NEEDS_TOKEN:
        return "needs a token"
    return "alive" if asked.returncode == 0 else "dead"


def is_reachable(address: str) -> bool:
    try:
        with open_line(address):
            return True
    except OSError:
        return False


def open_line(address: str) -> socket.socket:
    """Open a TCP connection to the address, without a timeout once it is connected."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"RAY_ADDRESS is {address}, but must be host:port, auto or local")
    line = socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_REACH)
    line.settimeout(None)
    return line


def has_token(environ: Mapping[str, str]) -> bool:
    """Return whether Ray would find a token: in the environment, in the file it names, or in the home directory."""
    if environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").is_file()


def token_error(address: str) -> ConfigError:
    return ConfigError(
        f"the Ray cluster at {address} wants a token, and the one in this environment is missing or another",
        try_this="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token>, or "
        "RAY_ADDRESS=local for a Ray of your own",
    )


def nobody_there(given: str, address: str | None) -> ConfigError:
    where = f"at {address}" if address is not None else "on this machine"
    return ConfigError(
        f"RAY_ADDRESS is {given}, but no Ray answers {where}",
        try_this="ray start --head there, or unset RAY_ADDRESS to start a Ray of your own",
    )
