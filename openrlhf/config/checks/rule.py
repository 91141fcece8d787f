"""What a rule is: a function named as the rule, which raises, returns a line to print, or returns a changed config."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from openrlhf.config.flags import replace_flags
from openrlhf.monitor import say

C = TypeVar("C")


@dataclass(frozen=True)
class Changed(Generic[C]):
    """A config in which a rule had to change something, and the line that says so."""

    config: C
    line: str


Rule = Callable[[C], Changed[C] | str | None]


def change(config: C, line: str, **values: object) -> Changed[C]:
    return Changed(replace_flags(config, **values), line)


def apply(config: C, rules: Iterable[Rule[C]], tell: Callable[[str], None] = say) -> C:
    """Runs the rules in order; each sees what those before it changed."""
    for rule in rules:
        match rule(config):
            case None:
                pass
            case str(line):
                tell(line)
            case Changed(changed, line):
                tell(line)
                config = changed
    return config
