"""One call of user code: its input, its result or failure, and the engine's answers to its requests.

`Pool.call` creates a `Call`, which is retried in a new worker process if its process dies. A `Call` is used only on the
pool's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from openrlhf.agents.sandbox.messages import EpisodeInput, Json, RewardInput
from openrlhf.errors import OpenRLHFError
from openrlhf.event_loop import mark_retrieved
from openrlhf.types import Completion, Request, SamplingParams

Generate: TypeAlias = Callable[[Request], Coroutine[object, None, Completion]]
ErrorClass = TypeVar("ErrorClass", bound=OpenRLHFError)


class CallFailure(Exception):
    """Failure of a call: user code raised, timed out, or ended its process.

    `error_class` names the OpenRLHFError that was raised, if any; `text` is then a complete message. Otherwise `text`
    is the rest of a sentence about the user's code, such as "raised ValueError: ...".
    """

    def __init__(self, text: str, traceback: str = "", error_class: str = "", *, given_up: bool = False) -> None:
        super().__init__(text)
        self.text, self.traceback, self.error_class = text, traceback, error_class
        self.given_up = given_up  # the caller was cancelled, so the other calls of the process are not blamed

    def to_error(self, kind: type[ErrorClass], text: str) -> ErrorClass:
        """Return an error of this class with the worker's traceback as a note."""
        error = kind(text)
        if self.traceback:
            error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class CallResult:
    """The result of user code, and the completions that the engine generated for it, in request order."""

    result: Json
    completions: tuple[Completion, ...]
    params: tuple[SamplingParams, ...]  # one per completion


@dataclass(eq=False)
class Call:
    """One call of user code over all its attempts.

    The engine's answers are kept, so that a retried episode gets the same completions for the same requests.
    """

    number: int
    input: RewardInput | EpisodeInput
    generate: Generate  # sends a request to the engine; must run on `home`
    home: asyncio.AbstractEventLoop  # the caller's event loop
    retries: int
    answer: asyncio.Future[Json]
    failures: int = 0  # crashes and timeouts that this call caused
    unexplained: int = 0  # crashes of its process with unknown cause
    alone: bool = False  # True after the call crashed a process: it is retried in a process without other calls
    expired: CallFailure | None = None  # set when the call exceeds its deadline
    engine_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # an episode makes one request at a time
    requests: dict[int, tuple[Request, asyncio.Future[Completion]]] = field(default_factory=dict)  # by number
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # tasks that wait for the engine

    def ask_engine(self, number: int, request: Request) -> asyncio.Future[Completion]:
        """Send request `number` to the engine, or return the earlier answer if a retry repeats the request."""
        before = self.requests.get(number)
        if before is None or before[0] != request:
            sent = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.generate(request), self.home))
            self.requests[number] = request, mark_retrieved(sent)
        return self.requests[number][1]
