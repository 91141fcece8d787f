"""A sample as a reward model with a tokenizer of its own reads it, and where it finds things in the sample's tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from openrlhf.data.tokens import tokenize
from openrlhf.types import Trajectory


@dataclass(frozen=True)
class Texts:
    """Tokens of a sample for a model: the sampled ones if the vocabulary is shared, else the text tokenised again."""

    policy: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase
    shared: bool

    def ids(self, item: Trajectory) -> NDArray[np.int32]:
        ids = np.array(item.input_ids, dtype=np.int32)
        if self.shared:
            return ids
        text, ended = self._text(item)
        read: list[int] = self.own(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ended:
            read = [*read, self.own.eos_token_id]  # each calls its end by a name of its own
        return np.array(read, dtype=np.int32)

    def places(self, item: Trajectory, row: NDArray[np.int32], found: Sequence[int] | NDArray[np.intp]) -> list[int]:
        """The sample's token in which each of the row's tokens `found` ends; `row` is what `ids` gave for it.

        Tokens of another vocabulary are followed through the characters that both stand for.
        """
        if self.shared:
            return [int(place) for place in found]
        if not len(found):
            return []
        text, ended = self._text(item)
        last = len(item.input_ids) - 1
        _, offsets = tokenize(text, self.own)
        ends = [int(offsets[place][1]) if place < len(offsets) else None for place in found]  # None: its EOS
        sampled = item.input_ids[:last] if ended else item.input_ids
        known = self._offsets(text, sampled)
        if known is not None:
            return [last if end is None else last_token_to(end, known) for end in ends]
        return [last if end is None else token_at(end, text, sampled, self.policy) for end in ends]

    def _offsets(self, text: str, sampled: Sequence[int]) -> NDArray[np.int64] | None:
        """Where the sampled tokens end, if they are those that the tokenizer makes of their text."""
        if not self.policy.is_fast:
            return None
        ids, offsets = tokenize(text, self.policy)
        return offsets[:, 1] if tuple(ids.tolist()) == tuple(sampled) else None

    def _text(self, item: Trajectory) -> tuple[str, bool]:
        """What the sample says, without the EOS that may end it."""
        ended = item.input_ids[-1] == self.policy.eos_token_id
        return str(self.policy.decode(list(item.input_ids[:-1] if ended else item.input_ids))), ended


def last_token_to(end: int, ends: NDArray[np.int64]) -> int:
    """The token that completes the character before `end`; bytes of one character all end where it does."""
    first = int(np.searchsorted(ends, end))
    return int(np.searchsorted(ends, ends[first], side="right")) - 1


def token_at(end: int, text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The first token after which the text stands up to the character `end`.

    A policy may sample other tokens than its tokenizer makes of their text, so their offsets are not known. But a
    longer prefix of the tokens says at least as much of the text, which a bisection can use. A prefix that stops
    inside a character shows a replacement for it and does not count.
    """
    wanted = text[:end]

    def says_it(last: int) -> bool:
        return str(tokenizer.decode(list(ids[: last + 1]))).startswith(wanted)

    return bisect_left(range(len(ids) - 1), True, key=says_it)
