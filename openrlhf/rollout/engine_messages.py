"""Messages between the trainer and an engine process that it started: pickles, each preceded by its length.

Both ends run our own code and share a socket pair that no other process can open. (User code runs elsewhere, in the
worker processes of `agents.sandbox`, which send JSON.)
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from openrlhf.errors import OpenRLHFError

LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class EngineCall:
    """Call a method of the engine's worker."""

    number: int
    method: str
    arguments: tuple[object, ...]
    named: Mapping[str, object]


@dataclass(frozen=True)
class CancelEngineCall:
    """Cancel a call; it gets no answer."""

    number: int


@dataclass(frozen=True)
class Returned:
    """A call's result."""

    number: int
    result: object


@dataclass(frozen=True)
class Raised:
    """A call's error; an error that is not ours is a BackendError with a traceback."""

    number: int
    error: OpenRLHFError
    traceback: str = ""


Message: TypeAlias = EngineCall | CancelEngineCall | Returned | Raised


def encode(message: Message) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message, or None if the other end is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
