"""Client for a reward server: sends a group of samples as one POST and returns the decoded answer.

Requests run in daemon threads with urllib, so that generation in this process, which may block the event loop, does not
delay an answer. If a server does not answer, or answers 408, 429 or 5xx, the request is retried with growing pauses,
which are at least as long as its Retry-After header says; other errors are raised immediately. Redirects are not
followed, so that samples and key are sent only to the address that the user named. `rewards.ServerRewards` uses the
client for the servers of --remote_rm_url, `SingleTurnAgentExecutor` for a server that an agent file names.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from openrlhf.agents.executor import shorten
from openrlhf.config.urls import mask_urls
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.errors import RewardError
from openrlhf.event_loop import mark_retrieved

TRIES = 5
FIRST_PAUSE = 0.5  # seconds before the second try; doubles with each further try
LONGEST_PAUSE = 60.0  # seconds; upper bound for Retry-After
LARGEST_ANSWER = 1 << 26  # bytes
TEMPORARY = (408, 429)  # statuses below 500 after which a retry may succeed


class Unavailable(Exception):
    """A temporary failure of a server; a retry may succeed after `pause` seconds."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        super().__init__(problem)
        self.pause = pause


@dataclass(frozen=True)
class RewardServer:
    """A reward server; user:password@ in its URL is sent as basic authentication instead of the key."""

    url: str
    timeout: float  # seconds for one try
    first_pause: float = FIRST_PAUSE
    api_key: str | None = None  # sent as a bearer token

    @property
    def name(self) -> str:
        """Description for messages, without secrets in the URL."""
        return f"reward server {mask_urls(self.url)}"

    async def score(self, queries: list[str], prompts: list[str], labels: list[object]) -> object:
        """POST one group and return the decoded answer; raise RewardError after TRIES temporary failures."""
        try:
            body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(f"a label cannot be sent to {self.name} as JSON: {error}") from None
        failure = Unavailable("")
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(max(self.first_pause * 2 ** (attempt - 1), failure.pause))
            try:
                answer = await self._post_in_thread(body)
            except Unavailable as error:
                failure = error
                continue
            try:
                return parse_json(answer)
            except InvalidJSON as error:
                shown = shorten(answer.decode(errors="replace"))
                raise RewardError(f"the answer from {self.name} is not JSON: {shown} ({error})") from None
        raise RewardError(f"{self.name} failed {TRIES} times, the last time with: {failure}")

    async def _post_in_thread(self, body: bytes) -> bytes:
        """Send one request; raise Unavailable if it takes longer than the timeout, and end its connection.

        The thread is a daemon, so that a name server that never answers does not block the program's exit.
        """
        result: Future[bytes] = Future()
        result.set_running_or_notify_cancel()  # so that a caller that times out cannot cancel it while the thread runs
        connection = Connection()

        def run() -> None:
            try:
                result.set_result(self._post(body, connection))
            except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
                result.set_exception(error)
            finally:
                connection.end()

        threading.Thread(target=run, daemon=True, name="openrlhf-reward-server").start()
        answer = mark_retrieved(asyncio.wrap_future(result))  # no one awaits it if the caller is cancelled
        try:
            # Not asyncio.timeout: if generation blocked the loop, it would cancel an answer that has already arrived.
            await asyncio.wait({answer}, timeout=self.timeout)
        finally:
            connection.end()
        if not answer.done():
            answer.cancel()
            raise Unavailable(f"no answer within {self.timeout:g} s (--reward_timeout)")
        return answer.result()

    def _post(self, body: bytes, connection: Connection) -> bytes:
        """Send one request; raise Unavailable for connection errors and temporary statuses, RewardError for others."""
        try:
            with connection.opener().open(self._request(body), timeout=self.timeout) as response:
                answer: bytes = response.read(LARGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._failure(error) from None
        except (http.client.InvalidURL, ValueError):  # their messages contain the address or the key
            raise RewardError(
                f"{self.name} cannot be called: expected ASCII without spaces or control characters in address and key"
            ) from None
        except (OSError, http.client.HTTPException) as error:  # connection refused, reset, closed early or timed out
            raise Unavailable(f"{type(error).__name__}: {error}") from None
        if len(answer) > LARGEST_ANSWER:
            raise RewardError(f"the answer from {self.name} is too large: expected at most {LARGEST_ANSWER >> 20} MiB")
        return answer

    def _request(self, body: bytes) -> urllib.request.Request:
        """Build the request; raise RewardError for an address that cannot be used."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            parts = urlsplit(self.url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("expected http://HOST:PORT/PATH")
            _ = parts.port  # raises ValueError if the port is not a number
        except ValueError as error:
            raise RewardError(f"{self.name} has an invalid address: {error}") from None
        user, found, host = parts.netloc.rpartition("@")
        if found:
            headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        return urllib.request.Request(parts._replace(netloc=host).geturl(), body, headers)

    def _failure(self, error: urllib.error.HTTPError) -> Unavailable | RewardError:
        """Return the exception for a response that is not 2xx."""
        if error.code in (301, 302, 303, 307, 308):
            target = shorten(mask_urls(error.headers.get("Location", "")))
            return RewardError(
                f"{self.name} answered {error.code}, a redirect to {target}: redirects are not followed, because"
                " samples and key are sent only to the address you named",
                try_this="the final address",
            )
        try:
            shown = " ".join(error.read(200).decode(errors="replace").split())
        except (OSError, http.client.HTTPException):  # the status is known, but its explanation cannot be read
            shown = ""
        if error.code >= 500 or error.code in TEMPORARY:
            return Unavailable(f"status {error.code} {shown}", read_pause(error.headers.get("Retry-After")))
        return RewardError(f"{self.name} refused the request: {error.code} {shown}")


class Connection:
    """The connection of one request, which another thread can end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None  # a duplicate, because TLS takes over the original
        self.has_ended = False

    def opener(self) -> urllib.request.OpenerDirector:
        """Return an opener that connects through this object and has no handlers for redirects, files or FTP."""
        opener = urllib.request.OpenerDirector()
        handlers = (
            urllib.request.ProxyHandler(),
            PlainHandler(self),
            TLSHandler(self),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
        )
        for handler in handlers:
            opener.add_handler(handler)
        return opener

    def connect(self, *address: Any) -> socket.socket:
        """Connect like `socket.create_connection`; called by http.client."""
        made = socket.create_connection(*address)
        with self.lock:
            if self.has_ended:
                made.close()
                raise TimeoutError("connected too late")
            self.socket = made.dup()
        return made

    def end(self) -> None:
        """Shut the connection down, so that a thread that sends, reads or does a TLS handshake fails immediately."""
        with self.lock:
            self.has_ended = True
            if self.socket is not None:
                with suppress(OSError):  # the server has already closed it
                    self.socket.shutdown(socket.SHUT_RDWR)
                self.socket.close()
                self.socket = None


class Connecting(urllib.request.AbstractHTTPHandler):
    """Base class of handlers that connect through a `Connection`."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> http.client.HTTPResponse:
        def build(host: str, **more: Any) -> Any:
            made = http_class(host, **more)
            made._create_connection = self.connection.connect
            return made

        return super().do_open(build, req, **options)


class PlainHandler(Connecting, urllib.request.HTTPHandler):
    """HTTP through a `Connection`."""


class TLSHandler(Connecting, urllib.request.HTTPSHandler):
    """HTTPS through a `Connection`."""


def read_pause(header: str | None) -> float:
    """Return the seconds in a Retry-After header, at most LONGEST_PAUSE; 0 if it is missing or malformed."""
    if header is None:
        return 0.0
    try:
        seconds = float(header) if header.strip().isdecimal() else seconds_until(header)
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)


def seconds_until(date: str) -> float:
    """Return the seconds until an HTTP date; raise ValueError if the date is malformed."""
    then = parsedate_to_datetime(date)
    return (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
