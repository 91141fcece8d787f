"""vLLM on our own thread: requests, pauses, weight loads and sleep are all processed between its steps.

`VLLMEngine` (vllm.py) extends `StepLoop` with the translation between our types and vLLM's. The requests of one call
stay together:

    run_requests([r0, r1])  ->  GenerateCall  ->  held while paused or draining
                                              ->  RunningRequest 17, 18  --steps-->  Completion each
                                              ->  both are done: the caller gets [completion of r0, of r1]

The thread takes steps only if it is neither paused nor asleep and has a complete set of weights. A weight sync calls

    pause(drain=...)  ->  [sleep, wake("weights")]  ->  load(weights, version)  ->  [wake("cache")]  ->  resume

Interrupted requests continue with the new weights. Their keys and values are recomputed, or kept with `keeps_cache`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openrlhf.errors import RolloutError, counted
from openrlhf.rollout.command_thread import CommandThread, Waiter, on_thread
from openrlhf.rollout.engine import Checksums, Part, Weights
from openrlhf.rollout.weight_receiver import IncomingWeights, WeightsPerWorker
from openrlhf.types import Completion

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.inputs import TokensInput

    from openrlhf.rollout.vllm_worker import Received

RequestOutput: TypeAlias = Any  # vllm.RequestOutput
LLMEngine: TypeAlias = Any  # vllm.v1.engine.llm_engine.LLMEngine, whose interface differs between releases
SHOWN = 5  # names listed in a message
COUNT_SECONDS = 1.0  # maximum seconds between two counts of tokens
TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}  # vLLM's names for the parts of its memory


@dataclass(frozen=True)
class VLLMRequest:
    """One request in vLLM's types."""

    prompt: TokensInput
    params: VLLMSamplingParams


@dataclass(eq=False)
class GenerateCall:
    """The requests of one caller, and the completions that have arrived so far."""

    requests: Sequence[VLLMRequest]
    waiter: Waiter = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)  # by index in `requests`


@dataclass(frozen=True)
class RunningRequest:
    """One request that vLLM is working on."""

    call: GenerateCall
    index: int  # in `call.requests`
    inner_id: str  # vLLM's internal id


@contextmanager
def rejections() -> Iterator[None]:
    """Turn vLLM's rejection of a request (prompt too long, parameter out of range) into a RolloutError."""
    from vllm.exceptions import VLLMValidationError  # a ValueError only in some versions

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise RolloutError(f"vLLM rejects this request: {error}") from error


def routed_experts(output: RequestOutput) -> NDArray[np.int16]:
    """Return the experts that vLLM reports for a finished request, [all tokens but the last, layers, k].

    Some versions report those of the prompt apart from those of the completion, and some also those of the last token.
    """
    made = output.outputs[0]
    parts = [getattr(output, "prompt_routed_experts", None), getattr(made, "routed_experts", None)]
    found = [part for part in parts if part is not None]
    expected = len(output.prompt_token_ids) + len(made.token_ids) - 1
    rows = np.concatenate(found).astype(np.int16) if found else np.empty((0, 0, 0), np.int16)
    if len(rows) < expected or (rows.shape[2] > 1 and not rows.any()):
        found = f"the experts of {len(rows)} tokens" if len(rows) < expected else "only zeros"
        raise RolloutError(
            f"vLLM did not report its choice of experts: expected those of {expected} tokens, got {found}",
            try_this="without --router_replay",
        )
    return rows[:expected]


