"""Executor for environments of OpenEnv: each episode is a session of an environment server, over a WebSocket.

The server, which has the package openenv, runs in its own process or container. The executor connects to URL/ws
and sends `reset` with the label, then `step` with each turn of the policy as the action. Observations are the user
messages. The executor implements the protocol itself, so the trainer's environment needs only aiohttp.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf.agents.chat.episode import ChatExecutor, EpisodeFull
from openrlhf.agents.chat.wire import ChatRequest
from openrlhf.agents.executor import clip
from openrlhf.agents.interface import EpisodeResult, EpisodeTask
from openrlhf.agents.reward_server import LARGEST_ANSWER
from openrlhf.agents.scores import kind_of
from openrlhf.config.checks.extras import require
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.data.messages import Message
from openrlhf.data.records import as_float
from openrlhf.errors import ConfigError, RewardError, RolloutError

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse, StreamReader, WSMessage

LARGEST_SCHEMA = 1 << 24  # bytes
INVALID = "VALIDATION_ERROR"  # error code for an action that does not fit the environment's action class
FULL = "CAPACITY_REACHED"
BASE_FIELDS = ("metadata", "done", "reward")  # fields that all actions and observations have


class EnvironmentStep(NamedTuple):
    """The environment's answer to `reset` or to an action."""

    observation: Mapping[str, object]
    reward: float
    done: bool


class EnvironmentSession(NamedTuple):
    """A connection to the server and the frames that were read from it."""

    socket: ClientWebSocketResponse
    frames: asyncio.Queue[WSMessage]


class InvalidAction(ValueError):
    """An action that the environment rejects; the policy reads why."""


