"""What crosses the pipe between the trainer and a worker process.

Calls go out pickled, because a label may be anything that a dataset holds. Replies come back as JSON: nothing that user
code makes is ever unpickled in the trainer.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from openrlhf.config.sections.data import Template

HEADER = struct.Struct(">Q")
Kind = Literal["reward", "agent"]


@dataclass(frozen=True)
class Spec:
    """Which file a worker serves, and what episodes need to know."""

    file: str
    kind: Kind
    max_length: int = 0
    max_turns: int | None = None
    scored_later: bool = False  # reward models score an episode that returns no reward
    tokenizer_folder: str | None = None
    tokenizer_class: tuple[str, str] = ("transformers", "AutoTokenizer")  # module and name
    trust_remote_code: bool = False
    template: Template = field(default_factory=Template)


def pack_call(message: object) -> bytes:
    return _framed(pickle.dumps(message))


def unpack_call(data: bytes) -> Any:
    return pickle.loads(data)


def pack_reply(message: list[Any]) -> bytes:
    return _framed(json.dumps(message).encode())


def unpack_reply(data: bytes) -> list[Any]:
    return json.loads(data)


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


def plain(value: Any) -> Any:
    """Tensors, arrays and containers as numbers, lists and dicts; anything else as its repr, for the message."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    as_list = getattr(value, "tolist", None)  # tensors and arrays, without importing torch to recognise them
    return plain(as_list()) if callable(as_list) else repr(value)
