"""The thread that owns vLLM's engine: it runs commands between two steps and sends results to the callers.

`VLLMEngine` posts the commands. Nothing polls: with nothing to generate, the thread blocks until the next command, and
each caller awaits its result in its own event loop.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from openrlhf.errors import EngineError, RolloutError
from openrlhf.rollout.engine import Checksums, Part, Weights
from openrlhf.types import FinishReason

if TYPE_CHECKING:
    from openrlhf.rollout.vllm_worker import Received

Result = TypeVar("Result")
Waiter: TypeAlias = asyncio.Future[Any]
Command: TypeAlias = tuple[Callable[[], None] | None, Waiter]  # None ends the thread
CLOSED = "this engine was closed"
SHOWN = 5  # names listed in a message
TAGS: dict[Part, str] = {"weights": "weights", "cache": "kv_cache"}  # vLLM's names for the parts of its memory


@dataclass(frozen=True)
class Ask:
    """One request in vLLM's types."""

    prompt: Any  # vllm.inputs.TokensInput
    params: Any  # vllm.SamplingParams


@dataclass(frozen=True)
class Generated:
    """The result of one request."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: FinishReason
    version: int


@dataclass(eq=False)
class Batch:
    """The requests of one call, and the results that are there so far."""

    asks: Sequence[Ask]
    waiter: Waiter
    generated: dict[int, Generated]  # by index in `asks`


@dataclass(frozen=True)
class Running:
    """One request that vLLM is working on."""

    batch: Batch
    place: int  # index in `batch.asks`
    inner_id: str  # vLLM's internal id


class Answers:
    """Results collected during a step and sent after it, with one wake-up per event loop instead of one per result."""

    def __init__(self) -> None:
        self.by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[Waiter, object]]] = defaultdict(list)

    def give(self, waiter: Waiter, result: object) -> None:
        self.by_loop[waiter.get_loop()].append((waiter, result))

    def send(self) -> None:
        for loop, answers in self.by_loop.items():
            with suppress(RuntimeError):  # the loop was closed, so no caller waits there any more
                loop.call_soon_threadsafe(_deliver, answers)
        self.by_loop.clear()


def _deliver(answers: list[tuple[Waiter, object]]) -> None:
    for waiter, result in answers:
        if waiter.done():
            continue
        if isinstance(result, Exception):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn vLLM's rejection of a request (prompt too long, parameter out of range) into a RolloutError."""
    from vllm.exceptions import VLLMValidationError  # a ValueError only in some versions

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise RolloutError(f"vLLM takes no such request: {error}") from error