class StepLoop(CommandThread):
    """The commands that run on vLLM's thread.

    Callers await the coroutines. All other code, including the bodies of `on_thread` methods, runs on the thread.
    """

    _engine: LLMEngine  # set by `_build` of the subclass

    def __init__(self, timeout: float, *, keeps_cache: bool = False, reports_experts: bool = False) -> None:
        self.version = 0
        self._keeps_cache, self._reports_experts = keeps_cache, reports_experts
        self._running: dict[str, RunningRequest] = {}  # by request id
        self._count = 0  # requests so far; numbers their ids
        # By request id: the older versions that sampled tokens of it, each with the number of tokens up to its end.
        self._older: dict[str, list[tuple[int, int]]] = {}
        self._held: list[GenerateCall] = []  # submitted while paused or draining
        self._draining: list[Waiter] = []
        self._paused = False
        self._asleep: set[Part] = set()
        self._has_weights = True
        self._readable: list[frozenset[str]] = []  # tensors that each worker's first verified load could read back
        self._tokens = 0  # tokens of the running requests at the last count
        self._counted_at = 0.0
        super().__init__("vLLM", timeout)

    async def run_requests(self, requests: Sequence[VLLMRequest]) -> list[Completion]:
        """Return all completions in order, without their texts. Cancelling the call withdraws its requests."""
        call = GenerateCall(requests)
        self.post(lambda: self._submit(call), call.waiter, f"accepting {counted(len(requests), 'request')}")
        try:
            return await asyncio.wrap_future(call.waiter)
        except asyncio.CancelledError:
            with suppress(RolloutError):  # closed in the meantime
                self.post(lambda: self._withdraw(call, RolloutError("cancelled by its caller")), call.waiter)
            raise

    async def pause(self, *, drain: bool) -> None:
        """Sample no token until `resume`. With `drain`, running requests finish first, and new ones wait."""
        waiter: Waiter = Future()
        self.post(lambda: self._pause(waiter, drain=drain), waiter)
        await asyncio.wrap_future(waiter)

    @on_thread
    def resume(self) -> None:
        self._paused = False
        for waiter in self._draining:
            self.answer(waiter, None)
        self._draining.clear()
        held = tuple(self._held)
        self._held.clear()
        for call in held:
            self._submit(call)

    @on_thread
    def load(self, weights: Weights, version: int, *, verify: bool = False) -> Checksums:
        """Load new weights, and let unfinished requests continue with them.

        An incomplete weight set is the sender's fault: pause generation until a complete one arrives. Requests
        are kept.
        """
        if isinstance(weights, IncomingWeights | WeightsPerWorker):
            self._watch.stop_clock()  # the trainer may take long to send; the channel has its own deadlines
        states = self._engine.output_processor.request_states
        for name, running in self._running.items():
            state = states[running.inner_id]
            if not state.is_prefilling:
                self._older.setdefault(name, []).append((self.version, len(state.detokenizer.output_token_ids)))
        self._has_weights = False  # until all workers compute with the same complete new weights
        received: list[Received] = self._engine.collective_rpc("receive_weights", args=(weights, verify))
        for worker in received:
            if worker.failure:
                raise RolloutError(worker.failure)
        missing = sorted({name for worker in received for name in worker.missing})
        if missing:
            raise RolloutError(f"no weights arrived for {', '.join(missing)}")
        if any(worker.checksums != received[0].checksums for worker in received):
            raise RolloutError("the workers of this engine received different weights")
        if verify:
            # If a tensor could be read back before but not now, its layer does not compute with what arrived.
            read_back = [worker.read_back for worker in received]  # pipeline stages hold different tensors
            self._readable = self._readable if any(self._readable) else read_back
            pairs = zip(self._readable, read_back, strict=True)
            lost = sorted({name for before, now in pairs for name in before - now})
            if lost:
                shown = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
                problem = f"vLLM still computes with different values for {counted(len(lost), 'tensor')}: {shown}"
                raise RolloutError(f"weights arrived, but {problem}")
        self._has_weights = True
        if not self._keeps_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)  # drop keys and values of the old weights
        self.version = version
        return received[0].checksums

    @on_thread
    def sleep(self) -> None:
        """Put vLLM to sleep at level 2, which drops the weights instead of copying them to the host.

        New weights are loaded after waking up anyway.
        """
        if not self._asleep:
            self._engine.sleep(level=2, mode="keep")
            self._asleep = {"weights", "cache"}
        self._has_weights = False

    @on_thread
    def wake(self, part: Part) -> None:
        if part in self._asleep:
            self._engine.wake_up(tags=[TAGS[part]])
            self._asleep.remove(part)

    def _submit(self, call: GenerateCall) -> None:
        """Submit a call to vLLM, or hold it while paused or draining. If vLLM rejects one request, the call fails."""
        if self._paused or self._draining:
            self._held.append(call)
            return
        try:
            if self._asleep or not self._has_weights:
                needs = "wake('weights'), load and wake('cache')"
                raise RolloutError(f"vLLM is asleep or has no complete weights: call {needs} first")
            with rejections():
                for index, request in enumerate(call.requests):
                    name = str(self._count)
                    self._count += 1
                    prompt = request.prompt
                    if self._keeps_cache:  # a new request shares a prefix only with others of its version
                        prompt["cache_salt"] = str(self.version)
                    inner_id = self._engine.add_request(name, prompt, request.params)
                    self._running[name] = RunningRequest(call, index, inner_id)
        except RolloutError as error:
            self._withdraw(call, error)

    def _withdraw(self, call: GenerateCall, reason: RolloutError) -> None:
        """Remove a call, held or running."""
        if call in self._held:
            self._held.remove(call)
        names = [name for name, running in self._running.items() if running.call is call]
        self._engine.abort_request(names)
        for name in names:
            del self._running[name]
            self._older.pop(name, None)
        self.answer(call.waiter, reason)
        self._end_drain()

    def _pause(self, waiter: Waiter, *, drain: bool) -> None:
        if drain:
            self._paused = False  # requests that an earlier pause interrupted finish too
            self._draining.append(waiter)
            self._end_drain()
        else:
            self._paused = True
            self.answer(waiter, None)

    def _end_drain(self) -> None:
        """If a drain is in progress and no request is left, pause and answer its callers."""
        if self._draining and not self._running:
            self._paused = True
            for waiter in self._draining:
                self.answer(waiter, None)
            self._draining.clear()

    def _may_step(self) -> bool:
        return bool(self._running) and self._has_weights and not self._asleep and not self._paused

    def _step(self) -> None:
        """Take a step; store the completions of finished requests, and answer the callers that have all of theirs."""
        finished = [output for output in self._engine.step() if output.finished]
        self._note_tokens(has_finished=bool(finished))
        for output in finished:
            made = output.outputs[0]
            if made.finish_reason not in ("stop", "length"):
                why = made.finish_reason
                raise RolloutError(f"vLLM did not finish a request: expected finish_reason stop or length, got {why!r}")
            running = self._running.pop(output.request_id)
            call, older = running.call, self._older.pop(output.request_id, [])
            whole = Completion.of(made.token_ids, made.logprobs.logprobs, "", made.finish_reason, self.version)
            if self._reports_experts:
                whole = replace(whole, routed_experts=routed_experts(output))
            for version, end in reversed(older):
                whole.token_versions[:end] = version
            call.completions[running.index] = replace(whole, version=older[0][0]) if older else whole
            if len(call.completions) == len(call.requests):
                self.answer(call.waiter, [call.completions[index] for index in range(len(call.requests))])
        self._end_drain()

    def _step_task(self) -> str:
        return f"generating {counted(len(self._running), 'request')}, with {counted(self._tokens, 'token')} so far"

    def _note_tokens(self, *, has_finished: bool) -> None:
        """Report progress only if there are new tokens: a scheduler without free memory takes steps that sample none.

        Counting takes time, so tokens are not counted in every step.
        """
        now = time.monotonic()
        if not has_finished and now < self._counted_at + min(COUNT_SECONDS, self._watch.seconds / 10):
            return
        states = self._engine.output_processor.request_states
        counted = (states.get(running.inner_id) for running in self._running.values())
        tokens = sum(len(state.detokenizer.output_token_ids) for state in counted if state is not None)
        if has_finished or tokens != self._tokens:
            self._watch.progress()
        self._tokens, self._counted_at = tokens, now

    def _shut_down(self) -> None:
        from vllm.distributed.parallel_state import destroy_model_parallel

        # vLLM also destroys torch's default process group here, so a trainer in this process must be closed first.
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()
        destroy_model_parallel()  # a later engine may need other groups, for example for experts
