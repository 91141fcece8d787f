"""Worker: runs user code on one event loop and exchanges messages with the trainer.

It loads the user's file or object, then answers calls: rewards of a group, or episodes, which send requests to the
engine. It reports which call is running at every moment, so that the trainer can attribute time and crashes to the
right call. `main` is the program of a worker process, which `process.WorkerProcess` starts; `thread.WorkerThread` runs
a worker in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import resource
import socket
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.agents.agent_files import agent_of_object, find_agent, required_arguments
from openrlhf.agents.engine_proxy import EngineProxy, RequestRouter, current_call, set_seed
from openrlhf.agents.interface import AgentExecutorBase, params_for_agent
from openrlhf.agents.legacy import LegacyExecutor
from openrlhf.agents.loading import (
    RewardFunction,
    adapt_reward,
    create_instance,
    find_reward,
    load_module,
    resolve,
    takes_keyword,
)
from openrlhf.agents.sandbox import messages
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.sandbox.parent_death import die_with, end_all
from openrlhf.errors import OpenRLHFError
from openrlhf.subprocesses import frame, read_frames

OPEN_FILES = 65_536  # requested limit; a much higher one slows down programs that close all descriptors one by one
# Keys of an episode's result that are sent to the trainer.
RESULT_KEYS = (
    *("observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores"),
    *("extra_logs", "truncated", "step_rewards"),
)


class ReportingCoroutine(Coroutine[object, object, object]):
    """Wrapper of a coroutine that reports to the trainer whenever it starts and stops running."""

    def __init__(
        self, coroutine: Coroutine[object, object, object], call: int, report: Callable[[messages.RunningCall], None]
    ) -> None:
        self.coroutine, self.call, self.report = coroutine, call, report

    def _resume(self, resume: Callable[..., object], *arguments: object) -> object:
        self.report(messages.RunningCall(self.call))
        try:
            return resume(*arguments)
        finally:
            self.report(messages.RunningCall(None))

    def send(self, value: object) -> object:
        return self._resume(self.coroutine.send, value)

    def throw(self, *error: object) -> object:
        return self._resume(self.coroutine.throw, *error)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[object, object, object]:
        return self.coroutine.__await__()


class Worker:
    """The loaded user code, and the calls that its reward function or executor is answering.

    `send` sends a message to the trainer, from any thread. Without `owns_process`, this process also trains, and its
    random state must not change.
    """

    spec: messages.WorkerSpec
    router: RequestRouter
    reward: RewardFunction  # set for a reward
    executor: AgentExecutorBase  # set for an agent
    max_calls: int | None = None  # concurrent calls of the reward function
    uses_threads = False  # True for a reward function that is not async but may run concurrently

    def __init__(self, send: Callable[[messages.ToTrainer], None], *, owns_process: bool) -> None:
        self.send, self.owns_process = send, owns_process
        self.tasks: dict[int, asyncio.Task[None]] = {}  # by call

    async def serve(self, received: AsyncIterator[messages.ToWorker]) -> None:
        """Handle the messages from the trainer until they end; return early if the user code cannot be loaded."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._create_task)  # reports which call runs on this event loop
        async for message in received:
            match message:
                case messages.WorkerSpec():
                    try:
                        await self._load(message)
                    except BaseException as error:  # noqa: BLE001 - user code may raise anything
                        self.send(describe_exception(None, error, message.file))
                        return
                    self.send(messages.FileLoaded(self.max_calls, self.uses_threads))
                case messages.StartCall():
                    token = current_call.set(message.call)
                    self.tasks[message.call] = loop.create_task(self._answer(message.call, message.input))
                    current_call.reset(token)
                case messages.CancelCall() if message.call in self.tasks:
                    self.tasks[message.call].cancel()
                case messages.EngineAnswer():
                    self.router.deliver(message)

    def _create_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Task factory that reports the running times of every task that a call starts, directly or indirectly."""
        call = current_call.get()
        tracked = coroutine if call is None else ReportingCoroutine(coroutine, call, self.send)
        return asyncio.Task(tracked, loop=loop, **options)

    async def _load(self, spec: messages.WorkerSpec) -> None:
        """Load the reward function, or build and prepare the executor."""
        self.spec = spec
        if spec.kind == "reward":
            self.reward = (
                find_reward(load_module(spec.file), spec.file)
                if spec.code is None
                else adapt_reward(spec.code, spec.name)
            )
            self.max_calls = spec.concurrency or (messages.ASYNC_CALLS if self.reward.is_async else 1)
            self.uses_threads = self.max_calls > 1 and not self.reward.is_async
            return
        build = find_agent(load_module(spec.file), spec.file) if spec.code is None else agent_of_object(spec.code)
        class_module, class_name = spec.tokenizer_class
        tokenizer_class = getattr(importlib.import_module(class_module), class_name)
        with tempfile.TemporaryDirectory(prefix="openrlhf-tokenizer-") as folder:
            for name, content in spec.tokenizer_files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            tokenizer = tokenizer_class.from_pretrained(folder, trust_remote_code=spec.trust_remote_code)
        self.router = RequestRouter(self.send, spec.max_length, tokenizer, seeds_torch=self.owns_process)
        if required_arguments(build):
            engine = EngineProxy(self.router)
            build = partial(LegacyExecutor, build, spec.max_length, engine, tokenizer)
        executor = await create_instance(build)
        executor.max_turns, executor.template = spec.max_turns, spec.template
        executor.scored_later = spec.scored_later
        await executor.prepare()
        self.executor = executor

    async def _answer(self, call: int, given: messages.RewardInput | messages.EpisodeInput) -> None:
        """Run one call and send its result or exception; even SystemExit is reported."""
        try:
            if isinstance(given, messages.RewardInput):
                set_seed(given.seed, seeds_torch=self.owns_process)
                compute = partial(self.reward.function, given.queries, given.prompts, given.labels)
                returned = await call_in_thread(compute) if self.uses_threads else compute()
                result = plain(await returned if inspect.isawaitable(returned) else returned)
            else:
                result = await self._run_episode(call, given)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            self.send(describe_exception(call, error, self.spec.file))
        else:
            self.send(messages.CallReturned(call, result))
        finally:
            self.tasks.pop(call, None)

    async def _run_episode(self, call: int, given: messages.EpisodeInput) -> messages.Json:
        """Run one episode; return the RESULT_KEYS of the returned dicts, or any other result unchanged."""
        engine = self.router.open(call, given.params.seed, given.prompt)
        set_seed(given.params.seed, seeds_torch=self.owns_process)
        more: dict[str, Any] = {"images": None} if takes_keyword(self.executor.execute, "images") else {}
        try:
            result = await resolve(
                self.executor.execute(
                    prompt=given.prompt,
                    label=given.label,
                    sampling_params=params_for_agent(given.params),
                    max_length=self.spec.max_length,
                    hf_tokenizer=self.router.tokenizer,
                    llm_engine=engine,
                    **more,
                )
            )
        finally:
            self.router.close(call)
        if isinstance(result, (list, tuple)) and all(isinstance(item, Mapping) for item in result):
            return [select_keys(item) for item in result]
        return select_keys(result) if isinstance(result, Mapping) else plain(result)


def select_keys(result: Mapping[str, object]) -> dict[str, messages.Json]:
    """Return the part of an episode's result that the trainer reads."""
    return {key: plain(result[key]) for key in RESULT_KEYS if key in result}


