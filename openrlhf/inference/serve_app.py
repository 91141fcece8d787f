"""HTTP API of the reward model server: POST /get_reward and GET /health.

Each request is checked, tokenised on a thread and scored by the shared `Batcher`. Rejected requests get a status code
and a reason.
"""

import asyncio
import hmac
import math
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from openrlhf.config.sections.inference import ServingFlags
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.inference.batcher import Batcher
from openrlhf.inference.served_model import ServedModel
from openrlhf.monitor import say

MAX_QUERIES = 8192  # per request
MAX_WAITING = 65536  # maximum number of unanswered queries, over all requests
MAX_DISCARDED = 4  # read up to this multiple of --max_request_mb, so that the client can read the error
CLOSE = {"Connection": "close"}
EXAMPLE = '{"query": ["a text to score"]}'


@dataclass
class RewardService:
    """Request handlers of the server, with its model and limits."""

    model: ServedModel
    batcher: Batcher
    reader: ThreadPoolExecutor  # tokenises here, because long texts must not block other responses
    api_key: str | None  # None or empty: anyone may send requests
    max_bytes: int  # maximum size of a request body
    refuse_long: bool  # reject texts longer than --max_len instead of truncating them
    has_truncated: bool = False
    num_waiting: int = 0  # queries that are not answered yet

    async def get_reward(self, request: Request) -> dict[str, object]:
        """Handle POST /get_reward: score all texts of the request."""
        self._check_key(request)
        try:
            texts = read_queries(await self._read_body(request))
            # Do not await between the check and the reservation, or other requests would pass the check too.
            if self.num_waiting and self.num_waiting + len(texts) > MAX_WAITING:
                raise HTTPException(503, "too many queries are waiting; try again later", {"Retry-After": "1"})
            self.num_waiting += len(texts)
            try:
                return await self._score(texts)
            finally:
                self.num_waiting -= len(texts)
        except asyncio.CancelledError:  # uvicorn cancels requests after --stop_timeout
            raise HTTPException(503, "the server is stopping", CLOSE) from None

    async def _score(self, texts: list[str]) -> dict[str, object]:
        """Tokenise and score texts; raise HTTPException if one of them cannot be scored."""
        rows = await asyncio.get_running_loop().run_in_executor(self.reader, self.model.tokenize, texts)
        limit = self.model.max_len
        for place, row in enumerate(rows):
            if not len(row):
                raise HTTPException(422, f"query {place} has no tokens, so there is nothing to score")
            if self.refuse_long and len(row) > limit:
                raise HTTPException(
                    413, f"query {place} is too long: expected at most {limit} tokens (--max_len), got {len(row)}"
                )
        rewards = await self.batcher.score([row[:limit] for row in rows])
        for place, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise HTTPException(500, f"the model's score of query {place} is {reward}: expected a finite number")
        longest = max(len(row) for row in rows)
        if longest > limit and not self.has_truncated:
            self.has_truncated = True
            say(f"truncated a query of {longest} tokens to the first {limit} (--max_len); this is reported only once")
        extra_logs = {"dummy_scores": rewards, "truncated": [float(len(row) > limit) for row in rows]}
        return {"rewards": rewards, "scores": rewards, "extra_logs": extra_logs}

    def _check_key(self, request: Request) -> None:
        """Reject a request without the server's API key; the comparison takes constant time."""
        given = request.headers.get("authorization", "")
        expected = f"Bearer {self.api_key}"
        if self.api_key and not hmac.compare_digest(given.encode(), expected.encode()):
            what = "a wrong key" if given else "no key"
            raise HTTPException(
                401,
                f"the request has {what}: send Authorization: Bearer KEY with the server's --api_key"
                " (train_ppo: --reward_api_key, or OPENRLHF_RM_API_KEY)",
                {"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, request: Request) -> bytes:
        """Return the whole body.

        A client that is still sending cannot read an error, so more of a body that is too large is read and discarded,
        up to `MAX_DISCARDED`. Then the connection is closed.
        """
        kept, size, limit = bytearray(), 0, self.max_bytes
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    kept += chunk
                elif size > MAX_DISCARDED * limit:
                    break
        except ClientDisconnect:  # the client cannot read this, but it keeps a traceback out of the log
            raise HTTPException(400, "the connection was closed before the body was complete") from None
        if size > limit:
            raise HTTPException(
                413,
                f"the body is too large: expected at most {limit >> 20} MiB (--max_request_mb), got at least {size}"
                " bytes. Try: fewer queries",
                CLOSE,
            )
        return bytes(kept)


def read_queries(body: bytes) -> list[str]:
    """Parse the texts to score from a request body; other fields, such as prompts and labels, are ignored."""
    try:
        asked = parse_json(body)
    except InvalidJSON as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(asked, Mapping):
        raise HTTPException(422, f"the body is of type {type(asked).__name__}: expected an object such as {EXAMPLE}")
    given = [name for name in ("query", "queries") if name in asked]
    if len(given) != 1:
        raise HTTPException(422, f"the body must have either query or queries, as in {EXAMPLE}")
    texts = [asked[given[0]]] if isinstance(asked[given[0]], str) else asked[given[0]]
    if not isinstance(texts, list) or not texts:
        raise HTTPException(422, f"{given[0]} is invalid: expected a string or a non-empty list of strings")
    if len(texts) > MAX_QUERIES:
        raise HTTPException(413, f"too many queries in one request: expected at most {MAX_QUERIES}, got {len(texts)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise HTTPException(422, f"query {place} is of type {type(text).__name__}: expected a string")
    return texts


def build_app(model: ServedModel, batcher: Batcher, flags: ServingFlags) -> FastAPI:
    """Create the FastAPI app; the batcher runs while the app does."""
    reader = ThreadPoolExecutor(1, "openrlhf-tokenizing")
    service = RewardService(model, batcher, reader, flags.api_key, flags.max_request_mb << 20, flags.refuse_long)

    @asynccontextmanager
    async def scoring(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield
        reader.shutdown(wait=False, cancel_futures=True)

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def report_failure(request: Request, error: Exception) -> JSONResponse:
        """Send an unexpected error to the client; its traceback is in the server's log."""
        return JSONResponse({"detail": f"scoring failed: {type(error).__name__}: {error}"}, 500)

    app = FastAPI(lifespan=scoring, openapi_url=None)
    app.add_api_route("/get_reward", service.get_reward, methods=["POST"], response_model=None)
    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    app.add_exception_handler(Exception, report_failure)
    return app