class StepLoop:
    """The thread and its commands.

    Callers await the coroutines, in their own event loops; everything that `_run` calls runs on the thread alone.
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self.version = 0
        self._engine: Any = None  # vllm.v1.engine.llm_engine.LLMEngine
        self._door = threading.Lock()  # ensures that no command follows the one that closes
        self._closed = False
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._answers = Answers()
        self._running: dict[str, Running] = {}  # by request id
        self._count = 0  # of requests; the source of their ids
        self._began: dict[str, int] = {}  # version of a request's first token, if the weights have changed since
        self._held: list[Batch] = []  # submitted while paused or draining
        self._draining: list[Waiter] = []
        self._paused = False
        self._asleep: set[Part] = set()
        self._has_weights = True
        self._readable: frozenset[str] = frozenset()  # tensors that the first verified load could read back
        self._failure: Exception | None = None
        started: Future[None] = Future()
        arguments = (build, torch.get_num_threads(), started)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="openrlhf-vllm")
        self._thread.start()
        started.result()

    async def generate(self, asks: Sequence[Ask]) -> list[Generated]:
        """Return all results in order. Cancelling the call withdraws its requests."""
        batch = Batch(asks, asyncio.get_running_loop().create_future(), {})
        self._post(lambda: self._submit(batch), batch.waiter)
        try:
            return await batch.waiter
        except asyncio.CancelledError:
            with suppress(RolloutError):  # closed in the meantime
                self._post(lambda: self._take_back(batch), batch.waiter)
            raise

    async def pause(self, *, drain: bool) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._post(lambda: self._pause(waiter, drain=drain), waiter)
        await waiter

    async def resume(self) -> None:
        await self._do(self._resume)

    async def load(self, weights: Weights, version: int, *, verify: bool) -> Checksums:
        waiter = asyncio.get_running_loop().create_future()
        self._post(lambda: self._load(waiter, weights, version, verify=verify), waiter)
        return await waiter

    async def sleep(self) -> None:
        await self._do(self._sleep)

    async def wake(self, part: Part) -> None:
        await self._do(lambda: self._wake(part))

    async def health(self) -> None:
        """Raise if the engine failed or was closed, without waiting for the thread, which may be in a long step."""
        if self._failure is not None:
            raise self._dead()
        if self._closed:
            raise EngineError(CLOSED)

    async def close(self) -> None:
        """Let the thread run the commands before this one, fail those who still wait, and shut vLLM down."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._inbox.put((None, asyncio.get_running_loop().create_future()))
        await asyncio.to_thread(self._thread.join)

    async def _do(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread between two steps; return its result."""
        waiter = asyncio.get_running_loop().create_future()
        self._post(lambda: self._answers.give(waiter, work()), waiter)
        return await waiter

    def _post(self, work: Callable[[], None], waiter: Waiter) -> None:
        """Queue a command for the thread; raise if the engine was closed."""
        with self._door:
            if self._closed:
                raise EngineError(CLOSED)
            self._inbox.put((work, waiter))

    def _run(self, build: Callable[[], Any], num_threads: int, started: Future[None]) -> None:
        """Build the engine, then alternate between commands and steps until closed: the main function of the thread."""
        torch.set_num_threads(num_threads)  # OpenMP counts per thread: otherwise this one would use every core
        try:
            self._engine = build()
        except Exception as error:  # noqa: BLE001 - any failure must reach the caller that builds the engine
            started.set_exception(error)
            return
        started.set_result(None)
        while self._obey():
            if self._may_step():
                self._guarded(self._step, None)
            self._answers.send()
        self._shut_down()

    def _obey(self) -> bool:
        """Run all pending commands, and wait for one if there is nothing to generate; return False at the end."""
        idle = not self._may_step()
        while True:
            try:
                work, waiter = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            self._guarded(work, waiter)
            idle = False

    def _may_step(self) -> bool:
        awake = self._has_weights and not self._asleep
        return bool(self._running) and awake and not self._paused and self._failure is None

    def _guarded(self, work: Callable[[], None], waiter: Waiter | None) -> None:
        """Run `work`. An error leaves the engine in an unknown state, so every waiting caller gets it."""
        if self._failure is None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - vLLM may raise anything, and the callers must not hang
                self._failure = error
                for other in self._everyone():
                    self._answers.give(other, self._dead())
        if self._failure is not None and waiter is not None:
            self._answers.give(waiter, self._dead())

    def _everyone(self) -> set[Waiter]:
        """Return the callers that wait for a generation or for a drain."""
        batches = {entry.batch for entry in self._running.values()} | set(self._held)
        return {batch.waiter for batch in batches} | set(self._draining)

    def _dead(self) -> EngineError:
        error = EngineError(f"vLLM failed and generates no more: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def _submit(self, batch: Batch) -> None:
        """Admit a batch, or hold it until `_resume` while paused or draining."""
        if self._paused or self._draining:
            self._held.append(batch)
        else:
            self._admit(batch)

    def _admit(self, batch: Batch) -> None:
        """Hand a batch to vLLM. If vLLM rejects one request, the whole batch fails."""
        if self._asleep or not self._has_weights:
            error = "vLLM sleeps or has no whole weights: it generates after wake('weights'), load and wake('cache')"
            self._answers.give(batch.waiter, RolloutError(error))
            return
        try:
            with refusals():
                for place, ask in enumerate(batch.asks):
                    name = str(self._count)
                    self._count += 1
                    inner_id = self._engine.add_request(name, ask.prompt, ask.params)
                    self._running[name] = Running(batch, place, inner_id)
        except RolloutError as error:
            self._take_back(batch)
            self._answers.give(batch.waiter, error)

    def _take_back(self, batch: Batch) -> None:
        """Withdraw a batch, held or running."""
        if batch in self._held:
            self._held.remove(batch)
        names = [name for name, entry in self._running.items() if entry.batch is batch]
        self._engine.abort_request(names)
        for name in names:
            del self._running[name]
            self._began.pop(name, None)
        self._end_drain()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._finish(output.request_id, output.outputs[0])
        self._end_drain()

    def _finish(self, name: str, said: Any) -> None:
        """Store the result of a request; answer the caller once its batch is complete."""
        if said.finish_reason not in ("stop", "length"):
            raise RolloutError(f"vLLM ended a request with {said.finish_reason!r}")
        entry = self._running.pop(name)
        version = self._began.pop(name, self.version)
        batch, log_probs = entry.batch, said.logprobs.logprobs
        batch.generated[entry.place] = Generated(said.token_ids, log_probs, said.finish_reason, version)
        if len(batch.generated) == len(batch.asks):
            self._answers.give(batch.waiter, [batch.generated[place] for place in range(len(batch.asks))])

    def _pause(self, waiter: Waiter, *, drain: bool) -> None:
        if drain:
            self._paused = False  # requests that an earlier pause interrupted finish too
            self._draining.append(waiter)
            self._end_drain()
        else:
            self._paused = True
            self._answers.give(waiter, None)

    def _end_drain(self) -> None:
        """If a drain is in progress and no request is left, pause and answer its callers."""
        if self._draining and not self._running:
            self._paused = True
            self._answer_draining()

    def _answer_draining(self) -> None:
        for waiter in self._draining:
            self._answers.give(waiter, None)
        self._draining.clear()

    def _resume(self) -> None:
        self._paused = False
        self._answer_draining()
        held = tuple(self._held)
        self._held.clear()
        for batch in held:
            self._admit(batch)

    def _load(self, waiter: Waiter, weights: Weights, version: int, *, verify: bool) -> None:
        """Load new weights, and let unfinished requests continue with them.

        An incomplete weight set is the sender's fault: pause generation until a complete one arrives. Everything else
        stays as it is.
        """
        states = self._engine.output_processor.request_states
        for name, entry in self._running.items():
            if not states[entry.inner_id].is_prefilling:
                self._began.setdefault(name, self.version)
        received = self._engine.collective_rpc("receive_weights", args=(weights,), kwargs={"verify": verify})
        wrong = what_is_wrong(received)
        if verify and wrong is None:
            wrong = self._not_in_effect(received)
        if wrong:
            self._has_weights = False
            self._answers.give(waiter, RolloutError(wrong))
            return
        self._engine.reset_prefix_cache(reset_running_requests=True)  # drop what the old weights computed
        self._has_weights = True
        self.version = version
        self._answers.give(waiter, received[0].checksums)

    def _not_in_effect(self, received: Sequence[Received]) -> str | None:
        """Return an error message if a layer does not compute with the weights that arrived.

        A tensor that could be read back once can always be read back, unless a layer computes with another one.
        """
        read_back = frozenset.intersection(*(worker.read_back for worker in received))
        lost = sorted((self._readable or read_back) - read_back)
        self._readable = self._readable or read_back
        if not lost:
            return None
        shown = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
        return f"weights arrived, but vLLM still computes with other ones ({len(lost)} tensors): {shown}"

    def _sleep(self) -> None:
        """Put vLLM to sleep at level 2, which drops the weights instead of copying them to the host.

        New weights are loaded after waking up anyway.
        """
        if not self._asleep:
            self._engine.sleep(level=2, mode="keep")
            self._asleep = {"weights", "cache"}
        self._has_weights = False

    def _wake(self, part: Part) -> None:
        if part in self._asleep:
            self._engine.wake_up(tags=[TAGS[part]])
            self._asleep.remove(part)

    def _shut_down(self) -> None:
        """Fail the callers that still wait, and shut vLLM down."""
        for waiter in self._everyone():
            self._answers.give(waiter, EngineError(CLOSED))
        self._answers.send()
        # vLLM also destroys torch's default process group here, so a trainer in this process must be closed first.
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()


def what_is_wrong(received: Sequence[Received]) -> str | None:
    """Return why the workers of an engine did not all receive the same complete weights; None if they did."""
    for worker in received:
        if worker.cut_short:
            return worker.cut_short
    missing = sorted({name for worker in received for name in worker.missing})
    if missing:
        return f"no weights came for {', '.join(missing)}"
    if any(worker.checksums != received[0].checksums for worker in received):
        return "the workers of this engine received different weights"
    return None
