"""Find the Ray cluster that a run joins.

RAY_ADDRESS or a Ray job may name the cluster. Otherwise a run joins a cluster on this machine that needs no token, or
`driver` starts one. Clusters are probed first, because Ray itself is slow to notice that a cluster is gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from openrlhf.errors import ConfigError
from openrlhf.monitor import say

SECONDS_TO_CONNECT = 3.0
SECONDS_TO_ANSWER = 20.0  # time limit of PROBE, including one or two seconds to import Ray
MAX_RECORD = 256  # characters read from Ray's file, which holds an address
NEEDS_TOKEN = 3  # exit code of PROBE if a token is missing or wrong
SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # Linux only
LISTENING = "0A"  # state in SOCKET_TABLES

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

    Raise ConfigError if a cluster was named explicitly but does not answer. If a named cluster requires a token and one
    is available, set RAY_AUTH_MODE in `environ`. The token is never sent to a cluster that was not named: its address
    comes from a file that may be out of date, so another process may answer there. For the same reason, `auto` names a
    cluster only if this user or root listens at that address.
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
    address, named = given, True
    if given in (None, "auto"):
        address = read_record(record, needed=given == "auto")
        owners = set() if address is None else find_listeners(address)
        if strangers := owners - {0, os.geteuid()}:
            who = " and ".join(map(str, sorted(strangers)))
            message = f"user {who} listens at {address}, the address in {record}: expected this user or root"
            if given == "auto":
                raise ConfigError(message, try_this="RAY_ADDRESS=host:port of the cluster")
            say(f"{message}; it is ignored")
            return None
        named = given == "auto" and bool(owners)
    if address is not None and is_alive(address, environ, named=named):
        if environ.get("RAY_AUTH_MODE", "").lower() != "token":
            say(
                f"joining the Ray cluster at {address} without a token: anyone who reaches its ports can run code there"
            )
        return address
    if given is not None:
        where = f"at {address}" if address is not None else "on this machine"
        raise ConfigError(
            f"RAY_ADDRESS is {given}, but no Ray cluster answers {where}",
            try_this="ray start --head on that machine, or unset RAY_ADDRESS to start a private Ray",
        )
    if address is not None:
        say(f"no Ray cluster answers at {address}, the address in {record}; it is ignored")
    return None


def read_record(record: Path, *, needed: bool) -> str | None:
    """Return the address in Ray's file; None if the file is missing or another user may have written it.

    The file and its two parent folders must belong to this user or to root. Everyone may write to Ray's folder, so
    another user can replace the file, but the new file then belongs to that user. Raise ConfigError if the file is
    `needed` but cannot be trusted.
    """
    try:
        # Do not follow a link, and do not block on a named pipe.
        handle = os.open(record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, encoding="utf-8") as file:
            found = [os.fstat(handle), *(folder.stat() for folder in record.parents[:2])]
            address = file.read(MAX_RECORD).strip()
    except (OSError, UnicodeDecodeError):
        return None
    stranger = next((status.st_uid for status in found if status.st_uid not in (0, os.geteuid())), None)
    if stranger is None and stat.S_ISREG(found[0].st_mode) and not found[0].st_mode & stat.S_IWOTH:
        return address or None
    who = "everyone may write it" if stranger is None else f"it or its folder belongs to user {stranger}"
    message = f"{record} cannot be trusted: expected a file that only this user or root can write, but {who}"
    if needed:
        raise ConfigError(message, try_this="RAY_ADDRESS=host:port of the cluster")
    say(f"{message}; it is ignored")
    return None


def find_listeners(address: str) -> set[int]:
    """Return the ids of the users that listen at an address of this machine; empty if they cannot be determined."""
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
        with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as test:
            test.bind((str(ip), 0))  # fails for an address of another machine
        lines = [line.split() for table in SOCKET_TABLES if table.exists() for line in table.read_text().splitlines()]
        hosts = (ip.packed, bytes(10) + b"\xff\xff" + ip.packed, bytes(4), bytes(16))  # mapped to IPv6; all interfaces
        names = {f"{hex_words(packed)}:{int(port):04X}" for packed in hosts}
    except (OSError, ValueError):
        return set()
    return {int(line[7]) for line in lines if line[1] in names and line[3] == LISTENING}


def hex_words(packed: bytes) -> str:
    """Return an IP address as the kernel prints it in SOCKET_TABLES: 32-bit words in the machine's byte order."""
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def is_alive(address: str, environ: MutableMapping[str, str], *, named: bool) -> bool:
    """Return within seconds whether Ray answers; enable token authentication if it is required and a token exists.

    The token is sent only to a cluster that the user `named`.
    """
    if not is_reachable(address):
        return False
    # Ray looks for a token in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH, and in the home directory.
    file = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    if not named:
        if environ.get("RAY_AUTH_MODE", "").lower() == "token":
            raise unnamed_error(address)
        code = probe(address, {**environ, "RAY_AUTH_MODE": "disabled"})
        if code == NEEDS_TOKEN:
            raise unnamed_error(address)
        if code == 0:
            environ["RAY_AUTH_MODE"] = "disabled"  # otherwise Ray sends a token if it finds one
        return code == 0
    while has_token or environ.get("RAY_AUTH_MODE", "").lower() != "token":
        code = probe(address, environ)
        if code != NEEDS_TOKEN:
            return code == 0
        if "RAY_AUTH_MODE" in environ or not has_token:
            break
        environ["RAY_AUTH_MODE"] = "token"
    raise token_error(address)


def probe(address: str, environ: Mapping[str, str]) -> int | None:
    """Return the exit code of PROBE; None if Ray does not answer in time."""
    command = [sys.executable, "-c", PROBE, address]
    try:
        return subprocess.run(command, env=environ, capture_output=True, timeout=SECONDS_TO_ANSWER).returncode
    except subprocess.TimeoutExpired:
        return None


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


def unnamed_error(address: str) -> ConfigError:
    return ConfigError(
        f"cannot join this machine's Ray cluster at {address}, because a token is sent only to a cluster that you "
        "name: expected RAY_ADDRESS=host:port",
        try_this=f"RAY_ADDRESS={address} to join it with the token, or RAY_ADDRESS=local to start a private Ray",
    )


def token_error(address: str) -> ConfigError:
    return ConfigError(
        f"the Ray cluster at {address} requires a token, but the token in this environment is missing or wrong",
        try_this="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<the file with the cluster's token>, or "
        "RAY_ADDRESS=local to start a private Ray",
    )
