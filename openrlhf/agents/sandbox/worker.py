"""Main program of a worker process: runs user code on one event loop and talks to the trainer over a pipe.

It loads the user's file, then answers calls: rewards of a group, or episodes, which send requests to the engine. It
reports which call is running at every moment, so that the trainer can charge time and crashes to the right call.
"""

from __future__ import annotations

import asyncio
import collections.abc
import importlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.agents.engine_proxy import EngineProxy, Engines, current, set_seed
from openrlhf.agents.interface import AgentExecutorBase, params_for_agent
from openrlhf.agents.loading import (
    RewardCall,
    find_agent,
    find_reward,
    load_module,
    make,
    required_by,
    takes_keyword,
)
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor, settled
from openrlhf.agents.older import OlderExecutor
from openrlhf.agents.sandbox.lifeline import die_with, end_group
from openrlhf.agents.sandbox.messages import HEADER, Spec, pack_reply, plain, unpack_call
from openrlhf.agents.step_function import StepFunction
from openrlhf.errors import OpenRLHFError

# Keys of an episode's response that are sent to the trainer.
RESPONSE_KEYS = (
    *("observation_tokens", "action_ranges", "rollout_log_probs", "reward", "scores"),
    *("extra_logs", "truncated", "step_rewards"),
)


class Pipe:
    """The worker's end of the pipe: blocking reads for a reader thread, and writes from any thread."""

    def __init__(self, calls: socket.socket, replies: socket.socket) -> None:
        self.calls, self.replies = calls, replies
        self.writing = threading.Lock()

    def send(self, *message: Any) -> None:
        with self.writing:
            self.replies.sendall(pack_reply(list(message)))

    def receive(self) -> Any:
        """Return the next message; raise EOFError if the trainer has gone."""
        (length,) = HEADER.unpack(self._read(HEADER.size))
        return unpack_call(self._read(length))

    def _read(self, length: int) -> bytes:
        """Read exactly `length` bytes, at most 1 MiB at a time."""
        data = bytearray()
        while len(data) < length:
            piece = self.calls.recv(min(length - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class Watched(collections.abc.Coroutine[Any, Any, Any]):
    """Wrapper of a coroutine that reports to the trainer whenever it starts and stops running."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], call: int, pipe: Pipe) -> None:
        self.coroutine, self.call, self.pipe = coroutine, call, pipe

    @contextmanager
    def _on_processor(self) -> Iterator[None]:
        self.pipe.send("on", self.call)
        try:
            yield
        finally:
            self.pipe.send("off", self.call)

    def send(self, value: Any) -> Any:
        with self._on_processor():
            return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with self._on_processor():
            return self.coroutine.throw(*error)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Any:
        return self.coroutine.__await__()


class Worker:
    """The user's file, loaded, and the calls that its reward function or executor is answering."""

    def __init__(self, spec: Spec, pipe: Pipe) -> None:
        self.spec, self.pipe = spec, pipe
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.engines: Engines
        self.reward: RewardCall | None = None
        self.executor: AgentExecutorBase | None = None

    async def serve(self) -> None:
        """Load the file, report "ready" or "broken", and handle messages until the trainer ends the process."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        self.engines = Engines(self.pipe.send, self.spec.max_length)
        _, trouble = await self._try(self._load())
        if trouble is not None:
            self.pipe.send("broken", trouble)
            return
        self.pipe.send("ready")
        threading.Thread(target=listen, args=(self.pipe, loop, self._hear), daemon=True).start()
        await loop.create_future()  # never completes: the trainer kills the process

    async def _load(self) -> None:
        """Load the reward function, or build and prepare the executor."""
        module = load_module(self.spec.file)
        if self.spec.kind == "reward":
            self.reward = find_reward(module, self.spec.file)
            return
        build = executor_of(module, self.spec.file)
        self.engines.tokenizer = load_tokenizer(self.spec)
        executor = self._older(build) if required_by(build) else await make(build)
        executor.max_turns, executor.template = self.spec.max_turns, self.spec.template
        executor.scored_later = self.spec.scored_later
        await executor.prepare()
        self.executor = executor

    def _older(self, kind: Any) -> OlderExecutor:
        """Wrap an executor class of the older form, whose constructor requires arguments."""
        engine, tokenizer = EngineProxy(self.engines), self.engines.tokenizer
        return OlderExecutor(kind, max_length=self.spec.max_length, llm_engine=engine, hf_tokenizer=tokenizer)

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Task factory that watches every task that a call starts, directly or indirectly."""
        call = current.get()
        watched = coroutine if call is None else Watched(coroutine, call, self.pipe)
        return asyncio.Task(watched, loop=loop, **options)

    def _hear(self, kind: str, call: int, *rest: Any) -> None:
        """Handle a message from the trainer: a call, a cancellation, or a completion of the engine."""
        if kind == "call":
            token = current.set(call)
            task = asyncio.get_running_loop().create_task(self._answer(call, *rest))
            current.reset(token)
            self.tasks[call] = task
            task.add_done_callback(lambda _: self.tasks.pop(call))
        elif kind == "cancel" and call in self.tasks:
            self.tasks[call].cancel()
        elif kind == "completion":
            self.engines.hear(call, *rest)

    async def _answer(self, call: int, body: dict[str, Any]) -> None:
        """Run one call and send its result or error."""
        result, trouble = await self._try(self._score(body) if self.reward else self._episode(call, body))
        if trouble is None:
            self.pipe.send("result", call, result)
        else:
            self.pipe.send("error", call, trouble)

    async def _try(self, work: Coroutine[Any, Any, Any]) -> tuple[Any, dict[str, str] | None]:
        """Return the result of user code, or a description of its exception; even SystemExit is reported."""
        try:
            return await work, None
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            return None, explain(error, self.spec.file)

    async def _score(self, body: dict[str, Any]) -> Any:
        assert self.reward is not None
        set_seed(body["seed"])
        return plain(await settled(self.reward(body["queries"], body["prompts"], body["labels"])))

    async def _episode(self, call: int, body: dict[str, Any]) -> Any:
        """Run one episode; return its response reduced to RESPONSE_KEYS, or as it is if it is not a dict."""
        assert self.executor is not None
        seed = body["params"].seed
        engine = self.engines.open(call, seed, body["prompt"])
        set_seed(seed)
        more: dict[str, Any] = {"images": None} if takes_keyword(self.executor.execute, "images") else {}
        try:
            response = await settled(
                self.executor.execute(
                    prompt=body["prompt"],
                    label=body["label"],
                    sampling_params=params_for_agent(body["params"]),
                    max_length=self.spec.max_length,
                    hf_tokenizer=self.engines.tokenizer,
                    llm_engine=engine,
                    **more,
                )
            )
        finally:
            self.engines.close(call)
        if not isinstance(response, collections.abc.Mapping):
            return plain(response)
        return {key: plain(response[key]) for key in RESPONSE_KEYS if key in response}


def executor_of(module: ModuleType, file: str) -> Callable[[], AgentExecutorBase]:
    """Return a constructor for the executor that the file defines or needs."""
    offered = find_agent(module, file)
    if offered == "run_agent":
        from openrlhf.agents.chat.openai_agent import executor_around  # takes half of the process's start-up time

        return lambda: executor_around(vars(module)["run_agent"])
    if offered == "step":
        return lambda: MultiTurnAgentExecutor(lambda: StepFunction(file))
    return offered


def load_tokenizer(spec: Spec) -> Any:
    """Load the tokenizer that the trainer saved, with the class that the trainer named."""
    module, name = spec.tokenizer_class
    kind = getattr(importlib.import_module(module), name)
    return kind.from_pretrained(spec.tokenizer_folder, trust_remote_code=spec.trust_remote_code)


def explain(error: BaseException, file: str) -> dict[str, str]:
    """Describe an exception: its kind, a text with the line in the user's file, and the whole traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(file).name] or frames
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    full = "".join(traceback.format_exception(error))
    if isinstance(error, OpenRLHFError):
        return {"kind": type(error).__name__, "text": str(error), "traceback": full}
    if isinstance(error, SystemExit):
        return {"kind": "raised", "text": f"called sys.exit({error.code!r}){where}", "traceback": full}
    return {"kind": "raised", "text": f"raised {type(error).__name__}: {error}{where}", "traceback": full}


def listen(pipe: Pipe, loop: asyncio.AbstractEventLoop, hear: Callable[..., None]) -> None:
    """Pass messages to the event loop; if the trainer has gone, kill this process group."""
    try:
        while True:
            loop.call_soon_threadsafe(hear, *pipe.receive())
    except (EOFError, OSError):
        end_group()


def main(calls: int, replies: int, parent: int) -> None:
    """Run the worker on two socket descriptors; `parent` is the trainer's process id."""
    die_with(parent)
    for descriptor in (calls, replies):
        os.set_inheritable(descriptor, False)
    pipe = Pipe(socket.socket(fileno=calls), socket.socket(fileno=replies))
    asyncio.run(Worker(pipe.receive(), pipe).serve())
