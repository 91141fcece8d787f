"""The in-process engine: a Transformers model with continuous batching and exact log-probs. Needs no other package.

A finished row frees its slot for a waiting request. Every request samples from its own random stream, so its tokens do
not depend on the rest of the batch (beyond the rounding of the matrix products).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.errors import RolloutError
from openrlhf.models.forward import Network
from openrlhf.models.plain import checkpoint_places, load_weights
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.decoding import Decoding, DecodingRows, evaluating
from openrlhf.rollout.decoding_check import choose_decoding
from openrlhf.rollout.engine import Checksums, Part, Weights
from openrlhf.rollout.sampling import Draws, draw, penalise
from openrlhf.types import Completion, FinishReason, Request

OnDone: TypeAlias = Callable[[int, Completion], None]


@dataclass
class Row:
    """One request in progress."""

    place: int  # index in the list of requests
    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Running:
    """The rows of the current batch, and the state that grows and shrinks with them."""

    rows: list[Row]
    state: DecodingRows
    draws: Draws

    def keep(self, places: list[int]) -> None:
        self.state.keep(places)
        self.draws = self.draws.rows(torch.tensor(places, device=self.draws.uniforms.device))
        self.rows = [self.rows[place] for place in places]

    def add(self, other: Running) -> None:
        self.state.add([other.state])
        self.draws = self.draws.joined(other.draws)
        self.rows += other.rows


class HFEngine:
    """Engine over a network that training may share."""

    def __init__(
        self,
        network: Network,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 256,
        whole_log_probs: bool = False,  # over the whole vocabulary, even if sampling is limited to a part of it
    ) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.whole_log_probs = whole_log_probs
        self.version = 0
        self.may_draw = asyncio.Event()
        self.may_draw.set()
        generation: Any = network.decoder.generation_config
        self.ends = end_tokens(generation.eos_token_id if generation else None, tokenizer)

    @cached_property
    def places(self) -> dict[str, Tensor]:
        """Views of the network's memory by the names of a checkpoint's tensors."""
        return checkpoint_places(self.network)

    @cached_property
    def decoding(self) -> Decoding:
        """The fastest decoding strategy that gives the model's own log-probs."""
        return choose_decoding(self.network)

    def prepare(self) -> Self:
        """Choose the decoding strategy now, so that a model without one is rejected before any other work."""
        assert self.decoding is not None
        return self

    @property
    def device(self) -> torch.device:
        return self.network.decoder.device

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await self.may_draw.wait()
        return self.complete(requests)

    @torch.no_grad()
    def complete(self, requests: Sequence[Request], on_done: OnDone | None = None) -> list[Completion]:
        """Return all completions in the order of the requests; `on_done` gets each, with its index, when it is done."""
        waiting = [Row(place, request) for place, request in enumerate(requests)]
        waiting.sort(key=lambda row: -len(row.request.prompt_token_ids))  # neighbours of similar length pad little
        finished: list[Row] = []
        running: Running | None = None
        with evaluating(self.network.decoder, self.decoding.attention):
            while waiting or running:
                running = self._admit(running, waiting)
                running = self._retire(running, finished, on_done, num_waiting=len(waiting))
                if running:
                    self._step(running)
        finished.sort(key=lambda row: row.place)
        return [self._completion(row) for row in finished]

    @torch.no_grad()
    def stream(self, request: Request) -> Iterator[int]:
        """Yield the tokens of one completion as they are sampled; it ends when the caller stops iterating."""
        with evaluating(self.network.decoder, self.decoding.attention):
            row = Row(0, request)
            running = self._prefill([row])
            yield row.token_ids[-1]
            while row.finish_reason is None:
                self._step(running)
                yield row.token_ids[-1]

    def _admit(self, running: Running | None, waiting: list[Row]) -> Running:
        """Fill free slots, once there are enough of them: each admission copies the cache."""
        free = self.max_rows - (len(running.rows) if running else 0)
        if running and (not waiting or free < self._enough(running, len(waiting))):
            return running
        taken, waiting[:] = waiting[:free], waiting[free:]
        fresh = self._prefill(taken)
        if running is None:
            return fresh
        running.add(fresh)
        return running

    def _prefill(self, rows: list[Row]) -> Running:
        """Prefill new rows and sample their first tokens."""
        state, logits = self.decoding.prefill([row.request.prompt_token_ids for row in rows])
        draws = Draws.of([row.request.params for row in rows], logits.shape[-1], self.device)
        fresh = Running(rows, state, draws)
        self._draw(fresh, logits)
        return fresh

    def _step(self, running: Running) -> None:
        ended = [row.finish_reason is not None for row in running.rows]
        logits = running.state.step([row.token_ids[-1] for row in running.rows], ended)
        self._draw(running, logits)

    def _draw(self, running: Running, logits: Tensor) -> None:
        """Sample the next token of each row from logits [rows, vocabulary]."""
        whole = logits.clone() if self.whole_log_probs else None
        logits = self._without_repetition(logits, running.rows)
        logits = self._without_early_end(logits, running.rows)
        places = torch.tensor([len(row.token_ids) for row in running.rows], device=self.device)
        tokens, log_probs = draw(logits, running.draws, places, whole=whole)
        for row, token, log_prob in zip(running.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if row.finish_reason is None:  # a row that has ended may stay until enough of them can be removed
                row.token_ids.append(token)
                row.log_probs.append(log_prob)
                row.finish_reason = self._finish_reason(row)

    def _without_repetition(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """Apply repetition penalties in place; as in vLLM, they also count the tokens of the prompt."""
        for number, row in enumerate(rows):
            penalty = row.request.params.repetition_penalty
            if penalty != 1.0:
                seen = torch.tensor(sorted({*row.request.prompt_token_ids, *row.token_ids}), device=self.device)
                logits[number] = penalise(logits[number], seen, penalty)
        return logits

    def _without_early_end(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """Forbid the tokens that would end a response below its minimum length, as vLLM does; in place."""
        young = [(number, row.request.params.stop_token_ids) for number, row in enumerate(rows) if self._is_young(row)]
        known = logits.shape[-1]  # a generation config may name end tokens beyond the model's vocabulary
        forbidden = [(number, token) for number, stops in young for token in {*self.ends, *stops} if token < known]
        if forbidden:
            numbers, tokens = torch.tensor(forbidden, device=self.device).unbind(1)
            logits[numbers, tokens] = -torch.inf
        return logits

    @staticmethod
    def _is_young(row: Row) -> bool:
        """True while the next token must not be the last."""
        return len(row.token_ids) + 1 < row.request.params.min_tokens

    def _finish_reason(self, row: Row) -> FinishReason | None:
        """Return why a row ends with its last token; None if it goes on."""
        params, token = row.request.params, row.token_ids[-1]
        if len(row.token_ids) < params.min_tokens:
            return None
        if token in self.ends or token in params.stop_token_ids:
            return "stop"
        if params.stop and any(text in self._tail(row) for text in params.stop):
            return "stop"
        return "length" if len(row.token_ids) >= params.max_tokens else None

    def _tail(self, row: Row) -> str:
        """Decode enough of the last tokens to hold the longest stop string: one token per character, and 8 more."""
        longest = max(len(text) for text in row.request.params.stop)
        return self._text(row.token_ids[-longest - 8 :])

    def _text(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids)
        assert isinstance(text, str)
        return text

    def _retire(
        self, running: Running, finished: list[Row], on_done: OnDone | None, *, num_waiting: int
    ) -> Running | None:
        """Remove rows that have ended, once there are enough of them: each removal copies the cache."""
        going = [place for place, row in enumerate(running.rows) if row.finish_reason is None]
        done = len(running.rows) - len(going)
        if going and done < self._enough(running, num_waiting):
            return running
        for row in running.rows:
            if row.finish_reason is not None:
                finished.append(row)
                if on_done:
                    on_done(row.place, self._completion(row))
        if not going:
            return None
        running.keep(going)
        return running

    def _enough(self, running: Running, num_waiting: int) -> int:
        """Return how many slots justify a copy of the cache.

        That is an eighth of the running rows; if requests wait, an eighth of all slots or as many as wait, if fewer.
        """
        if not num_waiting:
            return max(1, len(running.rows) // 8)
        return min(num_waiting, max(1, self.max_rows // 8))

    def _completion(self, row: Row) -> Completion:
        assert row.finish_reason is not None
        return Completion(
            token_ids=tuple(row.token_ids),
            log_probs=tuple(row.log_probs),
            text=self._text(row.token_ids),
            finish_reason=row.finish_reason,
            version=self.version,
        )

    @torch.no_grad()
    async def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Copy weights into the engine's own plain network; a shared network needs only the new version number."""
        sums: dict[str, int] = {}
        came: set[str] = set()
        for name, tensor in load_weights(self.places, weights):
            came.add(name)
            if verify:
                sums[name] = checksum(tensor)
        missing = sorted(self.places.keys() - came) if came else []
        if missing:
            raise RolloutError(f"no weights came for {', '.join(missing)}")
        self.version = version
        return sums

    async def pause(self, *, drain: bool) -> None:
        """Block new calls of `generate`. Nothing runs between two calls, so there is nothing to drain."""
        self.may_draw.clear()

    async def resume(self) -> None:
        self.may_draw.set()

    async def sleep(self) -> None:
        """Do nothing: the trainer offloads a network that it shares, and the engine's own stays on its device."""

    async def wake(self, part: Part) -> None:
        """Do nothing, like `sleep`."""

    async def health(self) -> None:
        """Never raise: the engine lives as long as its process."""

    async def close(self) -> None:
        """Do nothing: no thread or process was started."""


def end_tokens(configured: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's EOS and those of the model's generation config."""
    more = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*more, tokenizer.eos_token_id) if token is not None)
