"""OpenAI-compatible HTTP server in front of the policy, with a separate base_url for each episode.

It runs in the worker process on 127.0.0.1 and a free port. `OpenAIAgentExecutor` opens an episode, gives its base_url
and key to `run_agent`, and closes it afterwards; each request continues the token sequence of its episode.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from openrlhf.agents.chat.episode import Episode, Full
from openrlhf.agents.chat.session import read_chat
from openrlhf.agents.chat.wire import (
    MODEL,
    Answer,
    ChatRequest,
    chunks,
    completion,
    not_followed,
    problem,
    read_request,
)
from openrlhf.agents.multi_turn import tokenise
from openrlhf.errors import DataError, OpenRLHFError, RolloutError
from openrlhf.monitor import say

HOST = "127.0.0.1"
LARGEST_BODY = 1 << 28  # bytes
RETRY = "x-stainless-retry-count"  # header that OpenAI's clients set when they retry after a broken connection
ENDPOINTS = "/v1/chat/completions, /v1/models and /tokenize"


class ChatServer:
    """Server of the open episodes, by name.

    A request that cannot be served is also recorded in `Episode.trouble`, because an agent may swallow the error.
    """

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}
        self.explained: set[str] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port and set `port`."""
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/health", health)
        app.router.add_get("/s/{episode}/v1/models", self._with_episode(self._models))
        app.router.add_post("/s/{episode}/tokenize", self._with_episode(self._tokenize))
        app.router.add_post("/s/{episode}/v1/chat/completions", self._with_episode(self._chat))
        app.router.add_route("*", "/{path:.*}", unknown)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.port = int(runner.addresses[0][1])

    def open(self, episode: Episode) -> str:
        """Start serving an episode and return its base_url."""
        self.episodes[episode.name] = episode
        return f"http://{HOST}:{self.port}/s/{episode.name}/v1"

    def close(self, episode: Episode) -> None:
        """Stop serving an episode; later requests to its base_url get status 404."""
        del self.episodes[episode.name]

    def _with_episode(
        self, handler: Callable[[Episode, web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: look up the episode in the URL and check the key."""

        async def handle(request: web.Request) -> web.StreamResponse:
            episode = self.episodes.get(request.match_info["episode"])
            if episode is None:
                return refusal(404, "this episode is over, or never was; ask at the base_url that run_agent was given")
            if request.headers.get("Authorization") != f"Bearer {episode.key}":
                return refusal(401, "the api_key is not the one that run_agent was given for this base_url")
            return await handler(episode, request)

        return handle

    async def _models(self, episode: Episode, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrlhf"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": episode.max_length}]})

    async def _tokenize(self, episode: Episode, request: web.Request) -> web.Response:
        """Return the tokens of a text, or of messages rendered as if they were the first request."""
        try:
            body = await read_json(request)
            text = body.get("prompt")
            if text is None:
                text = episode.session.render(read_chat(body.get("messages")), body.get("tools") or None)
        except (RolloutError, DataError) as error:
            return refusal(400, error.message)
        ids = tokenise(str(text), episode.chat.tokenizer)
        return web.json_response({"count": len(ids), "max_model_len": episode.max_length, "tokens": ids})

    async def _chat(self, episode: Episode, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion, one at a time per episode; record any error other than a full episode."""
        try:
            body = await read_json(request)
            self._explain(body, episode)
            asked = read_request(body)
            async with episode.turn:
                answer = await self._once(episode, asked, body, again=request.headers.get(RETRY, "0") != "0")
        except Full as over:
            return refusal(400, str(over), "context_length_exceeded")
        except OpenRLHFError as error:
            episode.trouble = episode.trouble or error
            return refusal(400, error.message)
        if asked.stream:
            return await stream(request, chunks(answer, asked))
        return web.json_response(completion(answer, asked))

    async def _once(self, episode: Episode, asked: ChatRequest, body: Any, *, again: bool) -> Answer:
        """Answer a request; for a retry after a lost response, resend the answer instead of sampling again."""
        if again and episode.answered is not None and episode.answered[0] == body:
            return episode.answered[1]
        answer = await episode.answer(asked)
        episode.answered = body, answer
        return answer

    def _explain(self, body: dict[str, Any], episode: Episode) -> None:
        """Report each ignored sampling parameter once per process."""
        for difference in not_followed(body, episode.params):
            if difference not in self.explained:
                self.explained.add(difference)
                say(f"the agent asks for {difference}: training draws as its flags say, so that is not followed")


async def read_json(request: web.Request) -> dict[str, Any]:
    """Return the body of a request; raise RolloutError if it is not a JSON object."""
    try:
        body = await request.json()
    except ValueError as error:  # also raised for bytes that are not valid text
        raise RolloutError(f"the body of a request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RolloutError("the body of a request is no JSON object")
    return body


async def stream(request: web.Request, pieces: list[dict[str, Any]]) -> web.StreamResponse:
    """Send the chunks as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for piece in [*map(json.dumps, pieces), "[DONE]"]:
        await response.write(f"data: {piece}\n\n".encode())
    await response.write_eof()
    return response


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def unknown(request: web.Request) -> web.Response:
    return refusal(404, f"{request.method} {request.path} is not served; an episode has {ENDPOINTS}")


def refusal(status: int, message: str, code: str | None = None) -> web.Response:
    """Build an error response in OpenAI's format."""
    return web.json_response(problem(message, code), status=status)
