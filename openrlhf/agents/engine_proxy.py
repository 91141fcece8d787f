"""The `llm_engine` object that agent files use, and the assignment of its requests to episodes.

Each episode has its own proxy, because the trainer counts, seeds and replays requests per episode. An executor may
nevertheless keep the first proxy it gets, in an attribute or in a server with its own thread, and use it for all later
episodes. Such a request is assigned to the episode whose code makes it. In a server's thread that is unknown, so the
tokens decide: a request continues the episode whose tokens it starts with, or starts an episode without requests.
Episodes of the same prompt are interchangeable until their first request, so any of them may be chosen.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from openrlhf.agents.interface import RequestOutput, output_of, params_for_engine, seed_for
from openrlhf.agents.sandbox.messages import plain
from openrlhf.errors import RolloutError
from openrlhf.monitor import say
from openrlhf.types import Completion

current: ContextVar[int | None] = ContextVar("current", default=None)  # number of the call whose code is running


class EpisodeOver(Exception):
    """The episode ended before the engine answered its request."""


class EpisodeRequests:
    """The requests of one episode to the engine: numbers them, seeds them, and holds the pending answers."""

    def __init__(self, call: int, seed: int, prompt: str, send: Callable[..., None]) -> None:
        self.call, self.seed, self.prompt, self.send = call, seed, prompt, send
        self.waiting: dict[int, asyncio.Future[Completion]] = {}
        self.asked = 0
        self.said: list[int] = []  # tokens of the last request followed by its answer

    async def ask(self, ids: list[int], sampling_params: Any, room: int) -> RequestOutput:
        """Send a request to the trainer and wait for its answer; then reseed the random generators for user code."""
        number, self.asked = self.asked, self.asked + 1
        params = params_for_engine(sampling_params, room=room, seed=seed_for(self.seed, number))
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        self.send("generate", self.call, number, ids, params)
        completion = await answer
        self.said = [*ids, *completion.token_ids]
        set_seed(seed_for(self.seed, number + 1))
        return output_of(ids, completion)


class Engines:
    """The running episodes of this process by call number."""

    def __init__(self, send: Callable[..., None], max_length: int) -> None:
        self.send, self.max_length = send, max_length
        self.running: dict[int, EpisodeRequests] = {}
        self.tokenizer: Any = None
        self.loop = asyncio.get_running_loop()
        self.guessed = False

    def open(self, call: int, seed: int, prompt: str) -> EngineProxy:
        """Register an episode and return its proxy."""
        self.running[call] = EpisodeRequests(call, seed, prompt, self.send)
        return EngineProxy(self, call, seed)

    def close(self, call: int) -> None:
        """Remove an episode; its pending requests raise EpisodeOver."""
        for answer in self.running.pop(call).waiting.values():
            if not answer.done():
                answer.set_exception(EpisodeOver())

    def hear(self, call: int, number: int, completion: Completion) -> None:
        """Deliver the engine's answer to request `number` of an episode, unless the episode has ended."""
        if call in self.running:
            answer = self.running[call].waiting.pop(number)
            if not answer.done():
                answer.set_result(completion)

    async def generate(
        self, kept: int | None, inside: int | None, ids: list[int], sampling_params: Any
    ) -> RequestOutput:
        """Send a request on behalf of the episode it belongs to.

        `kept` is the call that the proxy was made for, `inside` the call whose code makes the request, if known. An
        episode that was only guessed may end before the answer arrives; then the request is assigned again.
        """
        room = self.max_length - len(ids)
        if not ids or room <= 0:
            raise RolloutError(f"generate was asked to continue {len(ids)} tokens, and max_length is {self.max_length}")
        while True:
            own = None if inside is None else self.running.get(inside)
            try:
                return await (own or self.guess(kept, ids)).ask(ids, sampling_params, room)
            except EpisodeOver:
                if own is not None:
                    raise RolloutError("the episode ended before its request was answered") from None

    def guess(self, kept: int | None, ids: list[int]) -> EpisodeRequests:
        """Choose the episode of a request of unknown origin by its tokens; prefer `kept` among equals."""
        episodes = list(self.running.values())
        if not episodes:
            raise RolloutError("llm_engine was asked while no episode runs: ask it within execute")

        def is_kept(episode: EpisodeRequests) -> bool:
            return episode.call == kept

        # In order of preference: the longest continued conversation, a new episode with this prompt, an idle episode.
        continued = [item for item in episodes if item.said and item.said == ids[: len(item.said)]]
        fresh = [item for item in episodes if item.asked == 0]
        idle = [item for item in episodes if not item.waiting]
        if continued:
            found = max(continued, key=lambda item: (len(item.said), not item.waiting, is_kept(item)))
        elif fresh:
            text = str(self.tokenizer.decode(ids))
            found = max(fresh, key=lambda item: (item.prompt in text, is_kept(item)))
        else:
            found = max(idle or episodes, key=is_kept)
        if found.call != kept and not self.guessed:
            self.guessed = True
            say("an agent keeps the llm_engine of one episode for others: its requests are told apart by their tokens")
        return found


class EngineProxy:
    """The `llm_engine` of one episode.

    Without a `call` it is the engine of an older executor, which is built with one before any episode runs.
    """

    def __init__(self, engines: Engines, call: int | None = None, seed: int = 0) -> None:
        self.engines, self.call, self.seed = engines, call, seed

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: None = None
    ) -> RequestOutput:
        """Return the policy's continuation of these tokens, within the episode's token budget.

        May be called from another thread's event loop; the request then runs on the worker's own loop.
        """
        engines, inside = self.engines, current.get()
        ids = [int(token) for token in plain(prompt_token_ids)]
        if asyncio.get_running_loop() is engines.loop:
            inside = self.call if inside not in engines.running else inside
            return await engines.generate(self.call, inside, ids, sampling_params)
        work = engines.generate(self.call, inside, ids, sampling_params)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, engines.loop))


def set_seed(seed: int) -> None:
    """Seed the random generators, so that user code depends on its sample and not on other calls in the process."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
