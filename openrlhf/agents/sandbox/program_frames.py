"""Requests to a fork server and its answers, as frames on a socket.

A frame is a 4-byte big-endian length followed by JSON. A request may carry one descriptor, which becomes the program's
descriptor 3. `server_handle.ForkServer` and `fork_server.ProgramServer` are the two ends.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

HEADER = struct.Struct(">I")


class ServerLimits(TypedDict):
    """`ProgramLimits` in the form that the server applies."""

    seconds: float
    output: int
    disk: int
    resources: dict[str, tuple[int, int]]  # soft and hard limits by their names in the resource module


class Program(TypedDict):
    """Python `source` or the command `argv`, with its files. The contents of files and `stdin` are in base64."""

    source: str  # unused with `argv`
    argv: list[str]
    stdin: str
    files: dict[str, str]


class ProgramRequest(TypedDict):
    """A program to run."""

    program: Program
    limits: ServerLimits


class ProgramAnswer(TypedDict):
    """How a program ended and what it wrote, or why it could not be started (`failed`, else empty)."""

    failed: str
    code: int
    limit: Literal["seconds", "output"] | None
    seconds: float
    stdout: str
    stderr: str


def read_frame(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next frame and the descriptors that came with it; None at the end of the stream."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, 1)
    while head and len(head) < HEADER.size:
        head += connection.recv(HEADER.size - len(head))
    if not head:
        return None
    (left,) = HEADER.unpack(head)
    parts: list[bytes] = []
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), descriptors


def write_frame(connection: socket.socket, message: Mapping[str, object], descriptors: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(connection, [HEADER.pack(len(data))], descriptors)
        connection.sendall(data)
    else:
        connection.sendall(HEADER.pack(len(data)) + data)
