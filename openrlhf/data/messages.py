"""Conversations in the formats that datasets use, converted to one: messages with role and content.

OpenAI-style messages, ShareGPT messages (`from`, `value`) and plain text are accepted; tool calls and tool descriptions
may be structured or JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.data.records import Place, Record, describe

Message = dict[str, Any]

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


@dataclass(frozen=True)
class Field:
    """The origin of a value, for error messages."""

    place: Place
    name: str

    def wants(self, wanted: str, came: object) -> Exception:
        return self.place.error(f"{wanted} is wanted, but {describe(came)} came", self.name)


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that the assistant may call, and their place in the data."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    place: Place

    def first(self, count: int) -> Conversation:
        return Conversation(self.messages[:count], self.tools, self.place)

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages, except a first message, which answers nothing."""
        return [turn for turn, message in enumerate(self.messages) if turn and message["role"] == "assistant"]


def says_something(message: Message) -> bool:
    return bool(str(message["content"]).strip() or message.get("tool_calls"))


def read_messages(record: Record, field: str, flag: str, *, speaker: str | None = None) -> list[Message]:
    """Read messages from the field that a flag names: a list, or, if a speaker is given, also one message's text."""
    value, at = record.value(field, flag), Field(record.place, field)
    if speaker is not None and (value is None or isinstance(value, str)):
        return [{"role": speaker, "content": value or ""}]
    if value is None:
        return []
    if not isinstance(value, list):
        raise at.wants("a message list" if speaker is None else "text or a message list", value)
    return [read_message(item, at) for item in value]


def read_message(item: object, at: Field) -> Message:
    if not isinstance(item, Mapping):
        raise at.wants("a message with role and content", item)
    if "from" in item and "value" in item:
        return from_sharegpt(item, at)
    if not isinstance(item.get("role"), str):
        raise at.wants("a message with role and content (or from and value)", item)
    message = {key: value for key, value in item.items() if value is not None}
    return {**message, "content": read_content(item.get("content"), at)}


def read_content(content: object, at: Field) -> str:
    """Return a message's text: parts of a list are joined, and null is empty (a message that only calls tools)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise at.wants("text as a message's content", content)
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise at.wants("text in every part of a message's content", part)
    return "".join(part["text"] for part in content)


def from_sharegpt(item: Mapping[str, Any], at: Field) -> Message:
    speaker, value = item["from"], item["value"]
    if speaker not in SHAREGPT_ROLES:
        raise at.place.error(f"no role is known for {speaker!r}; known are {', '.join(SHAREGPT_ROLES)}", at.name)
    text = read_content(value, at)
    message: Message = {"role": SHAREGPT_ROLES[speaker], "content": text}
    calls = read_calls(text) if speaker == "function_call" else None
    return message if calls is None else {**message, "content": "", "tool_calls": calls, "call_text": text}


def read_calls(text: str) -> list[Message] | None:
    """Parse the tool calls that a ShareGPT function_call holds as JSON; None if it is free text."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def calls_as_text(message: Message) -> str:
    """Return a message's tool calls as their original text, or as JSON; empty if it has none."""
    if "call_text" in message:
        return message["call_text"]
    calls = message.get("tool_calls") or []
    return "\n".join(json.dumps(call.get("function", call), ensure_ascii=False) for call in calls)


def read_tools(record: Record) -> list[Mapping[str, Any]] | None:
    """Read the optional `tools` column: a list of tool descriptions, or the same as JSON text."""
    at = Field(record.place, "tools")
    value = from_json(record.row.get("tools"), at)
    if not value:
        return None
    if not isinstance(value, list):
        raise at.wants("a list of tool descriptions", value)
    tools = [from_json(tool, at) for tool in value]
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise at.wants("a list of tool descriptions", tool)
    return tools


def from_json(value: Any, at: Field) -> Any:
    """Parse JSON text; return any other value unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise at.place.error(f"JSON is wanted, but {describe(value)} came ({error.msg})", at.name) from None
