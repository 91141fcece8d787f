"""A reply, token by token: shown as it comes, stopped at the end, at the limit, or when it is wished."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from openrlhf.config.sections.inference import Sampling
from openrlhf.rollout.hf import DECODING, end_tokens

End = Literal["stop", "length", "interrupted"]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows the first bytes of a character


@dataclass(frozen=True)
class Reply:
    text: str
    end: End


class Shown(BaseStreamer):
    """Tokens of a reply as text; a character whose bytes are still coming is held back until they are there.

    Each piece is what the tokens since the piece before last spell, less what they spelled then: some tokenizers write
    a word differently at the beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.show = show
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.before = self.shown = 0
        self.heard_prompt = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def put(self, value: Tensor) -> None:
        if not self.heard_prompt:
            self.heard_prompt = True  # what comes first is the prompt itself
            return
        self.token_ids += value.flatten().tolist()
        self._advance(finished=False)

    def end(self) -> None:
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


class Wished(StoppingCriteria):
    """Ends generation after the token at which somebody wished so."""

    def __init__(self, is_wished: Callable[[], bool]) -> None:
        self.is_wished = is_wished

    def __call__(self, input_ids: Any, scores: Any, **kwargs: object) -> Any:
        return torch.full((len(input_ids),), self.is_wished(), device=input_ids.device)


class Speaker:
    """A model and how it samples."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, max_len: int
    ) -> None:
        model.set_attn_implementation(DECODING)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_len = max_len
        generation: Any = model.generation_config
        self.ends = end_tokens(generation.eos_token_id if generation else None, tokenizer)
        self.sampling = sampling

    def read(self, prompt: str) -> list[int]:
        """Its tokens as it stands; templates bring the special ones along."""
        return self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]

    @torch.no_grad()
    def reply(self, prompt_ids: list[int], show: Callable[[str], None], is_wished: Callable[[], bool]) -> Reply:
        """Continues the prompt, which must leave room within `max_len`; `is_wished` asks for an early end."""
        model: Any = self.model
        shown = Shown(self.tokenizer, show)
        ids = torch.tensor([prompt_ids], device=self.model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._settings(self.max_len - len(prompt_ids)),
            streamer=shown,
            stopping_criteria=StoppingCriteriaList([Wished(is_wished)]),
        )
        if shown.token_ids and shown.token_ids[-1] in self.ends:
            return Reply(shown.text, "stop")
        return Reply(shown.text, "interrupted" if is_wished() else "length")

    def _settings(self, max_new_tokens: int) -> GenerationConfig:
        """Whatever changes the sampling is given, or it would come from the model's own generation_config."""
        sampling = self.sampling
        samples = not sampling.greedy_sampling and sampling.temperature > 0
        how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if samples else {}
        return GenerationConfig(
            do_sample=samples,
            **how,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.ends),
            pad_token_id=self.tokenizer.pad_token_id,
        )
