"""OpenAI-compatible HTTP server in front of the policy, with a separate base_url for each episode.

It runs in the worker process on 127.0.0.1 and a free port. `OpenAIAgentExecutor` opens an episode, gives its base_url
and key to `run_agent`, and closes it afterwards; each request continues the token sequence of its episode. A request
needs the name of its episode in the URL and the key of that episode as a bearer token.
"""

from __future__ import annotations

import json

from aiohttp import web

from openrlhf.agents.chat.episode import ChatEpisode, EpisodeFull
from openrlhf.agents.chat.wire import (
    MODEL,
    format_chunks,
    format_completion,
    list_ignored,
    read_chat,
    read_request,
    read_tools,
)
from openrlhf.agents.sandbox.messages import Json
from openrlhf.agents.transcript import tokenise
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.errors import DataError, OpenRLHFError, RolloutError
from openrlhf.monitor import say

HOST = "127.0.0.1"
LARGEST_BODY = 1 << 28  # bytes
RETRY = "x-stainless-retry-count"  # header that OpenAI's clients set when they retry after a broken connection
ENDPOINTS = "/v1/chat/completions, /v1/models and /tokenize"


class ChatServer:
    """HTTP server for the open episodes, each under its own URL.

    A request that cannot be served is also recorded in `ChatEpisode.error`, because an agent may swallow the error.
    """

    def __init__(self) -> None:
        self.episodes: dict[str, ChatEpisode] = {}
        self.warned: set[str] = set()  # ignored sampling parameters that were reported
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port and set `port`."""

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def not_found(request: web.Request) -> web.Response:
            text = f"{request.method} {request.path} is not an endpoint: expected one of {ENDPOINTS}"
            raise refusal(web.HTTPNotFound, text)

        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/health", health)
        app.router.add_get("/s/{episode}/v1/models", self._models)
        app.router.add_post("/s/{episode}/tokenize", self._tokenize)
        app.router.add_post("/s/{episode}/v1/chat/completions", self._chat)
        app.router.add_route("*", "/{path:.*}", not_found)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.port = int(runner.addresses[0][1])

    def open(self, episode: ChatEpisode) -> str:
        """Start serving an episode and return its base_url."""
        self.episodes[episode.name] = episode
        return f"http://{HOST}:{self.port}/s/{episode.name}/v1"

    def close(self, episode: ChatEpisode) -> None:
        """Stop serving an episode; later requests to its base_url get status 404."""
        del self.episodes[episode.name]

    def _find_episode(self, request: web.Request) -> ChatEpisode:
        """Return the episode in the URL of a request, after checking the key."""
        episode = self.episodes.get(request.match_info["episode"])
        if episode is None:
            text = "this episode has ended or does not exist; use the base_url given to run_agent"
            raise refusal(web.HTTPNotFound, text)
        if request.headers.get("Authorization") != f"Bearer {episode.key}":
            text = "wrong api_key: expected the one that run_agent got with this base_url"
            raise refusal(web.HTTPUnauthorized, text)
        return episode

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrlhf"}
        longest = self._find_episode(request).task.max_length
        return web.json_response({"object": "list", "data": [model | {"max_model_len": longest}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Return the tokens of the given text, or of messages rendered as if they were the first request."""
        episode = self._find_episode(request)
        try:
            body = await read_json(request)
            text = body.get("prompt")
            if text is None:
                text = episode.render(read_chat(body.get("messages")), read_tools(body.get("tools")))
        except (RolloutError, DataError) as error:
            raise refusal(web.HTTPBadRequest, str(error)) from None
        ids = tokenise(str(text), episode.chat.tokenizer)
        return web.json_response({"count": len(ids), "max_model_len": episode.task.max_length, "tokens": ids})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Answer chat requests, one at a time per episode; record every error except EpisodeFull."""
        episode = self._find_episode(request)
        try:
            body = await read_json(request)
            for difference in list_ignored(body, episode.task.sampling_params):
                if difference not in self.warned:  # once per process
                    self.warned.add(difference)
                    say(f"the agent requests {difference}: sampling follows the run's flags, so this is ignored")
            asked = read_request(body)
            async with episode.turn:
                # A retry after a lost response gets the same turn again instead of a new sample.
                is_retry = request.headers.get(RETRY, "0") != "0"
                if is_retry and episode.last_answer is not None and episode.last_answer[0] == body:
                    turn = episode.last_answer[1]
                else:
                    turn = await episode.answer(asked)
                    episode.last_answer = body, turn
        except EpisodeFull as full:
            raise refusal(web.HTTPBadRequest, str(full), "context_length_exceeded") from None
        except OpenRLHFError as error:
            episode.error = episode.error or error
            raise refusal(web.HTTPBadRequest, str(error)) from None
        if not asked.stream:
            return web.json_response(format_completion(turn, asked))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in [*map(json.dumps, format_chunks(turn, asked)), "[DONE]"]:
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response


async def read_json(request: web.Request) -> dict[str, Json]:
    """Return the body of a request; raise RolloutError if it is not a JSON object."""
    try:
        body = parse_json(await request.read())
    except InvalidJSON as error:
        raise RolloutError(f"the body of a request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RolloutError("the body of a request is not a JSON object")
    return body


def refusal(kind: type[web.HTTPException], message: str, code: str | None = None) -> web.HTTPException:
    """Build an error response in the format that OpenAI's clients parse."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return kind(text=json.dumps({"error": error}), content_type="application/json")
