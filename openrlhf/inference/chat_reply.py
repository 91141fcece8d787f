"""Streaming replies of the chat command.

`ReplyGenerator` generates a reply token by token, and `StreamingDecoder` turns the tokens into text while the reply
grows. A reply ends at an end token, at the length limit, or when the user interrupts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.inference import SamplingFlags
from openrlhf.inference.engine import sampling_params
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import Request

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for a character whose bytes have not all arrived


@dataclass(frozen=True)
class Reply:
    """Text of a reply and the reason why it ended."""

    text: str
    end: Literal["stop", "length", "interrupted"]


@dataclass
class StreamingDecoder:
    """Incremental detokenizer of a reply; it holds back a character until all its bytes have arrived.

    Each new piece is decoded together with the tokens of the previous piece, whose text is then cut off. Decoding it
    alone would be wrong for tokenizers that treat a word differently at the start of the text.
    """

    tokenizer: PreTrainedTokenizerBase
    show: Callable[[str], None]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # text shown so far
    previous: int = 0  # first token of the last shown piece
    decoded: int = 0  # tokens that were shown

    def put(self, token: int) -> None:
        """Add a token, and show the text that it completes."""
        self.token_ids.append(token)
        self._advance(finished=False)

    def finish(self) -> None:
        """Show the remaining text, even if it ends in an incomplete character."""
        self._advance(finished=True)

    def _advance(self, *, finished: bool) -> None:
        before, piece = (
            str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
            for token_ids in (self.token_ids[self.previous : self.decoded], self.token_ids[self.previous :])
        )
        if piece.endswith(INCOMPLETE) and not finished:
            return
        self.previous, self.decoded = self.decoded, len(self.token_ids)
        if new := piece[len(before) :]:
            self.text += new
            self.show(new)


@dataclass(frozen=True)
class ReplyGenerator:
    """Generator of replies, with an engine, its tokenizer and the sampling flags."""

    engine: HFEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingFlags
    max_len: int  # tokens of the conversation and the reply together

    def tokenize(self, prompt: str) -> list[int]:
        """Tokenise the prompt without adding special tokens; templates already contain them."""
        return self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]

    def reply(self, prompt_ids: list[int], show: Callable[[str], None], should_stop: Callable[[], bool]) -> Reply:
        """Generate a reply and pass each piece of text to `show`.

        The prompt must be shorter than `max_len`. Generation stops early when `should_stop` returns True.
        """
        decoder = StreamingDecoder(self.tokenizer, show)
        seed = int(torch.randint(2**31, ()))  # a new random stream for each reply
        params = sampling_params(self.sampling, max_tokens=self.max_len - len(prompt_ids), seed=seed)
        for token in self.engine.stream(Request(tuple(prompt_ids), params)):
            decoder.put(token)
            if should_stop():
                break
        decoder.finish()
        if decoder.token_ids and decoder.token_ids[-1] in self.engine.ends:
            return Reply(decoder.text, "stop")
        return Reply(decoder.text, "interrupted" if should_stop() else "length")
