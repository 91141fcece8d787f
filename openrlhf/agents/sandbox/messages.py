"""Messages between the trainer and a worker process, and their format on the pipe.

    trainer -> worker   WorkerSpec, then StartCall, CancelCall and EngineAnswer
    worker -> trainer   FileLoaded, then RunningCall, EngineRequest, CallReturned and CallRaised

Messages to a worker are pickled, because a label may be any object from a dataset. Messages to the trainer are JSON,
[class name, fields], so the trainer never unpickles objects that user code made. Each message is one frame
(`openrlhf.subprocesses`). `process.WorkerProcess` and `worker.main` are the two ends. Between a thread and the trainer,
messages are passed as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from openrlhf.config.in_memory import object_name
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.types import Completion, SamplingParams

ASYNC_CALLS = 64  # default number of concurrent calls of an async reward function in a worker
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True)
class WorkerSpec:
    """First message to a worker: the user's file to load, or the object to call, and the settings of its episodes."""

    file: str  # for an object, the file that defines it
    kind: Literal["reward", "agent"]
    max_length: int = 0  # maximum tokens of an episode, including the prompt
    max_turns: int | None = None
    scored_later: bool = False  # reward models score episodes that return no reward
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)  # by name
    tokenizer_class: tuple[str, str] = ("transformers", "AutoTokenizer")  # module and name
    trust_remote_code: bool = False
    template: TemplateFlags = field(default_factory=TemplateFlags)
    code: Any = None  # a reward function or agent that a Python caller passed; it runs in a thread
    concurrency: int | None = None  # concurrent calls of the reward function; None: ASYNC_CALLS if it is async, else 1

    @property
    def name(self) -> str:
        """Name of the user's code in messages."""
        what = "reward_func" if self.kind == "reward" else "the agent"
        return f"{what} in {self.file}" if self.code is None else f"{self.kind}={object_name(self.code)}"


@dataclass(frozen=True)
class RewardInput:
    """Arguments of a reward function: one entry per sample in each list."""

    queries: list[str]  # prompt and response
    prompts: list[str]
    labels: list[object]
    seed: int


@dataclass(frozen=True)
class EpisodeInput:
    """The prompt of an episode, and the run's sampling parameters with the seed of this sample."""

    prompt: str
    label: object
    params: SamplingParams


@dataclass(frozen=True)
class StartCall:
    """Run the user's code once; `call` identifies the call in all further messages."""

    call: int
    input: RewardInput | EpisodeInput


@dataclass(frozen=True)
class CancelCall:
    """Cancel a call that exceeded its deadline."""

    call: int


@dataclass(frozen=True)
class EngineAnswer:
    """The engine's answer to a request, identified by its number."""

    call: int
    request: int
    completion: Completion


@dataclass(frozen=True)
class FileLoaded:
    """The user's file has been loaded; the worker now accepts calls."""

    max_calls: int | None  # concurrent calls; None: no limit
    uses_threads: bool  # each call has its own thread, so the running call is not reported


@dataclass(frozen=True)
class RunningCall:
    """The call whose code is now running on the worker's event loop; None while the loop waits."""

    call: int | None


@dataclass(frozen=True)
class EngineRequest:
    """A request from an episode to the engine; the requests of an episode are numbered from 0."""

    call: int
    request: int
    token_ids: list[int]
    params: dict[str, Any]  # the fields of SamplingParams; JSON turns its tuples into lists


@dataclass(frozen=True)
class CallReturned:
    """The result of user code, converted by `plain`."""

    call: int
    result: Json


@dataclass(frozen=True)
class CallRaised:
    """An exception in user code; `call` is None if the file could not be loaded."""

    call: int | None
    text: str  # complete if `error_class` is set, else the rest of a sentence about the user's code
    traceback: str
    error_class: str  # name of an OpenRLHFError; empty for other exceptions


WORKER_MESSAGES = {
    message.__name__: message for message in (FileLoaded, RunningCall, EngineRequest, CallReturned, CallRaised)
}
ToTrainer: TypeAlias = FileLoaded | RunningCall | EngineRequest | CallReturned | CallRaised
ToWorker: TypeAlias = WorkerSpec | StartCall | CancelCall | EngineAnswer


def to_json(message: ToTrainer) -> bytes:
    return json.dumps([type(message).__name__, vars(message)]).encode()


def from_json(data: bytes) -> ToTrainer:
    kind, fields = json.loads(data)
    return WORKER_MESSAGES[kind](**fields)


def plain(value: object) -> Json:
    """Convert tensors, arrays and containers to numbers, lists and dicts that can be sent as JSON.

    Anything else becomes its repr, so that an error message can show it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    as_list = getattr(value, "tolist", None)  # tensors and arrays, recognised without importing torch
    return plain(as_list()) if callable(as_list) else repr(value)
