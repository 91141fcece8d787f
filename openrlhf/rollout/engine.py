"""The interface of generation engines.

The RL loop uses only `Engine`. `HFEngine` (hf.py) and `VLLMEngine` (vllm.py) implement it in one process, as
`LoadingEngine`s; so does a group of such engines in other processes (engine_group.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from openrlhf.types import Completion, Request

Weights: TypeAlias = Iterable[tuple[str, Tensor]]  # by checkpoint name
Checksums: TypeAlias = Mapping[str, int]  # one per tensor, by checkpoint name
Part: TypeAlias = Literal["weights", "cache"]  # parts of the memory that `sleep` releases


class Engine(Protocol):
    """Interface of an object that generates completions; requests are passed in bulk to save overhead per request."""

    version: int  # version of the weights that sample the next token

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions in the order of the requests. Cancelling the call cancels its requests."""
        ...


class LoadingEngine(Engine, Protocol):
    """A single engine that can load new weights, directly or through a channel that `weights` reads from."""

    async def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Load weights for all further sampling; caches of unfinished requests are recomputed, unless they are kept.

        Return the checksums of the loaded tensors if `verify`, else an empty mapping.
        """
        ...

    async def pause(self, *, drain: bool) -> None:
        """Stop sampling until `resume`. With `drain`, running requests finish first, and new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Release device memory until `wake`, after which the weights must be loaded again."""
        ...

    async def wake(self, part: Part) -> None:
        """Allocate memory again: first for the weights and, after they have been loaded, for the KV cache."""
        ...

    async def health(self) -> None:
        """Raise a RolloutError if the engine can no longer generate."""
        ...

    async def close(self) -> None:
        """Raise an error in callers that still wait, and shut down the engine."""
        ...
