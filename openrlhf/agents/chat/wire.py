"""The JSON format of OpenAI's chat completions: parsing and validation of requests, and formatting of responses.

All functions are pure. `server.py` serves this format over HTTP; `episode.py` uses it to parse the tool calls of a
turn. In this package the arguments of a tool call are an object, as chat templates expect them; clients get them as
JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

from openrlhf.agents.executor import clip
from openrlhf.agents.interface import CompletionOutput
from openrlhf.agents.sandbox.messages import Json
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.data.messages import Message, read_message
from openrlhf.data.records import Place
from openrlhf.errors import DataError, RolloutError

Tools: TypeAlias = Sequence[Mapping[str, object]] | None
MODEL = "policy"
REQUEST = Place("the agent's request", 1)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# Sampling parameters that only the run's flags can set, because log-probs and loss assume one distribution. These
# values apply if a run has no such flag.
FOLLOWS_FLAGS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


class ToolFunction(TypedDict):
    """Name and arguments of a tool call."""

    name: str
    arguments: dict[str, Json]


class ToolCall(TypedDict):
    """A tool call in the format of OpenAI's clients, but with the arguments as an object."""

    id: str
    type: str  # "function"
    function: ToolFunction


@dataclass(frozen=True)
class ChatRequest:
    """The fields of a request that are honoured; others are ignored or rejected."""

    messages: list[Message]
    tools: Tools = None
    may_call: bool = False  # whether tool calls are parsed
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    with_usage: bool = False  # send token counts at the end of a stream
    with_log_probs: bool = False


