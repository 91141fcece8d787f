"""Convert conversations from the common dataset formats to messages with role and content.

OpenAI-style messages, ShareGPT messages (`from`, `value`) and plain text are accepted; tool calls and tool descriptions
may be objects or JSON text. The texts of several fields, such as Alpaca's `instruction` and `input`, are joined.
`read_text`, `read_messages` and `read_tools` read a dataset row, and `templates.Chat` renders the result. `agents.chat`
uses `read_message` for the requests of OpenAI clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.config.sections.data import split_names
from openrlhf.data.json_text import InvalidJSON, parse_json
from openrlhf.data.records import Place, Record, describe
from openrlhf.errors import ConfigError

# Keys: "role", "content" (text) and others that the chat template may use: tool_calls, name, reasoning_content, ...
# A ShareGPT tool call also keeps its original text as "call_text", for templates that do not support tool calls.
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
class Conversation:
    """Messages, the tools that the assistant may call, and their location in the data."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None
    place: Place

    def first(self, count: int) -> Conversation:
        """Return the conversation up to message `count`."""
        return Conversation(self.messages[:count], self.tools, self.place)

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the assistant's messages; a first message is excluded, because it is not a reply."""
        return [turn for turn, message in enumerate(self.messages) if turn and message["role"] == "assistant"]


def says_something(message: Message) -> bool:
    """Return True if a message has text or calls a tool."""
    return bool(str(message["content"]).strip() or message.get("tool_calls"))


def read_field(record: Record, field: str, flag: str) -> object:
    """Return the value of a field, or the texts of several (`instruction,input`) joined by line breaks.

    If there are several fields, only the first must exist; empty texts are left out.
    """
    if field in record.row or "," not in field:
        return record.value(field, flag)
    names = split_names(field)
    if not names:
        raise ConfigError(f"{flag} {field!r} names no field", try_this=f"{flag} with a field, or several with commas")
    first, *others = names
    texts = [record.text(first, flag), *(record.text(name, flag) for name in others if name in record.row)]
    return "\n".join(text for text in texts if text)


def read_messages(record: Record, field: str, flag: str, *, speaker: str | None = None) -> list[Message]:
    """Read a message, or a list of them, from a field; with `speaker`, plain text is one message of that role."""
    value = read_field(record, field, flag)
    if speaker is not None and (value is None or isinstance(value, str)):
        return [{"role": speaker, "content": value or ""}]
    if value is None:
        return []
    if isinstance(value, str):
        own = "--output_key FIELD for the response" if flag == "--input_key" else "--prompt_key FIELD for the prompt"
        fix = f"{own}, if it has its own field, or remove --apply_chat_template"
        raise record.at(field).mismatch("a message list", value, try_this=fix)
    if isinstance(value, Mapping):  # a single message, such as the `chosen` of a LLaMA-Factory pair
        value = [value]
    if not isinstance(value, list):
        raise record.at(field).mismatch("a message list" if speaker is None else "text or a message list", value)
    return [read_message(item, record.at(field)) for item in value]


def read_text(record: Record, field: str, flag: str) -> str:
    """Read the text that a plain template is filled with; the error for a message list suggests the chat template."""
    value = read_field(record, field, flag)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    is_chat = isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    fix = "--apply_chat_template, which formats messages" if is_chat else None
    raise record.at(field).mismatch("text", value, try_this=fix)


def read_message(item: object, place: Place) -> Message:
    """Read one OpenAI-style or ShareGPT message; keys without a value are removed."""
    if not isinstance(item, Mapping):
        raise place.mismatch("a message with role and content", item)
    if "from" not in item or "value" not in item:
        if not isinstance(item.get("role"), str):
            raise place.mismatch("a message with role and content (or from and value)", item)
        message = {key: value for key, value in item.items() if value is not None and key != "call_text"}
        calls = message.get("tool_calls") or []  # the chat template reads their content
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise place.mismatch("a list of objects as tool_calls", calls)
        return {**message, "content": read_content(item.get("content"), place)}

    speaker = item["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise place.error(f"unknown role {speaker!r:.60}: expected one of {', '.join(SHAREGPT_ROLES)}")
    role, text = SHAREGPT_ROLES[speaker], read_content(item["value"], place)
    calls = read_calls(text) if speaker == "function_call" else None
    if calls is None:
        return {"role": role, "content": text}
    return {"role": role, "content": "", "tool_calls": calls, "call_text": text}


def read_content(content: object, place: Place) -> str:
    """Return a message's text: join the parts of a list; null (a message that only calls tools) becomes empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise place.mismatch("text as a message's content", content)
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise place.mismatch("text in every part of a message's content", part)
    return "".join(part["text"] for part in content)


def read_calls(text: str) -> list[Message] | None:
    """Parse the JSON tool calls of a ShareGPT function_call; return None if it is free text."""
    try:
        parsed = parse_json(text)
    except InvalidJSON:
        return None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def read_tools(record: Record) -> list[Mapping[str, object]] | None:
    """Read the optional `tools` column: a list of tool descriptions; the list or its items may be JSON text."""
    place = record.at("tools")
    value = parse_if_text(record.row.get("tools"), place)
    if not value:
        return None
    if not isinstance(value, list):
        raise place.mismatch("a list of tool descriptions", value)
    tools: list[Mapping[str, object]] = []
    for item in value:
        tool = parse_if_text(item, place)
        if not isinstance(tool, Mapping):
            raise place.mismatch("a list of tool descriptions", tool)
        tools.append(tool)
    return tools


def parse_if_text(value: object, place: Place) -> object:
    """Parse JSON text; return any other value unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value)
    except InvalidJSON as error:
        raise place.error(f"expected JSON, got {describe(value)} ({error.problem})") from None