async def call_in_thread(function: Callable[[], object]) -> object:
    """Call a function in a new thread, which does not keep the process from exiting if it hangs."""
    outcome: Future[tuple[object, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()  # the thread may set the outcome even after the caller was cancelled

    def call() -> None:
        try:
            outcome.set_result((function(), None))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything; a future rejects StopIteration
            outcome.set_result((None, error))

    threading.Thread(target=call, daemon=True, name="openrlhf-reward").start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return result


def describe_exception(call: int | None, error: BaseException, file: str) -> messages.CallRaised:
    """Describe an exception with the line in the user's file and the full traceback."""
    whole = "".join(traceback.format_exception(error))
    if isinstance(error, OpenRLHFError):
        return messages.CallRaised(call, str(error), whole, type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(file).name] or frames
    line = f" at {describe_place(own[-1])}" if own else ""
    is_exit = isinstance(error, SystemExit)
    what = f"called sys.exit({error.code!r})" if is_exit else f"raised {type(error).__name__}: {error}"
    return messages.CallRaised(call, what + line, whole, "")


def describe_place(frame: traceback.FrameSummary) -> str:
    """Return file and line; only the line in a notebook, whose cells have generated file names."""
    if "ipykernel_" in frame.filename or "<ipython-input" in frame.filename:
        return f"line {frame.lineno} of its notebook cell"
    return f"{frame.filename}:{frame.lineno}"


def main(calls: int, replies: int, parent: int) -> None:
    """Run a worker on two socket descriptors until the trainer is gone; `parent` is the trainer's process id."""
    die_with(parent)
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1,024, too few for the connections of agents
    allowed = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    if 0 <= few < allowed:
        with suppress(ValueError, OSError):  # macOS limits it further
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    for descriptor in (calls, replies):
        os.set_inheritable(descriptor, False)
    answers, writing = socket.socket(fileno=replies), threading.Lock()  # user threads may send requests to the engine

    def send(message: messages.ToTrainer) -> None:
        """Send a message; block until it is sent, because user code may end the process next."""
        data = frame(messages.to_json(message))
        with writing:
            answers.sendall(data)

    worker = Worker(send, owns_process=True)
    with asyncio.Runner() as runner:
        # Without the writer, the socket closes.
        reader, _writer = runner.run(asyncio.open_unix_connection(sock=socket.socket(fileno=calls)))
        runner.run(worker.serve(pickle.loads(data) async for data in read_frames(reader)))
        end_all()
