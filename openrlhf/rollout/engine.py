"""The seam between whoever wants tokens and whatever makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from openrlhf.types import Completion, Request

Weights: TypeAlias = Iterable[tuple[str, Tensor]]  # by checkpoint name
Checksums: TypeAlias = Mapping[str, int]  # of each parameter, by the same name
Part: TypeAlias = Literal["weights", "cache"]  # of the memory that sleep gives back


class Engine(Protocol):
    """Generates. Requests come in bulk, so that admission costs once and not once per request."""

    @property
    def version(self) -> int:
        """Of the weights that the next token is drawn with."""
        ...

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All completions, in the order of the requests; a caller that is cancelled takes its requests back."""
        ...

    async def pause(self, *, drain: bool) -> None:
        """No token is drawn until `resume`. With `drain` running requests finish first, and new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Gives the device's memory back until `wake`; the weights must be loaded anew."""
        ...

    async def wake(self, part: Part) -> None:
        """Takes memory again: for the weights first, then, after they were loaded, for the cache."""
        ...

    async def health(self) -> None:
        """Raises a RolloutError when no more tokens can come from here."""
        ...

    async def close(self) -> None: ...


class LoadingEngine(Engine, Protocol):
    """An engine that takes new weights here, in this process or by way of a channel that `weights` stands for."""

    async def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """What is drawn from now on is drawn with these weights; caches of unfinished requests are made anew.

        With `verify` the checksums of what arrived, else nothing.
        """
        ...
