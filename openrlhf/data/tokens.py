"""Tokenisation: convert text with learned character spans to token ids with a target mask.

The modules that read datasets mark the learned spans in a text (`Marked`), and `encode` makes the training row. Each
text is tokenised as a whole, and the mask is computed from the tokens' character offsets, because tokenising prompt and
response separately could give different tokens at the boundary.

    text     Q: 2+2? A: 4<eos>          spans ((11, 17),); a token that crosses the edge is learned
    tokens   [Q:][ 2][+][2][?][ A:][ 4][<eos>]
    mask     [ 0][ 0][0][0][0][  0][ 1][    1]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from openrlhf.errors import ConfigError
from openrlhf.types import TokenRow


@dataclass(frozen=True)
class Marked:
    """Text with its learned character spans, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """A row ready for training."""

    row: TokenRow
    prompt_length: int  # tokens before the first learned token, counted before truncation
    text: str
    length: int  # tokens of the whole text, before truncation
    learns_eos: bool  # an EOS is among the targets, counted before truncation
    joins_prompt: bool  # the first learned token begins in the prompt


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for a slow tokenizer: masks are computed from offsets, which only fast tokenizers provide."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer: expected a fast one, which reports the position"
            " of each token in the text",
            try_this="a model folder with tokenizer.json",
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the tokenizer can encode responses: it must be fast and have an EOS token to end them."""
    check_fast(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token to end a response with")


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return ids [tokens] and character offsets [tokens, 2]; no special tokens are added."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoding["input_ids"], dtype=np.int32)
    return ids, np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def encode(marked: Marked, tokenizer: PreTrainedTokenizerBase, max_len: int) -> Encoded:
    """Encode text with learned spans as a row that ends in EOS and has at most `max_len` tokens.

    A token that crosses the edge of a span belongs to the span. Trailing newlines are removed. EOS is appended unless
    the text already ends in it, and replaces the last token of a truncated row. There it is not a target: the model
    must not learn to stop where a response was cut.
    """
    text = marked.text.rstrip("\n")
    ids, offsets = tokenize(text, tokenizer)  # [tokens], [tokens, 2]
    mask = np.zeros(len(ids), dtype=np.bool_)  # [tokens]
    for start, end in marked.spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    if not len(ids) or ids[-1] != tokenizer.eos_token_id:
        ends_learned = bool(marked.spans) and marked.spans[-1][1] >= len(text)
        ids, mask = np.append(ids, np.int32(tokenizer.eos_token_id)), np.append(mask, ends_learned)
    prompt_length = int(mask.argmax()) if mask.any() else len(mask)
    start = marked.spans[0][0] if marked.spans else 0
    joins_prompt = bool(((offsets[:, 0] < start) & (offsets[:, 1] > start)).any())
    length, learns_eos = len(ids), bool((ids[mask] == tokenizer.eos_token_id).any())
    if length > max_len:
        ids, mask = ids[:max_len].copy(), mask[:max_len].copy()
        ids[-1], mask[-1] = tokenizer.eos_token_id, False
    mask[0] = False  # the first token is never predicted
    return Encoded(TokenRow(ids, mask), prompt_length, marked.text, length, learns_eos, joins_prompt)
