"""Datasets, reward functions and agents that a Python caller passes as objects instead of paths.

A config holds plain text: it is written to config.json, compared on resume and sent to workers. So a flag holds only
the name of an object, such as `in memory (120 rows; 3fa9c1)`, and `held` makes the object available under that name
while a run lasts. Only the process that holds an object can load it. That is enough: prompts and rewards are used by
the process that calls the API, and under a launcher every process makes the same call.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from openrlhf.errors import ConfigError

PREFIX = "in memory ("

_objects: dict[str, object] = {}


def is_in_memory(name: str | None) -> bool:
    """Return True if the value of a flag names an object."""
    return name is not None and name.startswith(PREFIX)


def describe(name: str) -> str:
    """Return the part of an object's name that describes it."""
    return name.removeprefix(PREFIX).removesuffix(")")


def object_name(value: object) -> str:
    """Return the name of a function or class, or of the class of an instance."""
    return str(getattr(value, "__name__", type(value).__name__))


@contextmanager
def held(description: str, value: object) -> Iterator[str]:
    """Make an object available while the context is open; yield the name under which a flag refers to it."""
    name, number = f"{PREFIX}{description})", 1
    while name in _objects:  # another thread's run holds an object of this name
        number += 1
        name = f"{PREFIX}{description} #{number})"
    _objects[name] = value
    try:
        yield name
    finally:
        del _objects[name]


def find_object(name: str, flag: str) -> object:
    """Return the object that the value of a flag names."""
    if name not in _objects:
        raise ConfigError(
            f"--{flag} {name}: the object exists only in the Python program that passed it",
            try_this="the same call from Python, or a file",
        )
    return _objects[name]
