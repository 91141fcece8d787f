"""Streaming replies of the chat command.

`Speaker` generates a reply token by token, and `Shown` prints it as text while it grows. A reply ends at an end
token, at the length limit, or when the user interrupts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.inference import SamplingFlags
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import Request, SamplingParams

End = Literal["stop", "length", "interrupted"]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for an incomplete character


@dataclass(frozen=True)
class Reply:
    """Text of a reply and the reason why it ended."""

    text: str
    end: End


class Shown:
    """Incremental detokenizer of a reply; it holds back a character until all its bytes have arrived.

    Each new piece is decoded together with the tokens of the previous piece, whose text is then cut off. Decoding it
    alone would be wrong for tokenizers that write a word differently at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.show = show
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.before = self.shown = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def put(self, token: int) -> None:
        self.token_ids.append(token)
        self._advance(finished=False)

    def end(self) -> None:
        """Show the remaining text, even if it ends in an incomplete character."""
        self._advance(finished=True)

    def _advance(self, *, finished: bool) -> None:
        old = self._spell(self.token_ids[self.before : self.shown])
        new = self._spell(self.token_ids[self.before :])
        if new.endswith(UNFINISHED) and not finished:
            return
        self.before, self.shown = self.shown, len(self.token_ids)
        if piece := new[len(old) :]:
            self.pieces.append(piece)
            self.show(piece)

    def _spell(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


class Speaker:
    """Engine with its tokenizer and sampling settings; it answers prompts."""

    def __init__(
        self, engine: HFEngine, tokenizer: PreTrainedTokenizerBase, sampling: SamplingFlags, *, max_len: int
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.sampling = sampling

    def read(self, prompt: str) -> list[int]:
        """Tokenise the prompt without adding special tokens; templates already contain them."""
        return self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]

    def reply(self, prompt_ids: list[int], show: Callable[[str], None], is_wished: Callable[[], bool]) -> Reply:
        """Generate a reply and pass each piece of text to `show`.

        The prompt must be shorter than `max_len`. Generation stops early when `is_wished` returns True.
        """
        shown = Shown(self.tokenizer, show)
        request = Request(tuple(prompt_ids), self._params(self.max_len - len(prompt_ids)))
        for token in self.engine.stream(request):
            shown.put(token)
            if is_wished():
                break
        shown.end()
        if shown.token_ids and shown.token_ids[-1] in self.engine.ends:
            return Reply(shown.text, "stop")
        return Reply(shown.text, "interrupted" if is_wished() else "length")

    def _params(self, max_tokens: int) -> SamplingParams:
        sampling = self.sampling
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if sampling.greedy_sampling else sampling.temperature,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=int(torch.randint(2**31, ())),  # a new random stream for each reply
        )
