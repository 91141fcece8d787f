"""Executor for NeMo Gym environments: the policy interacts with one resources server over HTTP.

An episode is POST /seed_session with the row, POST /TOOL with the arguments of each tool call of the policy, and POST
/verify with the row and the whole conversation as a Responses object, which returns the reward. Cookies that the server
sets are sent with all later requests of the episode. This module runs the loop itself, without the agent and model
servers of NeMo Gym, so that the sampled tokens are trained on unchanged. The other protocols of NeMo Gym (Gymnasium's
reset and step, MCP, sessions with a caller's id) are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from openrlhf.agents.chat.episode import ChatEpisode, ChatExecutor, EpisodeFull
from openrlhf.agents.chat.wire import MODEL, ChatRequest, format_message, read_chat
from openrlhf.agents.executor import clip
from openrlhf.agents.interface import EpisodeResult, EpisodeTask
from openrlhf.agents.reward_server import LARGEST_ANSWER
from openrlhf.agents.sandbox.messages import Json
from openrlhf.agents.scores import kind_of
from openrlhf.config.checks.extras import require
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.data.messages import Message
from openrlhf.errors import DataError, RewardError, RolloutError

if TYPE_CHECKING:
    from aiohttp import ClientSession

ROW = (
    "the label of a prompt for NeMo Gym is not a row: expected an object or JSON text with"
    " responses_create_params.input and an optional list of tools"
)
Item: TypeAlias = dict[str, Json]  # item of a Responses object


@dataclass(frozen=True)
class GymRow:
    """A NeMo Gym row, with the fields of its responses_create_params that are used here."""

    content: dict[str, object]  # the whole row, which is sent back to the server
    input: object  # text, or a list of messages
    tools: list[object]  # in the flat format of the Responses API
    tool_choice: object


class ChatTool(TypedDict):
    """A tool in the nested format of chat templates."""

    type: str  # "function"
    function: Mapping[str, object]  # its name, description and parameters


class NemoGymAgentExecutor(ChatExecutor):
    """Executor for the resources server at `url`; the label of a prompt is its row."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def prepare(self) -> None:
        """Check that aiohttp is installed."""
        require("aiohttp", "NemoGymAgentExecutor")
        await super().prepare()

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Seed the session, run the turns, and have the server verify the conversation."""
        from aiohttp import ClientSession, CookieJar

        row = read_row(task.label)
        episode = self.open_chat(task)
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as http:  # also accept cookies from IP addresses
            await self._ask(http, "/seed_session", row.content)
            output = await self._play(http, row, episode)
            response = {
                "id": "resp_1",
                "object": "response",
                "created_at": 0,
                "model": MODEL,
                "output": output,
                "parallel_tool_calls": True,
                "tool_choice": row.tool_choice,
                "tools": row.tools,
            }
            verified = await self._ask(http, "/verify", row.content | {"response": response})
        if not isinstance(verified, Mapping) or "reward" not in verified:
            raise RewardError(
                f"{self.url}/verify sent no reward: expected an object with reward, got {clip(repr(verified))}"
            )
        calls = float(sum(item["type"] == "function_call" for item in output))
        return {**episode.result(), "reward": verified["reward"], "extra_logs": {"tool_calls": calls}}

    async def _play(self, http: ClientSession, row: GymRow, episode: ChatEpisode) -> list[Item]:
        """Run turns until one is truncated or calls no tool, or until the episode is full; return Responses items."""
        try:
            messages = read_chat([{"role": "user", "content": row.input}] if isinstance(row.input, str) else row.input)
        except DataError as error:
            raise RolloutError(f"responses_create_params.input: {error.message}") from None
        tools = [convert_tool(tool) for tool in row.tools]
        output: list[Item] = []
        while True:
            try:
                turn = await episode.answer(ChatRequest(messages, tools or None, may_call=bool(tools)))
            except EpisodeFull:
                return output
            output += convert_turn(turn.message, turn.number)
            calls = turn.message.get("tool_calls") or []
            if not calls or turn.output.finish_reason == "length":
                return output
            messages = [*messages, turn.message]
            for call in calls:
                name, number = call["function"]["name"], call["id"]
                text = f"there is no tool {name}"
                # Only tools that the row lists are requested, so the policy cannot reach other paths of the server.
                if any(tool["function"]["name"] == name for tool in tools):
                    # The policy also reads the body of an error response.
                    _, text = await self._post(http, f"/{name}", call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": number, "content": text})
                item: Item = {"type": "function_call_output", "id": f"fco_{number}", "status": "completed"}
                output.append(item | {"call_id": number, "output": text})

    async def _post(self, http: ClientSession, path: str, body: Mapping[str, object]) -> tuple[int, str]:
        """Return the status and text of a response; raise RewardError if there is none or it is too large.

        Redirects are not followed, because one could point to an address that only this machine can reach.
        """
        from aiohttp import ClientError

        try:
            async with http.post(self.url + path, json=body, allow_redirects=False) as answer:
                received = bytearray()
                async for part in answer.content.iter_any():
                    received += part
                    if len(received) > LARGEST_ANSWER:
                        raise RewardError(f"{self.url}{path} answered with more than {LARGEST_ANSWER >> 20} MiB")
                return answer.status, decode(received, answer.charset)
        except TimeoutError:
            raise RewardError(f"{self.url}{path} did not answer in time") from None
        except ClientError as error:
            raise RewardError(f"{self.url}{path} cannot be reached: {error}; is the resources server up?") from None

    async def _ask(self, http: ClientSession, path: str, body: Mapping[str, object]) -> object:
        """Return the decoded JSON of a response; raise RewardError for a status other than 200."""
        status, text = await self._post(http, path, body)
        if status != 200:
            raise RewardError(f"{self.url}{path} answered {status}: {clip(text)}")
        try:
            return parse_json(text)
        except InvalidJSON as error:
            raise RewardError(f"the answer from {self.url}{path} is not JSON: {clip(text)} ({error})") from None


def decode(body: bytearray, charset: str | None) -> str:
    """Decode a response; an unknown charset counts as UTF-8."""
    try:
        return body.decode(charset or "utf-8", errors="replace")
    except (LookupError, ValueError):
        return body.decode(errors="replace")


def read_row(label: object) -> GymRow:
    """Parse the row from a label, which is an object or JSON text."""
    try:
        row = parse_json(label) if isinstance(label, str) else label
    except InvalidJSON:
        row = None
    if isinstance(row, dict):
        params = row.get("responses_create_params")
        if isinstance(params, Mapping) and params.get("input") and isinstance(params.get("tools") or [], list):
            return GymRow(row, params["input"], params.get("tools") or [], params.get("tool_choice") or "auto")
    raise RolloutError(f"{ROW}, got {kind_of(label)}")


def convert_tool(tool: object) -> ChatTool:
    """Convert a tool from the flat format of the Responses API to the nested one of chat templates."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RolloutError(f"a tool of responses_create_params is {kind_of(tool)}: expected a function with a name")
    known = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in known if tool.get(key) is not None}}


def convert_turn(message: Message, number: int) -> list[Item]:
    """Convert a turn of the policy to items of a Responses object: its text, then its tool calls."""
    text: Item = {"type": "output_text", "text": message["content"], "annotations": []}
    text_item: Item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
    calls: list[Item] = [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        | {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in format_message(message).get("tool_calls") or []
    ]
    return ([text_item | {"content": [text]}] if message["content"] or not calls else []) + calls
