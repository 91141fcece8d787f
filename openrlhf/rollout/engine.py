"""The interface between code that needs tokens and the engines that generate them.

The RL loop knows only `Engine`. `HFEngine` (hf.py) and `VLLMEngine` (vllm.py) implement it in one process, as a
`LoadingEngine`; on a Ray cluster, a group of such engines does (cluster/engines.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from openrlhf.types import Completion, Request

Weights: TypeAlias = Iterable[tuple[str, Tensor]]  # by checkpoint name
Checksums: TypeAlias = Mapping[str, int]  # one per tensor, by the same names
Part: TypeAlias = Literal["weights", "cache"]  # parts of the memory that `sleep` releases


class Engine(Protocol):
    """A generator of completions. Requests arrive in bulk, so that admission is paid once per call, not per request."""

    version: int  # of the weights that the next token is sampled with

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions in the order of the requests. Cancelling the call withdraws its requests."""
        ...


class LoadingEngine(Engine, Protocol):
    """A single engine, which accepts new weights, in this process or through a channel that `weights` represents."""

    async def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Sample with these weights from now on; the caches of unfinished requests are recomputed.

        Return the checksums of what arrived if `verify`, else an empty mapping.
        """
        ...

    async def pause(self, *, drain: bool) -> None:
        """Sample no token until `resume`. With `drain`, running requests finish first, and new ones wait."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Release device memory until `wake`; the weights must then be loaded again."""
        ...

    async def wake(self, part: Part) -> None:
        """Reclaim memory: first for the weights and, after they have been loaded, for the cache."""
        ...

    async def health(self) -> None:
        """Raise a RolloutError if the engine can no longer generate."""
        ...

    async def close(self) -> None:
        """Fail the callers that still wait, and release the engine."""
        ...
