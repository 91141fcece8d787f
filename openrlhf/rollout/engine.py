"""The seam between whoever wants tokens and whatever makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from openrlhf.types import Completion, Request


class Engine(Protocol):
    """Generates. Requests come in bulk, so that admission costs once and not once per request."""

    version: int  # of the weights that the next token is drawn with

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All completions, in the order of the requests."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """New weights by checkpoint name; what is generated from now on carries `version`."""
        ...

    def sleep(self) -> None:
        """Gives the device's memory back until `wake`."""
        ...

    def wake(self) -> None: ...
