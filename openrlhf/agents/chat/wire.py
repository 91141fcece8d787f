"""The JSON format of OpenAI's chat completions: parsing and validation of requests, and formatting of answers.

All functions are pure. `chat_server` speaks this format over HTTP; `chat_episode` finds the tool calls of a turn here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.chat.session import Tools, read_chat
from openrlhf.agents.interface import CompletionOutput
from openrlhf.data.messages import Message
from openrlhf.errors import DataError, RolloutError

MODEL = "policy"
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# The run's flags decide these, because its log-probs and loss assume one distribution. The values here are those of a
# run that has no such flag.
FOLLOWS_FLAGS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@dataclass(frozen=True)
class ChatRequest:
    """The fields of a request that are honoured; others are ignored or rejected."""

    messages: list[Message]
    tools: Tools = None
    may_call: bool = False
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    with_usage: bool = False
    with_log_probs: bool = False


@dataclass(frozen=True)
class Answer:
    """One turn of the policy, ready to be sent to the client."""

    number: int  # of the turn in its episode, from 1
    message: Message
    drawn: CompletionOutput
    prompt_token_ids: list[int]
    token_texts: list[str]


def read_request(body: Any) -> ChatRequest:
    """Parse a request; raise RolloutError naming a field that is malformed or not supported."""
    if not isinstance(body, Mapping):
        raise RolloutError("a chat completion is asked for with a JSON object")
    refuse_constraints(body)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise RolloutError(f"stop of a request is {stop!r}, not a text or a list of texts")
    tools = body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RolloutError(f"tools of a request is {tools!r}, not a list of objects")
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise RolloutError(f"max_tokens of a request is {limits}, not a number of tokens")
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
        with_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        with_log_probs=bool(body.get("logprobs")),
    )


def refuse_constraints(body: Mapping[str, Any]) -> None:
    """Reject parameters that would change the sampling distribution or ask for several samples."""
    form = body.get("response_format") or {"type": "text"}
    wrong = {
        "n": body.get("n") not in (None, 1),
        "tool_choice": body.get("tool_choice") not in (None, "auto", "none"),
        "logit_bias": bool(body.get("logit_bias")),
        "response_format": form != {"type": "text"},
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise RolloutError(
                f"a request asks for {name}={body[name]!r}, which would not leave the policy free to say what it"
                " samples: leave it out, and let the reward judge the form of an answer"
            )


def not_followed(body: Mapping[str, Any], params: object) -> list[str]:
    """List the sampling parameters of a request that differ from the run's, for a warning."""
    return [
        f"{name}={body[name]} (the run has {getattr(params, name, default)})"
        for name, default in FOLLOWS_FLAGS.items()
        if body.get(name) is not None and body[name] != getattr(params, name, default)
    ]


def find_calls(text: str, number: int) -> tuple[str, list[dict[str, Any]]]:
    """Split a turn into its text and its calls, <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    `number` makes call ids unique within an episode. If any call is malformed, the whole turn is returned as text.
    """
    calls = [read_call(found) for found in TOOL_CALL.findall(text)]
    functions = [call for call in calls if call is not None]
    if len(functions) < len(calls):
        return text, []
    return TOOL_CALL.sub("", text).strip() if calls else text, [
        {"id": f"call_{number}_{place}", "type": "function", "function": function}
        for place, function in enumerate(functions)
    ]


def read_call(text: str) -> dict[str, Any] | None:
    """Parse the JSON of one call; None if it is malformed."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def sent_message(message: Message) -> dict[str, Any]:
    """Return the message as OpenAI's clients expect it: arguments as JSON text, empty content next to calls as None."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls, "content": message["content"] or None} if calls else message


def finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.message.get("tool_calls") else answer.drawn.finish_reason


def usage(answer: Answer) -> dict[str, int]:
    asked, drawn = len(answer.prompt_token_ids), len(answer.drawn.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": drawn, "total_tokens": asked + drawn}


def head(answer: Answer, kind: str) -> dict[str, Any]:
    """Return the fields shared by completions and chunks; `kind` is the object type."""
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": 0, "model": MODEL}


def completion(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Format the answer as one response; `token_ids` is an extension that other clients ignore."""
    choice = {
        "index": 0,
        "message": sent_message(answer.message),
        "finish_reason": finish_reason(answer),
        "logprobs": log_probs(answer) if request.with_log_probs else None,
    }
    ids = {"prompt_token_ids": answer.prompt_token_ids, "completion_token_ids": answer.drawn.token_ids}
    return head(answer, "chat.completion") | {"choices": [choice], "usage": usage(answer), "token_ids": ids}


def chunks(answer: Answer, request: ChatRequest) -> list[dict[str, Any]]:
    """Format the answer as a stream: the whole message in one chunk, the finish reason, then usage if requested."""
    begun = head(answer, "chat.completion.chunk")
    message = sent_message(answer.message)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    pieces: list[dict[str, Any]] = [
        {"index": 0, "delta": message, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": finish_reason(answer)},
    ]
    if request.with_log_probs:
        pieces[0]["logprobs"] = log_probs(answer)
    last = [begun | {"choices": [], "usage": usage(answer)}] if request.with_usage else []
    return [begun | {"choices": [piece]} for piece in pieces] + last


def log_probs(answer: Answer) -> dict[str, Any]:
    """Format the log-probs of the sampled tokens; alternatives (`top_logprobs`) are not available."""
    drawn = answer.drawn
    places = zip(drawn.token_ids, drawn.logprobs, answer.token_texts, strict=True)
    return {
        "content": [
            {"token": text, "logprob": known[token].logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for token, known, text in places
        ]
    }


def problem(message: str, code: str | None = None) -> dict[str, Any]:
    """Format an error in the way OpenAI's clients parse it."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
