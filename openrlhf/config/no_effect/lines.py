"""Messages about flags that have no effect in a run, so that no flag is ignored silently.

Each row of the table holds some flags, the condition under which they have no effect, and the end of the message
"--zero_stage 2 has no effect ...". A row applies to every config of its `kinds` that has one of its flags. A flag that
only depends on another flag needs no row; declare the dependency instead (`flag(..., needs="lora_rank")`).
`tests/cli/test_flag_effects.py` runs the commands and fails if a flag that was not read has no row.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_origin

from openrlhf.config.flags import Flag, flag_values, flags_of, without_none
from openrlhf.errors import listed

C = TypeVar("C")
Reason: TypeAlias = tuple[str, str, Callable[[C], object]]  # flags separated by spaces, why, when

EMPTY = (None, "", ())  # no message for a flag that was given only to unset a value


@dataclass(frozen=True)
class NoEffect:
    """A reason why some flags have no effect."""

    flags: tuple[str, ...]
    why: str  # follows "has no effect "
    kinds: tuple[type, ...]  # config classes that the row applies to, including subclasses
    when: Callable[[Any], object]  # takes a checked config of one of these kinds; true if the flags have no effect


def rows(kinds: type[C] | tuple[type[C], ...], *reasons: Reason[C]) -> tuple[NoEffect, ...]:
    """Make the rows of the table for some kinds of config."""
    each = kinds if isinstance(kinds, tuple) else (kinds,)
    return tuple(NoEffect(tuple(flags.split()), why, each, when) for flags, why, when in reasons)


def always(_: object) -> bool:
    return True


def idle_flags(config: object, table: Sequence[NoEffect]) -> Iterator[tuple[str, list[str]]]:
    """Yield the reasons that apply to a run, each with its flags; a flag appears only under its first reason."""
    flags, seen = flags_of(type(config)), set[str]()
    for row in table:
        names = [name for name in row.flags if name in flags and name not in seen]
        if names and isinstance(config, row.kinds) and row.when(config):
            seen.update(names)
            yield row.why, names


def answers(config: object, table: Sequence[NoEffect], given: Collection[str] | None = None) -> list[str]:
    """Return one message per reason why flags in `given` have no effect; None means all non-default flags."""
    flags, values = flags_of(type(config)), flag_values(config)
    if given is None:
        given = {name for name, item in flags.items() if values[name] != item.default}
    lines = []
    for why, names in idle_flags(config, table):
        shown = [show(flags[name], values[name]) for name in names if name in given and values[name] not in EMPTY]
        if shown:
            lines.append(f"{listed(shown)} {'has' if len(shown) == 1 else 'have'} no effect {why}")
    return lines


def show(item: Flag, value: object) -> str:
    """Format a flag with its value; free text is omitted because it may be long or secret."""
    is_text = isinstance(value, str) and get_origin(without_none(item.type)) is not Literal
    if value is None or value is True or is_text:
        return f"--{item.name}"
    shown = value if isinstance(value, tuple) else (value,)
    return " ".join((f"--{item.name}", *("false" if part is False else str(part) for part in shown)))
