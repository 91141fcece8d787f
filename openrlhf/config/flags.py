"""Flags as dataclass fields: declare them, list those of a command, replace their values.

A command is a dataclass of sections, a section is a dataclass of flags, and no command declares a flag twice. The
parser, the checks and `config.json` all derive from these declarations.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar, cast, get_type_hints

T = TypeVar("T")
C = TypeVar("C")


def flag(default: T, help: str) -> T:
    """Declare a field of a section, and with it the command-line flag of the same name."""
    return cast(T, dataclasses.field(default=default, metadata={"help": help}))


def section(kind: type[T], **defaults: object) -> T:
    """Declare a section of a command, with the defaults that this command changes."""
    return cast(T, dataclasses.field(default_factory=partial(kind, **defaults)))


@dataclass(frozen=True)
class Flag:
    """One flag of one command, as the parser needs it."""

    name: str
    section: str
    title: str  # first line of the section's docstring
    type: Any  # a typing form, such as `int | None`
    default: object
    help: str


@cache
def flags_of(command: type) -> Mapping[str, Flag]:
    """Return all flags of a command by name, in the order of declaration."""
    return {item.name: item for item in _walk(command)}


def _walk(command: type) -> Iterator[Flag]:
    seen: set[str] = set()
    defaults = command()
    for part in dataclasses.fields(command):
        values = getattr(defaults, part.name)
        title = (type(values).__doc__ or part.name).strip().splitlines()[0]
        types = get_type_hints(type(values))
        for item in dataclasses.fields(values):
            assert item.name not in seen, f"{command.__name__} declares --{item.name} twice"
            seen.add(item.name)
            yield Flag(item.name, part.name, title, types[item.name], getattr(values, item.name), item.metadata["help"])


def replace_flags(config: C, **values: object) -> C:
    """Return the config with some flags replaced; each is looked up in the section that declares it."""
    known = flags_of(type(config))
    by_section: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        by_section.setdefault(known[name].section, {})[name] = value
    parts = {part: dataclasses.replace(getattr(config, part), **changed) for part, changed in by_section.items()}
    return cast(C, dataclasses.replace(cast(Any, config), **parts))


def flag_values(config: object) -> dict[str, object]:
    """Return every flag with its value, as written to `config.json`."""
    return {name: getattr(getattr(config, item.section), name) for name, item in flags_of(type(config)).items()}
