"""Flags as dataclass fields: declare flags, list the flags of a command, replace their values.

A section is a frozen dataclass whose fields are flags, and a command is a frozen dataclass of sections
(`commands.py`). `flag()` declares a flag once: its default, help, range, the flag it depends on, whether it is
required, and whether it is one of the essential flags that the short help shows. The parser, the help, the checks, the
messages about unused flags and `config.json` all read these declarations, so adding a flag means adding one field.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True)
class Range:
    """The allowed values of a numeric flag; the error message reads "must be" followed by `wanted`."""

    wanted: str
    holds: Callable[[float], bool]  # False for NaN, because every comparison with NaN is False


POSITIVE = Range("above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("0 or more", lambda value: value >= 0)
SHARE = Range("between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE_SHARE = Range("above 0 and at most 1", lambda value: 0 < value <= 1)
BELOW_ONE = Range("0 or more and below 1", lambda value: 0 <= value < 1)
FRACTION_OR_COUNT = Range(
    "a fraction below 1 or a whole number", lambda value: 0 < value < 1 or (value >= 1 and value % 1 == 0)
)
SEED = Range("between 0 and 2^32 - 1", lambda value: 0 <= value < 2**32)  # what NumPy takes
POSITIVE_OR_MINUS_ONE = Range("above 0, or -1", lambda value: value > 0 or value == -1)


def flag(
    default: T,
    help: str,
    within: Range | None = None,
    *,
    needs: str | None = None,
    required: str | None = None,
    essential: bool = False,
    positional: str | None = None,
) -> T:
    """Declare a field of a section, and with it the command-line flag of the same name.

    `within` is the allowed range; None is always allowed, and every element of a tuple must be in range. `needs` names
    another flag of the same command, or several separated by spaces: while all of them are unset, this one has no
    effect and a message says so. `required` marks a flag that the command cannot run without; its value is an example
    for the error message. `essential` marks a flag that most users of the command set: `--help` shows these, `--help
    all` shows every flag. `positional` marks a tuple that takes the words outside flags; its value is their placeholder
    in the help.
    """
    metadata = {
        "help": help,
        "within": within,
        "needs": needs,
        "required": required,
        "essential": essential,
        "positional": positional,
    }
    return cast(T, dataclasses.field(default=default, metadata=metadata))


def section(kind: type[T], **defaults: object) -> T:
    """Declare a section of a command; `defaults` overrides defaults of the section for this command."""
    return cast(T, dataclasses.field(default_factory=partial(kind, **defaults)))


@dataclass(frozen=True)
class Flag:
    """One flag of one command."""

    name: str
    section: str  # field of the command that holds the flag
    title: str  # first line of the section's docstring, a heading in --help
    type: object  # a typing form, such as `int | None`
    default: object  # default in this command, which may override the section's default
    help: str
    within: Range | None
    needs: str | None
    required: str | None
    essential: bool
    positional: str | None

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the flags of which at least one must be set for this one to have an effect."""
        return tuple((self.needs or "").split())

    @property
    def spelling(self) -> str:
        """How a user writes it."""
        return self.positional or f"--{self.name}"


@cache
def flags_of(command: type) -> Mapping[str, Flag]:
    """Return all flags of a command by name, in the order of declaration."""
    found: dict[str, Flag] = {}
    defaults = command()
    for part in dataclasses.fields(command):
        values = getattr(defaults, part.name)
        title = (type(values).__doc__ or part.name).strip().splitlines()[0]
        types = get_type_hints(type(values))
        for item in dataclasses.fields(values):
            name, default = item.name, getattr(values, item.name)
            assert name not in found, f"{command.__name__} declares --{name} twice"
            found[name] = Flag(name, part.name, title, types[name], default=default, **item.metadata)
    return found


def in_reading_order(command: type) -> list[Flag]:
    """Return the flags for readers: the sections with required flags (the model and the data) first."""
    flags = flags_of(command).values()
    first = {item.section for item in flags if item.required}
    return sorted(flags, key=lambda item: item.section not in first)


def without_none(form: object) -> object:
    """Return the type of a flag's values, `int` for `int | None`."""
    if get_origin(form) in (Union, types.UnionType):
        (form,) = (member for member in get_args(form) if member is not type(None))
    return form


def choices_of(form: object) -> tuple[str, ...]:
    """Return the values that a flag's type allows; empty if it is not a Literal."""
    kind = without_none(form)
    return get_args(kind) if get_origin(kind) is Literal else ()


def summary_of(command: type) -> str:
    """Return the first line of a command's docstring, its description in --help."""
    return (command.__doc__ or "").strip().partition("\n")[0]


def typical_use(command: type, prog: str) -> str:
    """Return a typical command line: the rest of the command's docstring, or else the required flags with examples."""
    written = inspect.cleandoc(command.__doc__ or "").partition("\n")[2].strip()
    needed = [f" --{item.name} {item.required}" for item in flags_of(command).values() if item.required]
    return written or prog + "".join(needed)


def replace_flags(config: C, **values: object) -> C:
    """Return a copy of the config with some flags replaced; the section of each flag is looked up."""
    known = flags_of(type(config))
    by_section: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        by_section.setdefault(known[name].section, {})[name] = value
    parts = {part: dataclasses.replace(getattr(config, part), **changed) for part, changed in by_section.items()}
    return cast(C, dataclasses.replace(cast(Any, config), **parts))


def flag_values(config: object) -> dict[str, object]:
    """Return every flag with its value, as written to `config.json`."""
    return {name: getattr(getattr(config, item.section), name) for name, item in flags_of(type(config)).items()}
