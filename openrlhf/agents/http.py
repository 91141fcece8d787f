"""Client for reward servers: sends each group of samples as one POST, round-robin over the servers.

Requests run in daemon threads with urllib. A server that does not answer, or answers with a 5xx status, is retried with
growing pauses; other errors are raised immediately.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.executor import clip, shorten
from openrlhf.agents.scores import Group, Scored, read_scores
from openrlhf.errors import RewardError

TRIES = 5
FIRST_PAUSE = 0.5  # seconds before the second try; doubles with each further try
CONCURRENT_REQUESTS = 32


class Unavailable(Exception):
    """A temporary failure of a server; a retry may succeed."""


@dataclass(frozen=True)
class Server:
    """Address of a reward server with its timeout (seconds) and retry pauses."""

    url: str
    timeout: float
    first_pause: float = FIRST_PAUSE
    api_key: str | None = None

    async def ask(self, body: dict[str, Any]) -> Any:
        """POST `body` and return the decoded answer; raise RewardError after TRIES temporary failures."""
        data = self._encode(body)
        trouble = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self.first_pause * 2 ** (attempt - 1))
            try:
                return self._decode(await self._answer(data))
            except Unavailable as error:
                trouble = str(error)
        raise RewardError(f"reward server {self.url} failed {TRIES} times, the last time with: {trouble}")

    async def _answer(self, data: bytes) -> bytes:
        """Send one request from a thread; raise Unavailable if it takes longer than the timeout."""
        answer = asyncio.wrap_future(in_daemon_thread(lambda: self._post(data)))
        # Not asyncio.timeout: if generation blocked the loop, that would cancel an answer that has already arrived.
        await asyncio.wait({answer}, timeout=self.timeout)
        if not answer.done():
            answer.cancel()
            raise Unavailable(f"no answer within {self.timeout:g} s (--reward_timeout)")
        return answer.result()

    def _post(self, data: bytes) -> bytes:
        """Send one request; raise Unavailable for connection errors and 5xx, RewardError for other error statuses."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(200).decode(errors="replace")
            if error.code < 500:
                raise RewardError(f"reward server {self.url} refused the request: {error.code} {said}") from None
            raise Unavailable(f"status {error.code} {said}") from None
        except (OSError, http.client.HTTPException) as error:  # connection refused, reset, closed early or timed out
            raise Unavailable(f"{type(error).__name__}: {error}") from None

    def _encode(self, body: dict[str, Any]) -> bytes:
        try:
            return json.dumps(body).encode()
        except TypeError as error:
            raise RewardError(f"a label cannot be sent to reward server {self.url} as JSON: {error}") from None

    def _decode(self, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except ValueError:
            said = shorten(answer.decode(errors="replace"))
            raise RewardError(f"reward server {self.url} answered with something that is not JSON: {said}") from None


class ServerRewards:
    """Scorer that sends groups to the servers round-robin."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        first_pause: float = FIRST_PAUSE,
        api_key: str | None = None,
    ) -> None:
        self.servers = itertools.cycle([Server(url, timeout, first_pause, api_key) for url in urls])
        self.gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def score(self, group: Group) -> list[Scored | RewardError]:
        """Score a group at the next server; if that fails, every sample gets the error."""
        server = next(self.servers)
        try:
            async with self._gate():
                answer = await server.ask(request_body(group))
            if not isinstance(answer, dict):
                raise RewardError(f"reward server {server.url} answered {clip(repr(answer))}, not a JSON object")
            return read_scores(answer, group, f"reward server {server.url}")
        except RewardError as error:
            return [error] * len(group.queries)

    def _gate(self) -> asyncio.Semaphore:
        """Return the limit on concurrent requests; a semaphore works on one event loop only."""
        loop = asyncio.get_running_loop()
        if self.gate is None or self.gate[0] is not loop:
            self.gate = loop, asyncio.Semaphore(CONCURRENT_REQUESTS)
        return self.gate[1]

    async def close(self) -> None:
        """Do nothing: no connection stays open between requests."""


def request_body(group: Group) -> dict[str, Any]:
    """Return the JSON body of a group, with one entry per sample in each list."""
    count = len(group.queries)
    return {
        "query": list(group.queries),
        "prompts": [group.prompt.text] * count,
        "labels": [group.prompt.label] * count,
    }


def in_daemon_thread(work: Callable[[], bytes]) -> Future[bytes]:
    """Run `work` in a daemon thread, so that a server that never answers does not block the program's exit."""
    answer: Future[bytes] = Future()
    answer.set_running_or_notify_cancel()  # a caller that times out cannot cancel the future under the thread

    def run() -> None:
        try:
            answer.set_result(work())
        except (Unavailable, RewardError) as error:
            answer.set_exception(error)
        finally:
            if not answer.done():
                answer.set_exception(sys.exception())

    threading.Thread(target=run, daemon=True, name="openrlhf-reward-server").start()
    return answer
