"""Terms of a memory plan: bytes of one kind, for one model, on a device or in the host memory of a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from openrlhf.plan.gpus import GIB

Kind = Literal[
    "weights",
    "fp32 masters",
    "optimizer states",
    "gradients",
    "gathered layers",
    "reduce buckets",
    "activations",
    "head chunks",
    "KV cache",
    "allocator reserve",
    "CUDA context",
    "sync buffers",
    "asleep",
    "offloaded",
    "loading",
    "moving average",
    "files being written",
    "processes",
    "rounding of pinned memory",
]
STATES: tuple[Kind, ...] = ("weights", "fp32 masters", "optimizer states")  # kept between steps


@dataclass(frozen=True)
class Term:
    """Bytes of one kind, of one model or engine."""

    role: str
    kind: Kind
    size: float  # bytes
    certain: bool = True  # False if it depends on the lengths of the data

    def __str__(self) -> str:
        return f"{self.role} {self.kind} {self.size / GIB:.1f} GiB"


def total(terms: Iterable[Term]) -> float:
    return sum(term.size for term in terms)


def least(terms: Iterable[Term]) -> float:
    """Return the bytes that are needed even with the shortest data."""
    return total(term for term in terms if term.certain)


def times(terms: Iterable[Term], factor: float) -> tuple[Term, ...]:
    return tuple(replace(term, size=factor * term.size) for term in terms)


def largest(terms: Iterable[Term], count: int = 3) -> tuple[Term, ...]:
    return tuple(sorted(terms, key=lambda term: -term.size)[:count])
