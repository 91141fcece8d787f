"""Verification of weight syncs: compare checksums of every parameter in trainer and engine.

`SyncProof` decides which syncs to verify, `RecordedWeights` computes the checksums of sent or received weights, and
`compare` raises an error if they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from openrlhf.errors import RolloutError, counted
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.engine import Checksums, Weights

SHOWN = 5  # maximum number of parameter names in a message


@dataclass
class SyncProof:
    """Schedule of the syncs to verify: all syncs up to the first changed weights, then every N-th."""

    every: int = 0  # 0: no periodic verification
    syncs: int = 0
    first: Checksums | None = None
    changed: bool = False

    def is_due(self) -> bool:
        return not self.changed or (self.every > 0 and self.syncs % self.every == 0)

    def conclude(self, sent: Checksums) -> None:
        """Record a finished sync; `sent` is empty if the sync was not verified."""
        if sent and self.first is None:
            self.first = sent
        self.changed = self.changed or sent not in ({}, self.first)
        self.syncs += 1


class RecordedWeights:
    """Weights that are sent or loaded; iterating over them records their checksums if `verify` is set."""

    def __init__(self, weights: Weights, *, verify: bool) -> None:
        self.weights = weights
        self.verify = verify
        self.checksums: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights:
            if self.verify:
                self.checksums[name] = checksum(tensor)
            yield name, tensor


def compare(sent: Checksums, received: Checksums, receiver: str) -> None:
    """Raise an error with the names of parameters that are missing, differ or were never sent."""
    missing = sorted(sent.keys() - received.keys())
    other = sorted(name for name in sent.keys() & received.keys() if sent[name] != received[name])
    more = sorted(received.keys() - sent.keys())
    complaints = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for what, names in (("missing", missing), ("with other values", other), ("never sent", more))
        if names
    ]
    if complaints:
        raise RolloutError(
            f"the weights of {receiver} differ from those sent ({counted(len(sent), 'parameter')}):"
            f" {'; '.join(complaints)}"
        )
