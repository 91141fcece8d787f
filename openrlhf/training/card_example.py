"""Example code of a model card: load the model and prompt it in the format that it was trained with.

The texts of cards are Jinja templates in the folder `cards`: example.py.jinja has the code, model_card.md.jinja the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from openrlhf.training.prompt_format import PromptFormat

CARDS = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "cards"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
CARDS.filters["repr"] = repr


class Kind(Enum):
    """The kind of a saved model."""

    LANGUAGE = "language model"
    REWARD = "reward model"
    PROCESS_REWARD = "process reward model"
    CRITIC = "critic"

    @property
    def scores(self) -> bool:
        """Whether the model has a scalar head instead of a vocabulary head."""
        return self in (Kind.REWARD, Kind.CRITIC)


@dataclass(frozen=True)
class Example:
    """The facts that the example code depends on."""

    path: str  # folder or repository to load from
    kind: Kind
    prompt: PromptFormat
    is_adapter: bool = False
    head: str = "score"  # name of a scalar head
    step_token: str = ""  # token that ends a step, of a process reward model
    step_labels: tuple[str, ...] = ()  # tokens that judge a step, the positive one first

    def code(self) -> str:
        """Return a Python program that runs the model on one example."""
        return CARDS.get_template("example.py.jinja").render(vars(self)).strip()
