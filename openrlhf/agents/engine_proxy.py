"""The `llm_engine` object that agent files use, and the assignment of its requests to episodes.

Each episode has its own proxy, because the trainer counts, seeds and replays requests per episode. However, an executor
may keep the first proxy it gets, in an attribute or in a server with its own thread, and use it for all later episodes.
Such a request is assigned to the episode whose code makes it. In a server's thread, that episode is unknown, so the
request is matched by its tokens: it continues the episode whose tokens it starts with, or it is the first request of an
episode. Episodes of the same prompt are interchangeable until their first request, so any of them may be chosen.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrlhf.agents.interface import RequestOutput, params_for_engine, seed_for
from openrlhf.agents.sandbox.messages import EngineAnswer, EngineRequest
from openrlhf.errors import RolloutError
from openrlhf.monitor import say
from openrlhf.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

current_call: ContextVar[int | None] = ContextVar("current_call", default=None)  # the call whose code is running


class EpisodeOver(Exception):
    """The episode has ended before the engine answered its request."""


@dataclass(eq=False)
class EpisodeRequests:
    """The requests of one episode to the engine."""

    call: int
    seed: int
    prompt: str
    count: int = 0  # requests so far, and the number of the next one
    pending: dict[int, asyncio.Future[Completion]] = field(default_factory=dict)  # unanswered requests, by number
    tokens: list[int] = field(default_factory=list)  # the last request and its answer


@dataclass(eq=False)
class RequestRouter:
    """Router that sends the requests of all running episodes in this process to the trainer and returns the answers."""

    send: Callable[[EngineRequest], None]
    max_length: int
    tokenizer: PreTrainedTokenizerBase
    seeds_torch: bool = True
    running: dict[int, EpisodeRequests] = field(default_factory=dict)  # by call number
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    has_guessed: bool = False  # True after a request was matched by its tokens, which is reported once

    def open(self, call: int, seed: int, prompt: str) -> EngineProxy:
        """Register an episode and return its proxy."""
        self.running[call] = EpisodeRequests(call, seed, prompt)
        return EngineProxy(self, call, seed)

    def close(self, call: int) -> None:
        """Remove an episode; its pending requests raise EpisodeOver."""
        for answer in self.running.pop(call).pending.values():
            if not answer.done():
                answer.set_exception(EpisodeOver())

    def deliver(self, message: EngineAnswer) -> None:
        """Deliver the engine's answer to a request, unless its episode has ended."""
        if message.call in self.running:
            answer = self.running[message.call].pending.pop(message.request, None)
            if answer is not None and not answer.done():
                answer.set_result(message.completion)

    async def generate(
        self, kept: int | None, caller: int | None, ids: list[int], sampling_params: object
    ) -> RequestOutput:
        """Send a request on behalf of its episode, and wait for the engine's answer.

        `kept` is the call that the proxy was made for, and `caller` the call whose code makes the request, if known. An
        episode that was matched by tokens may end before the answer arrives; the request is then matched again.
        """
        limit = self.max_length - len(ids)
        if not ids or limit <= 0:
            raise RolloutError(
                f"invalid prompt length: expected 1 to {self.max_length - 1} tokens (max_length - 1), got {len(ids)}"
            )
        while True:
            own = None if caller is None else self.running.get(caller)
            episode = own or self._guess_episode(kept, ids)
            number, episode.count = episode.count, episode.count + 1
            params = params_for_engine(sampling_params, limit=limit, seed=seed_for(episode.seed, number))
            episode.pending[number] = answer = asyncio.get_running_loop().create_future()
            self.send(EngineRequest(episode.call, number, ids, vars(params)))
            try:
                completion = await answer
            except EpisodeOver:
                if own is not None:
                    raise RolloutError("the episode ended before its request was answered") from None
                continue
            episode.tokens = [*ids, *completion.token_ids.tolist()]
            next_seed = seed_for(episode.seed, number + 1)
            set_seed(next_seed, seeds_torch=self.seeds_torch)  # seeds user code until the next request
            return RequestOutput.from_completion(ids, completion)

    def _guess_episode(self, kept: int | None, ids: list[int]) -> EpisodeRequests:
        """Choose the episode of a request by its tokens; prefer `kept` if several match."""
        episodes = list(self.running.values())
        if not episodes:
            raise RolloutError("llm_engine was called while no episode was running: call it only within execute")
        # In order of preference: the longest continued conversation, a new episode with this prompt, an idle episode.
        continued = [item for item in episodes if item.tokens and item.tokens == ids[: len(item.tokens)]]
        unused = [item for item in episodes if item.count == 0]
        idle = [item for item in episodes if not item.pending]
        if continued:
            found = max(continued, key=lambda item: (len(item.tokens), not item.pending, item.call == kept))
        elif unused:
            text = str(self.tokenizer.decode(ids))
            found = max(unused, key=lambda item: (item.prompt in text, item.call == kept))
        else:
            found = max(idle or episodes, key=lambda item: item.call == kept)
        if found.call != kept and not self.has_guessed:
            self.has_guessed = True
            say("an agent uses the llm_engine of one episode in other episodes: requests are matched by their tokens")
        return found


@dataclass(frozen=True)
class EngineProxy:
    """The `llm_engine` of one episode."""

    router: RequestRouter
    call: int | None = None  # None: for a legacy executor, which gets its engine before any episode
    seed: int = 0  # seed of the episode

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: object, multi_modal_data: None = None
    ) -> RequestOutput:
        """Return the policy's continuation of these tokens, within the episode's token budget.

        This may be called from the event loop of another thread; the request then runs on the worker's loop.
        """
        router, caller = self.router, current_call.get()
        ids = [int(token) for token in prompt_token_ids]  # also converts tensors and arrays
        if asyncio.get_running_loop() is router.loop:
            caller = self.call if caller not in router.running else caller
            return await router.generate(self.call, caller, ids, sampling_params)
        work = router.generate(self.call, caller, ids, sampling_params)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, router.loop))


def set_seed(seed: int, *, seeds_torch: bool = True) -> None:
    """Seed the random generators, so that user code depends only on its sample, not on other calls in the process.

    In the trainer's process, PyTorch's generators belong to training and must not be seeded.
    """
    random.seed(seed)
    modules: dict[str, Any] = dict(sys.modules)  # numpy and torch are seeded only if user code has imported them
    if "numpy" in modules:
        modules["numpy"].random.seed(seed % 2**32)
    if seeds_torch and "torch" in modules:
        modules["torch"].manual_seed(seed)
