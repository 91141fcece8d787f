"""From text to ids, once: which tokens are learned follows from their offsets in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openrlhf.errors import ConfigError
from openrlhf.types import TokenRow

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Marked:
    """A whole text and the spans of its characters that are learned, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """A row ready for training, and how many tokens stood before the first learned one, before any cut."""

    row: TokenRow
    prompt_length: int


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Masks come from offsets, which only fast tokenizers give."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer: expected a fast one, which tells where its tokens stand"
            " in the text",
            try_this="a model folder with tokenizer.json",
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """A tokenizer for rows with responses: fast, and with the EOS in which a response ends."""
    check_fast(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token, so a response could not end")


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ids and their character offsets [tokens, 2]; no special token is added to the text."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoding["input_ids"], dtype=np.int32)
    return ids, np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def encode(marked: Marked, tokenizer: PreTrainedTokenizerBase, max_len: int) -> Encoded:
    """The row of a text with learned spans, ended by EOS and cut to `max_len`.

    A token that straddles the edge of a span belongs to it. Newlines at the end go; EOS is appended as an id where the
    text does not end in it, and overwrites the last token of a row that was cut.
    """
    text = marked.text.rstrip("\n")
    ids, offsets = tokenize(text, tokenizer)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in marked.spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    if not len(ids) or ids[-1] != tokenizer.eos_token_id:
        ends_learned = bool(marked.spans) and marked.spans[-1][1] >= len(text)
        ids, mask = np.append(ids, np.int32(tokenizer.eos_token_id)), np.append(mask, ends_learned)
    prompt_length = int(mask.argmax()) if mask.any() else len(mask)
    if len(ids) > max_len:
        ids, mask = ids[:max_len].copy(), mask[:max_len].copy()
        ids[-1] = tokenizer.eos_token_id
    mask[0] = False  # nothing predicts the first token
    return Encoded(TokenRow(ids, mask), prompt_length)
