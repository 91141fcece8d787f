"""The interface of a rule: a function that raises, returns a message, or returns a changed config with a message.

A rule raises if the flags cannot work, returns a message if they work but are probably not intended, and changes the
config if there is only one sensible interpretation. Every change is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from openrlhf.config.flags import replace_flags

C = TypeVar("C")


@dataclass(frozen=True)
class Changed(Generic[C]):
    """A config that a rule has changed, and the message that reports the change."""

    config: C
    line: str


Rule = Callable[[C], Changed[C] | str | None]


def change(config: C, line: str, **values: object) -> Changed[C]:
    return Changed(replace_flags(config, **values), line)
