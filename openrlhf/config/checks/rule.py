"""The rule protocol: a function named after its rule that raises, returns a message, or returns a changed config.

A rule raises if the run could not do what was asked, returns a message if it could but probably should not, and changes
the config if there is only one sensible reading. A change is never silent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from openrlhf.config.flags import replace_flags

C = TypeVar("C")


@dataclass(frozen=True)
class Changed(Generic[C]):
    """A config that a rule had to change, and the message that says so."""

    config: C
    line: str


Rule = Callable[[C], Changed[C] | str | None]


def change(config: C, line: str, **values: object) -> Changed[C]:
    return Changed(replace_flags(config, **values), line)
