"""Parser of commands that wrap another command line (`openrlhf preview train_sft ...`) and accept the flags of both."""

from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, TypeVar

from openrlhf.config.checks.common import numbers_are_in_range
from openrlhf.config.flags import section
from openrlhf.config.parser import parse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound="DataclassInstance")
Own = TypeVar("Own")


def parse_both(
    command: type[Command], own: type[Own], argv: Sequence[str], *, prog: str, summary: str
) -> tuple[Command, Own]:
    """Parse the flags of a command together with the section `own`, check their ranges, and return both.

    `summary` is the description in --help.
    """
    parsed = parse(with_section(command, own, summary), argv, prog=prog)
    numbers_are_in_range(parsed)
    return command(**{part.name: getattr(parsed, part.name) for part in fields(command)}), parsed.own


def with_section(command: type, own: type, summary: str) -> type:
    """Return a copy of a command's config with one more section."""
    return make_dataclass(
        command.__name__,
        [("own", own, section(own))],
        bases=(command,),
        namespace={"__doc__": summary},
        frozen=True,
        kw_only=True,
    )