@dataclass(frozen=True)
class ChatTurn:
    """One turn of the policy."""

    number: int  # number of the turn in its episode, from 1
    message: Message
    output: CompletionOutput
    prompt_token_ids: list[int]
    token_texts: list[str]  # one per sampled token

    @property
    def finish_reason(self) -> str:
        """Finish reason in OpenAI's format, which has a value for tool calls."""
        return "tool_calls" if self.message.get("tool_calls") else self.output.finish_reason

    def usage(self) -> dict[str, Json]:
        """Return the token counts in OpenAI's format."""
        prompt, completion = len(self.prompt_token_ids), len(self.output.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def log_probs(self) -> dict[str, Json]:
        """Format the log-probs of the sampled tokens; alternatives (`top_logprobs`) are not available."""
        content: list[Json] = [
            {"token": text, "logprob": known[token].logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for token, known, text in zip(self.output.token_ids, self.output.logprobs, self.token_texts, strict=True)
        ]
        return {"content": content}

    def head(self, kind: str) -> dict[str, Json]:
        """Return the fields shared by completions and chunks; `kind` is the object type."""
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": 0, "model": MODEL}


def read_request(body: object) -> ChatRequest:
    """Parse a request; raise RolloutError naming a field that is malformed or not supported."""
    if not isinstance(body, Mapping):
        raise RolloutError("the body of a request for a chat completion must be a JSON object")
    # Reject parameters that would change the sampling distribution or ask for several samples.
    wrong = {
        "n": body.get("n") not in (None, 1),
        "tool_choice": body.get("tool_choice") not in (None, "auto", "none"),
        "logit_bias": bool(body.get("logit_bias")),
        "response_format": (body.get("response_format") or {"type": "text"}) != {"type": "text"},
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise RolloutError(
                f"a request asks for {name}={clip(repr(body[name]))}, which would distort the policy's"
                " samples: omit it, and enforce the format of answers through the reward"
            )
    usage = body.get("stream_options") or {}
    if not isinstance(usage, Mapping):
        raise RolloutError(f"'stream_options' of a request is {clip(repr(usage))}: expected an object")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise RolloutError(f"'stop' of a request is {clip(repr(stop))}: expected a string or a list of strings")
    tools = read_tools(body.get("tools"))
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise RolloutError(f"'max_tokens' of a request is {clip(repr(limits))}: expected an integer above 0")
    try:
        messages = read_chat(body.get("messages"))
    except DataError as error:
        raise RolloutError(error.message) from None
    return ChatRequest(
        messages=messages,
        tools=tools,
        may_call=tools is not None and body.get("tool_choice") != "none",
        max_tokens=min(limits, default=None),
        stop=stop,
        stream=bool(body.get("stream")),
        with_usage=bool(usage.get("include_usage")),
        with_log_probs=bool(body.get("logprobs")),
    )


def read_tools(given: object) -> Tools:
    """Validate the tools of a request; None if there are none."""
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise RolloutError(f"'tools' of a request is {clip(repr(given))}: expected a list of objects")
    return given


def read_chat(given: object) -> list[Message]:
    """Read the messages of a request in the form that templates expect: text content, call arguments as objects."""
    at = Place(REQUEST.source, REQUEST.row, "messages")
    if not isinstance(given, list) or not given:
        raise at.mismatch("a list of messages", given)
    messages = [read_message(item, at) for item in given]
    for message in messages:
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [decode_call(call, at) for call in calls]
    return messages


def decode_call(call: object, at: Place) -> Message:
    """Validate a tool call and decode arguments that arrived as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise at.mismatch("a tool call with function.name and function.arguments", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except InvalidJSON:
            raise at.mismatch("JSON as the arguments of a tool call", arguments) from None
    return {**call, "function": {**function, "arguments": arguments}}


def list_ignored(body: Mapping[str, object], params: object) -> list[str]:
    """List the sampling parameters of a request that differ from the run's and are ignored, for a warning."""
    return [
        f"{name}={clip(repr(body[name]))} (the run has {getattr(params, name, default)})"
        for name, default in FOLLOWS_FLAGS.items()
        if body.get(name) is not None and body[name] != getattr(params, name, default)
    ]


def find_calls(text: str, number: int) -> tuple[str, list[ToolCall]]:
    """Split a turn into its text and its calls, <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    `number` makes call ids unique within an episode. If any call is malformed, the whole turn is returned as text.
    """
    calls: list[ToolCall] = []
    for place, found in enumerate(TOOL_CALL.findall(text)):
        try:
            call = parse_json(found, finite=True)  # NaN would differ from itself when a client sends it back
        except InvalidJSON:
            return text, []
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return text, []
        function: ToolFunction = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{number}_{place}", "type": "function", "function": function})
    return TOOL_CALL.sub("", text).strip() if calls else text, calls


def format_message(message: Message) -> Message:
    """Return the message as OpenAI's clients expect it: arguments as JSON text, empty content next to calls as None."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls, "content": message["content"] or None} if calls else message


def format_completion(turn: ChatTurn, request: ChatRequest) -> dict[str, Json]:
    """Format a turn as one response; `token_ids` is an extension that OpenAI's clients ignore."""
    choice: Json = {
        "index": 0,
        "message": format_message(turn.message),
        "finish_reason": turn.finish_reason,
        "logprobs": turn.log_probs() if request.with_log_probs else None,
    }
    ids: Json = {"prompt_token_ids": list(turn.prompt_token_ids), "completion_token_ids": list(turn.output.token_ids)}
    return turn.head("chat.completion") | {"choices": [choice], "usage": turn.usage(), "token_ids": ids}


def format_chunks(turn: ChatTurn, request: ChatRequest) -> list[dict[str, Json]]:
    """Format a turn as a stream: the whole message in one chunk, the finish reason, then usage if requested."""
    head = turn.head("chat.completion.chunk")
    message = dict(format_message(turn.message))
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    first: dict[str, Json] = {"index": 0, "delta": message, "finish_reason": None}
    if request.with_log_probs:
        first["logprobs"] = turn.log_probs()
    last: Json = {"index": 0, "delta": {}, "finish_reason": turn.finish_reason}
    usage: list[dict[str, Json]] = [head | {"choices": [], "usage": turn.usage()}] if request.with_usage else []
    return [head | {"choices": [first]}, head | {"choices": [last]}, *usage]
