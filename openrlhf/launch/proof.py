"""Did the engines receive what the trainer sent? Checksums of every parameter on both sides tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from openrlhf.errors import RolloutError
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.engine import Checksums, Weights

SHOWN = 5  # names in a message


@dataclass
class SyncProof:
    """Which syncs are proved: the first, those after it until the weights have changed, and every N-th."""

    every: int = 0  # 0: no others
    syncs: int = 0
    first: Checksums | None = None
    changed: bool = False

    def is_due(self) -> bool:
        return not self.changed or (self.every > 0 and self.syncs % self.every == 0)

    def conclude(self, sent: Checksums) -> None:
        """After a sync; `sent` is empty where no proof was due."""
        if sent and self.first is None:
            self.first = sent
        self.changed = self.changed or sent not in ({}, self.first)
        self.syncs += 1


class Sent:
    """Weights on their way out, with their checksums where asked for."""

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
    """Stops the run when a parameter is missing or differs, and says which."""
    missing = sorted(sent.keys() - received.keys())
    other = sorted(name for name in sent.keys() & received.keys() if sent[name] != received[name])
    more = sorted(received.keys() - sent.keys())
    complaints = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
        for what, names in (("did not arrive", missing), ("arrived changed", other), ("were never sent", more))
        if names
    ]
    if complaints:
        raise RolloutError(f"weight sync: of {len(sent)} parameters sent to {receiver}, {'; '.join(complaints)}")
