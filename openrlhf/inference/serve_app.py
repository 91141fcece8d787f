"""HTTP API of the reward model server: POST /get_reward and GET /health.

Each request is checked, tokenised on a thread and scored by the shared `Batcher`. Rejected requests get a status code
and a reason.
"""

import asyncio
import hmac
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from openrlhf.inference.batcher import Batcher
from openrlhf.inference.served_model import RewardModel, Row
from openrlhf.monitor import say

MOST_QUERIES = 8192  # per request
MOST_WAITING = 65536  # queries of all requests in the queue for the model


@dataclass(frozen=True)
class Door:
    """Access rules of the server: API key and size limits."""

    api_key: str | None
    max_bytes: int
    refuse_long: bool = False  # reject texts longer than --max_len instead of truncating them

    def check_key(self, request: Request) -> None:
        """Reject a request without the server's API key; the comparison takes constant time."""
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {self.api_key}"
        if self.api_key and not hmac.compare_digest(given.encode(), wanted.encode()):
            what = "another key" if given else "no key"
            raise HTTPException(
                401,
                f"the request brought {what}: send Authorization: Bearer KEY with the server's --api_key"
                " (train_ppo: --reward_api_key, or OPENRLHF_RM_API_KEY)",
                {"WWW-Authenticate": "Bearer"},
            )

    async def read_body(self, request: Request) -> bytes:
        """Return the whole body.

        A body that is too large is read to its end without keeping it, so that the client gets to read the error.
        """
        kept = bytearray()
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= self.max_bytes:
                    kept += chunk
        except ClientDisconnect:  # the client cannot read this, but it keeps a traceback out of the log
            raise HTTPException(400, "the connection ended before the body did") from None
        if size > self.max_bytes:
            limit = self.max_bytes >> 20
            raise HTTPException(413, f"the body has {size} bytes, and --max_request_mb is {limit}: send fewer queries")
        return bytes(kept)


class Service:
    """Request handlers, with the tokenizer and the model behind them."""

    def __init__(self, model: RewardModel, batcher: Batcher, door: Door) -> None:
        self.model = model
        self.batcher = batcher
        self.door = door
        self.reader = ThreadPoolExecutor(1, "openrlhf-tokenizing")  # long texts must not block other responses
        self.has_cut = False

    async def get_reward(self, request: Request) -> dict[str, Any]:
        """Handle POST /get_reward: score all texts of the request."""
        self.door.check_key(request)
        texts = read_queries(await self.door.read_body(request))
        if self.batcher.num_waiting and self.batcher.num_waiting + len(texts) > MOST_WAITING:
            raise HTTPException(503, "too many queries wait already; ask again later", {"Retry-After": "1"})
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self.reader, self.model.read, texts)
        self._check_lengths(rows)
        rewards = await self.batcher.score([row[: self.model.max_len] for row in rows])
        for place, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise HTTPException(500, f"the model's score of query {place} is {reward}, not a finite number")
        extra_logs = {"dummy_scores": rewards, "truncated": self._truncated(rows)}
        return {"rewards": rewards, "scores": rewards, "extra_logs": extra_logs}

    def _check_lengths(self, rows: Sequence[Row]) -> None:
        """Reject empty rows and, with `refuse_long`, rows longer than the model's limit."""
        limit = self.model.max_len
        for place, row in enumerate(rows):
            if not len(row):
                raise HTTPException(422, f"query {place} has no tokens, so there is nothing to score")
            if self.door.refuse_long and len(row) > limit:
                raise HTTPException(413, f"query {place} has {len(row)} tokens, and --max_len is {limit}")

    def _truncated(self, rows: Sequence[Row]) -> list[float]:
        """Return 1.0 for each row that was truncated and 0.0 for the others; report the first truncation."""
        limit = self.model.max_len
        longest = max(len(row) for row in rows)
        if longest > limit and not self.has_cut:
            self.has_cut = True
            say(f"a query of {longest} tokens is cut to the first {limit} (--max_len); said once")
        return [float(len(row) > limit) for row in rows]

    async def health(self) -> dict[str, str]:
        return {"status": "ok"}


def read_queries(body: bytes) -> list[str]:
    """Parse the texts to score from a request body; other fields, such as prompts and labels, are ignored."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(asked, Mapping):
        raise HTTPException(422, f"the body is of type {type(asked).__name__}, not an object such as {EXAMPLE}")
    given = [name for name in ("query", "queries") if name in asked]
    if len(given) != 1:
        raise HTTPException(422, f"the body must have either query or queries, as in {EXAMPLE}")
    texts = [asked[given[0]]] if isinstance(asked[given[0]], str) else asked[given[0]]
    if not isinstance(texts, list) or not texts:
        raise HTTPException(422, f"{given[0]} must be a text or a list of texts, and not empty")
    if len(texts) > MOST_QUERIES:
        raise HTTPException(413, f"{len(texts)} queries in one request; {MOST_QUERIES} is the most, so split them")
    for place, text in enumerate(texts):
        check_text(text, place)
    return texts


EXAMPLE = '{"query": ["a text to score"]}'


def check_text(text: Any, place: int) -> None:
    """Reject a query that is not a string or cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise HTTPException(422, f"query {place} is of type {type(text).__name__}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise HTTPException(422, f"query {place} holds half of a surrogate pair, which is no text") from None


async def failed(request: Request, error: Exception) -> JSONResponse:
    """Tell the client about an unexpected error; its traceback goes to the server's log."""
    return JSONResponse({"detail": f"scoring failed: {type(error).__name__}: {error}"}, 500)


def build_app(model: RewardModel, batcher: Batcher, door: Door) -> FastAPI:
    """Create the FastAPI app; the batcher runs while the app does."""
    service = Service(model, batcher, door)

    @asynccontextmanager
    async def scoring(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield
        service.reader.shutdown(wait=False)

    app = FastAPI(lifespan=scoring, openapi_url=None)
    app.add_api_route("/get_reward", service.get_reward, methods=["POST"], response_model=None)
    app.add_api_route("/health", service.health, methods=["GET"], response_model=None)
    app.add_exception_handler(Exception, failed)
    return app