class OpenEnvAgentExecutor(ChatExecutor):
    """Executor for the environment server at `url`, such as http://127.0.0.1:8000.

    The prompt comes before the first observation; it may be empty. The label holds the arguments of the environment's
    `reset`: an object, or a whole number as the seed. The reward is the sum of the environment's rewards.
    """

    action_field: str  # set by `prepare`: the only field of an action

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def make_action(self, text: str) -> Mapping[str, object]:
        """Convert a turn of the policy to an action; raise ValueError with a message to the policy if it is not one.

        By default, the text is the only field of the action. Override this for other actions.
        """
        return {self.action_field: text}

    def show_observation(self, observation: Mapping[str, object]) -> str:
        """Convert an observation to a user message: its text field if it has just one, otherwise JSON."""
        own = {name: value for name, value in observation.items() if name not in BASE_FIELDS}
        texts = [value for value in own.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(own, ensure_ascii=False)

    async def prepare(self) -> None:
        """Read the fields of an action from the server."""
        require("aiohttp", "OpenEnvAgentExecutor")
        await super().prepare()
        from aiohttp import ClientError

        try:
            async with open_session() as http, http.get(f"{self.url}/schema") as answer:
                answer.raise_for_status()
                schema = parse_json(await read_part(answer.content, LARGEST_SCHEMA))
        except (ClientError, TimeoutError, InvalidJSON) as error:
            raise ConfigError(
                f"{self.url}/schema cannot be read: {error or type(error).__name__}", try_this="start the server first"
            ) from None
        fields = entry(entry(schema, "action"), "properties")
        own = {name: fields[name] for name in fields if name not in BASE_FIELDS}
        if [entry(own, name).get("type") for name in own] == ["string"]:
            (self.action_field,) = own
        elif type(self).make_action is OpenEnvAgentExecutor.make_action:
            raise ConfigError(
                f"an action of {self.url} has the fields {', '.join(own) or 'none'}: expected one text field",
                try_this="a method make_action(self, text) of the AgentExecutor, which returns the fields as a dict",
            )

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Play one session; the reward of each turn becomes a step reward."""
        from aiohttp import ClientError

        episode = self.open_chat(task)
        rewards: list[float] = []
        try:
            async with (
                open_session() as http,
                http.ws_connect(f"{self.url}/ws", max_msg_size=LARGEST_ANSWER) as socket,
                read_frames(socket) as frames,
            ):
                session = EnvironmentSession(socket, frames)
                step = await self._ask(session, "reset", read_arguments(task.label))
                if step.done:
                    raise RolloutError(f"{self.url}: reset returned done, so the episode has no turn")
                first = "\n".join(filter(None, [task.prompt, self.show_observation(step.observation)]))
                messages: list[Message] = [{"role": "user", "content": first}]
                while not step.done:
                    try:
                        turn = await episode.answer(ChatRequest(messages))
                    except EpisodeFull:
                        break
                    try:
                        action = self.make_action(turn.message["content"])
                        step = await self._ask(session, "step", action)
                    except ValueError as error:
                        shown = f"invalid action: {error}"
                        rewards.append(0.0)
                    else:
                        shown = self.show_observation(step.observation)
                        rewards.append(step.reward)
                    messages = [*messages, turn.message, {"role": "user", "content": shown}]
        except ClientError as error:
            raise RewardError(f"{self.url}/ws cannot be reached: {error}; is the environment server up?") from None
        result = episode.result()
        last_tokens = [end - 1 for _, end in episode.transcript.action_ranges]
        return {
            **result,
            "reward": sum(rewards),
            "extra_logs": {"turn_count": len(rewards)},
            "step_rewards": list(zip(last_tokens, rewards, strict=True)),
            "truncated": result.get("truncated", False) or not step.done,
        }

    async def _ask(self, session: EnvironmentSession, kind: str, data: Mapping[str, object]) -> EnvironmentStep:
        """Send a message and return the environment's answer; raise InvalidAction or RewardError for an error."""
        from aiohttp import WSMsgType

        await session.socket.send_json({"type": kind, "data": data})
        received = await session.frames.get()
        if received.type is not WSMsgType.TEXT:
            raise RewardError(f"{self.url}/ws was closed by the server during {kind}")
        try:
            answer = parse_json(received.data)
        except InvalidJSON as error:
            raise RewardError(f"{self.url}/ws sent {clip(received.data)}: expected JSON ({error})") from None
        given = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(given, dict):
            raise RewardError(f"{self.url}/ws sent {clip(received.data)}: expected an object with data")
        if answer.get("type") == "error":
            raise self._error(given, kind)
        observation, reward = given.get("observation"), given.get("reward")
        if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
            raise RewardError(f"{self.url}/ws sent {clip(received.data)}: expected an observation and a reward")
        return EnvironmentStep(observation, as_float(reward or 0.0), bool(given.get("done")))

    def _error(self, data: Mapping[str, Any], kind: str) -> InvalidAction | RewardError:
        """Return the exception for an error of the server."""
        code, message = data.get("code"), str(data.get("message"))
        if code == INVALID and kind == "step":
            errors = data.get("errors")
            items = errors if isinstance(errors, list) else []
            reasons = [str(item["msg"]) for item in items if isinstance(item, Mapping) and "msg" in item]
            return InvalidAction("; ".join(reasons) or message)
        if code == FULL:
            more = "a larger max_concurrent_envs in the server's create_app, or a smaller --max_concurrent_episodes"
            return RewardError(f"{self.url} has no room for another session: {message}", try_this=more)
        return RewardError(f"{self.url} failed in {kind}: {message} ({code})")


def open_session() -> ClientSession:
    """Return an HTTP client that does not follow redirects, for which `ws_connect` has no parameter.

    A redirect could lead to an address that only this machine can reach.
    """
    from aiohttp import ClientError, ClientSession, TraceConfig

    async def refuse(*_: object) -> None:
        raise ClientError("it answers with a redirect, which is not followed")

    tracing = TraceConfig()
    tracing.on_request_redirect.append(refuse)
    return ClientSession(trace_configs=[tracing])


async def read_part(content: StreamReader, most: int) -> bytes:
    """Return the bytes of an answer; raise ClientError if there are more than `most`."""
    from aiohttp import ClientPayloadError

    found = bytearray()
    async for part in content.iter_any():
        found += part
        if len(found) > most:
            raise ClientPayloadError(f"more than {most >> 20} MiB")
    return bytes(found)


def entry(given: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a nested object, or an empty one if there is none."""
    found = given.get(name) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@asynccontextmanager
async def read_frames(socket: ClientWebSocketResponse) -> AsyncIterator[asyncio.Queue[WSMessage]]:
    """Read a socket in the background and yield the queue of its frames; the last one says that it is closed.

    aiohttp answers the server's pings only while the socket is being read, and the server closes a connection that does
    not answer. A turn of the policy may take longer than the server waits. At most one frame is queued and one more
    is read ahead, so a server that sends frames without being asked cannot fill the memory.
    """
    frames: asyncio.Queue[WSMessage] = asyncio.Queue(1)

    async def read() -> None:
        from aiohttp import WSMsgType

        received = None
        while received is None or received.type is WSMsgType.TEXT:
            received = await socket.receive()
            await frames.put(received)

    reader = asyncio.create_task(read())
    try:
        yield frames
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)  # close the socket only after its reader has ended


def read_arguments(label: object) -> dict[str, object]:
    """Return the arguments of `reset` from a label: an object, a whole number, JSON text of either, or nothing."""
    if label in (None, ""):
        return {}
    try:
        given = parse_json(label) if isinstance(label, str) else label
    except InvalidJSON:
        given = label
    if isinstance(given, int) and not isinstance(given, bool):
        return {"seed": given}
    if isinstance(given, dict):
        return given
    raise RolloutError(
        f"the label of a prompt for OpenEnv is {kind_of(label)}: expected an object with the arguments of reset, or a"
        " whole number, its seed",
        try_this="--label_key with the field that holds them",
    )
