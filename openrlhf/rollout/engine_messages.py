"""Messages between the trainer and an engine process that it started: pickles, each in one frame (`subprocesses`).

Both ends run our own code and share a socket pair that no other process can open. (User code runs elsewhere, in the
worker processes of `agents.sandbox`, which send JSON.)
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from openrlhf.errors import OpenRLHFError
from openrlhf.subprocesses import frame, read_frames


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
    return frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


async def received(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Yield each message until the other end is gone."""
    async for data in read_frames(reader):
        yield pickle.loads(data)
