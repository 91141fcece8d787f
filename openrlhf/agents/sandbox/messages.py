"""Message format of the pipe between the trainer and a worker process.

Calls to a worker are pickled, because a label may be any object from a dataset. Replies are JSON, so the trainer never
unpickles objects that user code made. Each message is preceded by its length as 8 bytes, big-endian.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.config.sections.data import TemplateFlags

HEADER = struct.Struct(">Q")
Kind = Literal["reward", "agent"]


@dataclass(frozen=True)
class Spec:
    """First message to a worker: the user's file to serve, and the settings of its episodes."""

    file: str
    kind: Kind
    max_length: int = 0
    max_turns: int | None = None
    scored_later: bool = False  # reward models score episodes that return no reward
    tokenizer_folder: str | None = None
    tokenizer_class: tuple[str, str] = ("transformers", "AutoTokenizer")  # module and name
    trust_remote_code: bool = False
    template: TemplateFlags = field(default_factory=TemplateFlags)


def pack_call(message: object) -> bytes:
    """Encode a message from the trainer to a worker."""
    return _framed(pickle.dumps(message))


def unpack_call(data: bytes) -> Any:
    return pickle.loads(data)


def pack_reply(message: list[Any]) -> bytes:
    """Encode a message from a worker to the trainer."""
    return _framed(json.dumps(message).encode())


def unpack_reply(data: bytes) -> list[Any]:
    return json.loads(data)


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def plain(value: Any) -> Any:
    """Convert tensors, arrays and containers to numbers, lists and dicts, which JSON can hold.

    Anything else becomes its repr, so that an error message can show it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    as_list = getattr(value, "tolist", None)  # tensors and arrays, recognised without importing torch
    return plain(as_list()) if callable(as_list) else repr(value)
