"""The in-process engine: a Transformers model with continuous batching and exact log-probs.

A call of `complete` runs its requests through a batch of at most `max_rows` rows:

    waiting requests  --admit: prefill, first token-->  RunningBatch  --one token per row and step--.
                                                            ^                                       |
                                                            '---------------------------------------'
    finished requests <--retire: as soon as enough rows have ended--

A finished row frees its slot for a waiting request. Every request samples from its own random stream, so its tokens do
not depend on the rest of the batch (beyond the rounding of the matrix products). The decoding strategy computes the
logits (decoding.py), and sampling.py samples tokens from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.errors import EngineError, RolloutError, counted
from openrlhf.models.forward import Network
from openrlhf.models.modes import evaluating
from openrlhf.models.plain import checkpoint_places, load_weights
from openrlhf.monitor import Progress
from openrlhf.rollout.decoding import Decoding, DecodingRows
from openrlhf.rollout.decoding_check import choose_decoding
from openrlhf.rollout.engine import Checksums, Part, Weights
from openrlhf.rollout.progress import AFTER_STALL, ProgressWatch
from openrlhf.rollout.sampling import SamplingState, sample_tokens
from openrlhf.rollout.sync_proof import RecordedWeights
from openrlhf.signals import end_program
from openrlhf.types import Completion, FinishReason, Request

OnDone: TypeAlias = Callable[[int, Completion], None]


@dataclass
class RunningRow:
    """One request in progress."""

    index: int  # position in the list of requests
    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while the row is running


@dataclass
class RunningBatch:
    """The rows of the current batch, and the state that grows and shrinks with them."""

    rows: list[RunningRow]
    state: DecodingRows
    sampling: SamplingState

    @property
    def last_tokens(self) -> list[int]:
        return [row.token_ids[-1] for row in self.rows]

    @property
    def ended(self) -> list[bool]:
        return [row.finish_reason is not None for row in self.rows]


@dataclass
class GatheredRequests:
    """Requests that are generated as one batch."""

    requests: list[Request] = field(default_factory=list)
    completions: Future[list[Completion]] = field(default_factory=Future)


class HFEngine:
    """Engine that generates with a network, which may be shared with training."""

    def __init__(
        self,
        network: Network,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 256,
        whole_log_probs: bool = False,  # over the whole vocabulary, even if sampling is limited to a part of it
        timeout: float | None = None,  # end the program after this many seconds without a new token
        shows_progress: bool = False,  # of long batches, on the console
    ) -> None:
        self.network = network
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.whole_log_probs = whole_log_probs
        self.shows_progress = shows_progress
        self.version = 0
        self.watch = None if timeout is None else ProgressWatch(timeout, end_hanging_program)
        self.may_generate = asyncio.Event()
        self.may_generate.set()
        self.next_batch = GatheredRequests()
        generation = network.decoder.generation_config
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
        """Choose the decoding strategy now, to reject a model without one before any other work."""
        assert self.decoding is not None
        return self

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions; calls from the same iteration of the event loop run as one batch."""
        batch, first = self.next_batch, len(self.next_batch.requests)
        batch.requests += requests
        await asyncio.sleep(0)  # until all calls of this iteration have added their requests
        await self.may_generate.wait()
        if batch is self.next_batch:  # the first of these calls to get here generates for all of them
            self.next_batch, hidden = GatheredRequests(), not self.shows_progress
            try:
                rounds = -(-len(batch.requests) // self.max_rows)
                most = rounds * max((request.params.max_tokens for request in batch.requests), default=0)
                with Progress("generate", total=most, unit="token", hidden=hidden, brief=True) as progress:
                    batch.completions.set_result(self.complete(batch.requests, progress=progress))
            except BaseException as error:  # noqa: BLE001 - each of these calls raises it
                batch.completions.set_exception(error)
        return batch.completions.result()[first : first + len(requests)]

    @torch.no_grad()
    def complete(
        self, requests: Sequence[Request], on_done: OnDone | None = None, progress: Progress | None = None
    ) -> list[Completion]:
        """Return all completions in the order of the requests; `on_done` is called with each index and completion."""
        waiting = [RunningRow(index, request) for index, request in enumerate(requests)]
        waiting.sort(key=lambda row: -len(row.request.prompt_token_ids))  # rows of similar length need little padding
        completions: dict[int, Completion] = {}
        running: RunningBatch | None = None
        records = nullcontext() if self.network.routed is None else self.network.routed.recording()
        with evaluating(self.network.decoder, self.decoding.attention), self._watched(len(requests)), records:
            while waiting or running:
                running = self._admit(running, waiting)
                running, finished = self._retire(running, num_waiting=len(waiting))
                completions |= finished
                if progress and running:  # each running row has got one more token
                    count = min(1, progress.total - progress.done)
                    progress.show({"finished responses": len(completions)}, count=count)
                if on_done:
                    for index, completion in finished.items():
                        on_done(index, completion)
                if running:
                    self._sample(running, running.state.step(running.last_tokens, running.ended))
        return [completions[index] for index in range(len(requests))]

    @contextmanager
    def _watched(self, count: int) -> Iterator[None]:
        """Watch the progress of `count` requests, because a thread that hangs cannot notice it."""
        if self.watch is None:
            yield
            return
        self.watch.progress()
        with self.watch.working(f"generating {counted(count, 'request')}"):
            yield

    @torch.no_grad()
    def stream(self, request: Request) -> Iterator[int]:
        """Yield the tokens of one completion as they are sampled, until it ends or the caller stops iterating."""
        with evaluating(self.network.decoder, self.decoding.attention):
            row = RunningRow(0, request)
            running = self._admit(None, [row])
            yield row.token_ids[-1]
            while row.finish_reason is None:
                self._sample(running, running.state.step(running.last_tokens, running.ended))
                yield row.token_ids[-1]

    def _admit(self, running: RunningBatch | None, waiting: list[RunningRow]) -> RunningBatch:
        """Prefill waiting rows once there are enough free slots for them, because each admission copies the cache."""
        free = self.max_rows - (len(running.rows) if running else 0)
        if running and (not waiting or free < self._worth_a_copy(running, len(waiting))):
            return running
        taken, waiting[:] = waiting[:free], waiting[free:]
        state, logits = self.decoding.prefill([row.request.prompt_token_ids for row in taken])  # [rows, vocabulary]
        sampling = SamplingState.of([row.request.params for row in taken], logits.shape[-1], logits.device)
        fresh = RunningBatch(taken, state, sampling)
        self._sample(fresh, logits)  # their first tokens
        if running is None:
            return fresh
        running.state.add(fresh.state)
        running.sampling = running.sampling.joined(fresh.sampling)
        running.rows += fresh.rows
        return running

    def _retire(self, running: RunningBatch, *, num_waiting: int) -> tuple[RunningBatch | None, dict[int, Completion]]:
        """Remove rows that have ended, once there are enough; return the remaining batch and completions by index."""
        active = [place for place, ended in enumerate(running.ended) if not ended]
        num_ended = len(running.rows) - len(active)
        if active and num_ended < self._worth_a_copy(running, num_waiting):
            return running, {}
        finished: dict[int, Completion] = {}
        for place, row in enumerate(running.rows):
            if row.finish_reason is None:
                continue
            text = str(self.tokenizer.decode(row.token_ids))
            made = Completion.of(row.token_ids, row.log_probs, text, row.finish_reason, self.version)
            experts = running.state.experts(place)  # [tokens, layers, k] of prompt and completion, if recorded
            if experts is not None:
                # The last token is never an input. A row that has ended may get more tokens before it is removed.
                inputs = len(row.request.prompt_token_ids) + len(row.token_ids) - 1
                made = replace(made, routed_experts=experts[:inputs].cpu().numpy())
            finished[row.index] = made
        if not active:
            return None, finished
        running.state.keep(active)
        running.sampling = running.sampling.rows(torch.tensor(active, device=running.sampling.uniforms.device))
        running.rows = [running.rows[place] for place in active]
        return running, finished

    def _worth_a_copy(self, running: RunningBatch, num_waiting: int) -> int:
        """Return how many slots justify a copy of the cache.

        The number is an eighth of the running rows. If requests wait, it is an eighth of all slots, but at most the
        number of waiting requests.
        """
        if not num_waiting:
            return max(1, len(running.rows) // 8)
        return min(num_waiting, max(1, self.max_rows // 8))

    def _sample(self, running: RunningBatch, logits: Tensor) -> None:
        """Sample the next token of each row from logits [rows, vocabulary], which are changed in place."""
        whole = logits.clone() if self.whole_log_probs else None
        # Apply repetition penalties and minimum lengths, as vLLM does.
        forbidden: list[tuple[int, int]] = []  # (row, token)
        for number, row in enumerate(running.rows):
            params, penalty = row.request.params, row.request.params.repetition_penalty
            if penalty != 1.0:  # CTRL, arXiv 1909.05858, eq. 2; tokens of the prompt count too
                seen = torch.tensor(sorted({*row.request.prompt_token_ids, *row.token_ids}), device=logits.device)
                before = logits[number, seen]  # [seen tokens]
                logits[number, seen] = torch.where(before > 0, before / penalty, before * penalty)
            if len(row.token_ids) + 1 < params.min_tokens:  # the next token must not be the last
                # A generation config may name end tokens beyond the model's vocabulary.
                ends = (token for token in {*self.ends, *params.stop_token_ids} if token < logits.shape[-1])
                forbidden += [(number, token) for token in ends]
        if forbidden:
            numbers, banned = torch.tensor(forbidden, device=logits.device).unbind(1)
            logits[numbers, banned] = -torch.inf

        places = torch.tensor([len(row.token_ids) for row in running.rows], device=logits.device)  # [rows]
        tokens, log_probs = sample_tokens(logits, running.sampling, places, whole=whole)  # [rows] each
        for row, token, log_prob in zip(running.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if row.finish_reason is None:  # a row that has ended may stay until enough of them can be removed
                row.token_ids.append(token)
                row.log_probs.append(log_prob)
                row.finish_reason = self._finish_reason(row)
        if self.watch is not None:
            self.watch.progress()

    def _finish_reason(self, row: RunningRow) -> FinishReason | None:
        """Return why a row ends with its last token; None if it continues."""
        params, token = row.request.params, row.token_ids[-1]
        if len(row.token_ids) < min(params.min_tokens, params.max_tokens):
            return None
        if token in self.ends or token in params.stop_token_ids:
            return "stop"
        if params.stop:
            # Decode enough of the last tokens to hold the longest stop string: one token per character, and 8 more.
            tail = str(self.tokenizer.decode(row.token_ids[-max(map(len, params.stop)) - 8 :]))
            if any(text in tail for text in params.stop):
                return "stop"
        return "length" if len(row.token_ids) >= params.max_tokens else None

    @torch.no_grad()
    async def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Copy weights into the engine's own plain network; a shared network needs only the new version number."""
        loaded = RecordedWeights(load_weights(self.places, weights), verify=verify)
        arrived = {name for name, _ in loaded}
        missing = sorted(self.places.keys() - arrived) if arrived else []
        if missing:
            raise RolloutError(f"no weights arrived for {', '.join(missing)}")
        self.version = version
        return loaded.checksums

    async def pause(self, *, drain: bool) -> None:
        """Block new calls of `generate`. Nothing runs between two calls, so there is nothing to drain."""
        self.may_generate.clear()

    async def resume(self) -> None:
        self.may_generate.set()

    async def sleep(self) -> None:
        """Do nothing: the trainer offloads a shared network, and a network of the engine stays on its device."""

    async def wake(self, part: Part) -> None:
        """Do nothing, like `sleep`."""

    async def health(self) -> None:
        """Do nothing: the engine is usable as long as its process runs."""

    async def close(self) -> None:
        """Stop the watchdog; there is no other thread or process to stop."""
        if self.watch is not None:
            self.watch.close()


def end_hanging_program(problem: str) -> None:
    """End the program, since no exception reaches a thread that hangs in a kernel."""
    end_program(f"openrlhf: error: the engine hangs: {problem}. Try: {AFTER_STALL}", EngineError.exit_code)


def end_tokens(configured: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's EOS and those of the model's generation config."""
    more = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*more, tokenizer.eos_token_id) if token is not None)
