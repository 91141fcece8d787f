"""Retokenise samples for reward models whose vocabulary differs from the policy's.

Such a reward model gets the sample's text, tokenised with its own tokenizer. `Retokenizer` returns these tokens and
maps positions in them, such as the ends of steps, back to tokens of the sample. It is used for reward models in RL
(`rl.reward_models`) and in batch inference.
"""

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
class Retokenizer:
    """Converter from samples to the tokens of one reward model.

    If the vocabulary is shared, the sampled tokens are used. Otherwise a sample is decoded with the policy's tokenizer,
    and its text is tokenised with the model's tokenizer.
    """

    policy: PreTrainedTokenizerBase  # tokenizer of the policy
    own: PreTrainedTokenizerBase  # tokenizer of the reward model
    shared: bool  # True if both have the same vocabulary

    def ids(self, item: Trajectory) -> NDArray[np.int32]:
        """Return the sample as tokens of the reward model."""
        if self.shared:
            return item.input_ids
        text, ended = self._text(item)
        read: list[int] = self.own(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ended:
            read = [*read, self.own.eos_token_id]  # the two tokenizers may have different EOS tokens
        return np.array(read, dtype=np.int32)  # [own tokens]

    def places(self, item: Trajectory, row: NDArray[np.int32], found: Sequence[int] | NDArray[np.intp]) -> list[int]:
        """Map positions in the reward model's tokens (`found`) to the sample tokens that end the same text.

        `row` is the result of `ids` for the sample.
        """
        if self.shared:
            return [int(place) for place in found]
        if not len(found):
            return []
        text, ended = self._text(item)
        last = len(item.input_ids) - 1
        _, offsets = tokenize(text, self.own)
        ends = [int(offsets[place][1]) if place < len(offsets) else None for place in found]  # None: the added EOS
        sampled = item.input_ids[:last] if ended else item.input_ids
        # If tokenising the text again gives exactly the sampled tokens, use the offsets of the policy's tokenizer. It
        # may give different tokens, and a slow tokenizer has no offsets.
        if self.policy.is_fast:
            ids, offsets = tokenize(text, self.policy)  # [tokens], [tokens, 2]
            if np.array_equal(ids, sampled):
                return [last if end is None else last_token_to(end, offsets[:, 1]) for end in ends]
        return [last if end is None else token_at(end, text, sampled.tolist(), self.policy) for end in ends]

    def _text(self, item: Trajectory) -> tuple[str, bool]:
        """Return the sample's text without its final EOS, and whether it had one."""
        ids = item.input_ids.tolist()
        ended = ids[-1] == self.policy.eos_token_id
        return str(self.policy.decode(ids[:-1] if ended else ids)), ended


def last_token_to(end: int, ends: NDArray[np.int64]) -> int:
    """Return the token that completes the character before `end`.

    All tokens that contain bytes of the same character have the same end offset; the last of them completes it.
    """
    first = int(np.searchsorted(ends, end))
    return int(np.searchsorted(ends, ends[first], side="right")) - 1


def token_at(end: int, text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the first token after which the decoded text is complete up to the character `end`.

    A policy may sample different tokens than its tokenizer would produce for the same text, so their offsets are
    unknown. A longer prefix of the tokens decodes to at least as much of the text, so bisection works. A prefix that
    ends inside a character decodes to a replacement character, which does not match the text.
    """
    return bisect_left(
        range(len(ids) - 1), True, key=lambda last: str(tokenizer.decode(ids[: last + 1])).startswith(text[:end])
    )
