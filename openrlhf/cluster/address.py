"""Find the Ray cluster that a run joins.

It is the one that RAY_ADDRESS or a Ray job names, else one that runs on this machine. If there is none, `driver`
starts one. Clusters are probed first, because Ray itself is slow to notice that one is gone.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from openrlhf.errors import ConfigError
from openrlhf.monitor import say

SECONDS_TO_CONNECT = 3.0
SECONDS_TO_ANSWER = 20.0  # including one or two for importing Ray
NEEDS_TOKEN = 3  # exit code of PROBE

# Runs in a separate process, because Ray waits 40 seconds for a server that does not answer, and aborts the process if
# a token is missing.
PROBE = f"""
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError:
    sys.exit({NEEDS_TOKEN})
"""


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
            f"RAY_ADDRESS is {given}, an address for submitting jobs or for clients: expected host:port, auto or local",
            try_this="ray job submit -- python -m openrlhf.cli.train_ppo_ray ..., or RAY_ADDRESS=auto on a node",
        )
    # `ray start` records this machine's cluster in a file, which remains there when Ray dies.
    folder = environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp"
    record = Path(folder) / "ray" / "ray_current_cluster"
    address = given
    if given in (None, "auto"):
        try:
            address = record.read_text(encoding="utf-8").strip() or None
        except OSError:
            address = None
    if address is not None and is_alive(address, environ):
        return address
    if given is not None:
        where = f"at {address}" if address is not None else "on this machine"
        raise ConfigError(
            f"RAY_ADDRESS is {given}, but no Ray answers {where}",
            try_this="ray start --head there, or unset RAY_ADDRESS to start a private Ray",
        )
    if address is not None:
        say(f"Ray at {address} is gone, though {record} still names it")
    return None


def is_alive(address: str, environ: MutableMapping[str, str]) -> bool:
    """Return within seconds whether Ray answers; switch to token authentication if it is needed and possible."""
    if not is_reachable(address):
        return False
    # Ray looks for a token in the environment, in the file it names, and in the home directory.
    file = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    command = [sys.executable, "-c", PROBE, address]
    while has_token or environ.get("RAY_AUTH_MODE", "").lower() != "token":
        try:
            probed = subprocess.run(command, env=environ, capture_output=True, timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            return False
        if probed.returncode != NEEDS_TOKEN:
            return probed.returncode == 0
        if "RAY_AUTH_MODE" in environ or not has_token:
            break
        environ["RAY_AUTH_MODE"] = "token"
    raise token_error(address)


def is_reachable(address: str) -> bool:
    try:
        with open_connection(address):
            return True
    except OSError:
        return False


def open_connection(address: str) -> socket.socket:
    """Open a TCP connection to the address, without a timeout once it is connected."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"RAY_ADDRESS is {address}: expected host:port, auto or local")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_CONNECT)
    connection.settimeout(None)
    return connection


def token_error(address: str) -> ConfigError:
    return ConfigError(
        f"the Ray cluster at {address} requires a token: the one in this environment is missing or wrong",
        try_this="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token>, or "
        "RAY_ADDRESS=local to start a private Ray",
    )
