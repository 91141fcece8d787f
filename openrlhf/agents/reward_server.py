"""Client for a reward server: sends a group of samples as one POST and returns the decoded answer.

Requests run in daemon threads with urllib. A server that does not answer, or answers with a 5xx status, is retried with
growing pauses; other errors are raised immediately. `rewards.ServerRewards` uses it for the servers of --remote_rm_url,
`SingleTurnAgentExecutor` for a server that an agent file names.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass

from openrlhf.agents.executor import shorten
from openrlhf.errors import RewardError

TRIES = 5
FIRST_PAUSE = 0.5  # seconds before the second try; doubles with each further try


class Unavailable(Exception):
    """A temporary failure of a server; a retry may succeed."""


@dataclass(frozen=True)
class RewardServer:
    """A reward server at a URL."""

    url: str
    timeout: float  # seconds for one try
    first_pause: float = FIRST_PAUSE
    api_key: str | None = None  # sent as a bearer token

    async def score(self, queries: list[str], prompts: list[str], labels: list[object]) -> object:
        """POST one group and return the decoded answer; raise RewardError after TRIES temporary failures."""
        try:
            body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        except TypeError as error:
            raise RewardError(f"a label cannot be sent to reward server {self.url} as JSON: {error}") from None
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self.first_pause * 2 ** (attempt - 1))
            try:
                answer = await self._post_in_thread(body)
            except Unavailable as error:
                problem = str(error)
                continue
            try:
                return json.loads(answer)
            except ValueError:
                shown = shorten(answer.decode(errors="replace"))
                raise RewardError(
                    f"reward server {self.url} answered with something that is not JSON: {shown}"
                ) from None
        raise RewardError(f"reward server {self.url} failed {TRIES} times, the last time with: {problem}")

    async def _post_in_thread(self, body: bytes) -> bytes:
        """Send one request; raise Unavailable if it takes longer than the timeout.

        The thread is a daemon, so that a server that never answers does not block the program's exit.
        """
        result: Future[bytes] = Future()
        result.set_running_or_notify_cancel()  # a caller that times out cannot cancel the future under the thread

        def run() -> None:
            try:
                result.set_result(self._post(body))
            except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
                result.set_exception(error)

        threading.Thread(target=run, daemon=True, name="openrlhf-reward-server").start()
        answer = asyncio.wrap_future(result)
        # Not asyncio.timeout: if generation blocked the loop, that would cancel an answer that has already arrived.
        await asyncio.wait({answer}, timeout=self.timeout)
        if not answer.done():
            answer.cancel()
            raise Unavailable(f"no answer within {self.timeout:g} s (--reward_timeout)")
        return answer.result()

    def _post(self, body: bytes) -> bytes:
        """Send one request; raise Unavailable for connection errors and 5xx, RewardError for other error statuses."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                shown = error.read(200).decode(errors="replace")
            if error.code < 500:
                raise RewardError(f"reward server {self.url} refused the request: {error.code} {shown}") from None
            raise Unavailable(f"status {error.code} {shown}") from None
        except (OSError, http.client.HTTPException) as error:  # connection refused, reset, closed early or timed out
            raise Unavailable(f"{type(error).__name__}: {error}") from None
