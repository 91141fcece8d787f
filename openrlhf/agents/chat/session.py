"""A chat as an append-only sequence of tokens.

The chat template renders the first request. Nothing is rendered or tokenised again after that: the policy's turns keep
the sampled ids, and each further request appends only the tokens that the template puts after them. A template that
shortens earlier turns, as those of reasoning models do, therefore cannot change the tokens that are trained on.

`ChatEpisode` owns a `ChatSession`; requests arrive as messages in OpenAI's format, validated by `read_chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import CompletionOutput
from openrlhf.agents.transcript import Transcript, tokenise
from openrlhf.data.messages import Conversation, Message, read_message
from openrlhf.data.records import Place
from openrlhf.errors import DataError, RolloutError

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
MARK = "openrlhf-said-this"  # replaces the policy's last turn to find what the template puts after it
REQUEST = Place("the agent's request", 1)


class ChatSession:
    """The messages of an episode and their tokens."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.messages: list[Message] = []  # of all roles, in order
        self.tools: Tools = None
        self.transcript = Transcript()

    def tokens_added(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens that a request adds; raise RolloutError if it does not continue the conversation."""
        tokenizer = self.chat.tokenizer
        if not self.messages:
            return tokenise(self.render(messages, tools), tokenizer)
        self._check_continues(messages, tools)
        # Render with a mark in place of the policy's last turn; the text after the mark is what the request adds.
        last = len(self.messages) - 1
        marked = [*messages[:last], {"role": "assistant", "content": MARK}, *messages[last + 1 :]]
        _, found, after = self.render(marked, tools).rpartition(MARK)
        if not found:
            raise RolloutError(
                "the chat template drops the assistant's last message, so turns cannot be joined into one episode",
                try_this="--tokenizer_chat_template with another template",
            )
        token_ids = tokenise(after, tokenizer)
        # Drop the template's end-of-turn token if the policy has already sampled it.
        end = self.transcript.tokens[-1]
        return token_ids[1:] if token_ids[:1] == [end] and end in tokenizer.all_special_ids else token_ids

    def add_request(self, messages: Sequence[Message], tools: Tools, token_ids: list[int]) -> None:
        """Append a request, whose tokens come from `tokens_added`."""
        self.messages, self.tools = list(messages), tools
        self.transcript.add_feedback("", token_ids)

    def add_turn(self, output: CompletionOutput, message: Message) -> None:
        """Append a turn of the policy, as tokens and as a message."""
        self.messages.append(message)
        self.transcript.add_turn(output)

    def render(self, messages: Sequence[Message], tools: Tools) -> str:
        """Render a request as text, up to the start of the assistant's turn."""
        if self.chat.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.chat.system_prompt}, *messages]
        try:
            return self.chat.render(Conversation(messages, tools, REQUEST), prompt=True).text
        except DataError as error:
            raise RolloutError(error.message) from None

    def _check_continues(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise RolloutError unless the request has the same tools and begins with the known messages."""
        if tools != self.tools:
            raise RolloutError(
                "the request's tools differ from those of its episode's first request, which are in the prompt",
                try_this='the same tools in every request, with tool_choice "none" if none may be called',
            )
        difference = ""
        for place, known in enumerate(self.messages):
            if place >= len(messages):
                difference = f"it ends after {len(messages)} messages, but the episode has {len(self.messages)}"
                break
            if comparable(messages[place]) != comparable(known):
                given, expected = (
                    shorten(json.dumps(item, ensure_ascii=False, default=str)) for item in (messages[place], known)
                )
                difference = f"message {place} is {given}, but the episode has {expected}"
                break
        if difference:
            raise RolloutError(
                f"a request does not continue the conversation of its episode: {difference}. The messages of an episode"
                " may only grow: send back each reply of the assistant unchanged, change nothing before it, and hold"
                " one conversation per episode"
            )


def comparable(message: Message) -> tuple[object, ...]:
    """Return the part of a message that a later request must repeat unchanged.

    Clients may strip blanks around the assistant's text and change the ids of its tool calls.
    """
    if message["role"] != "assistant":
        return tuple(sorted(message.items(), key=lambda item: item[0]))
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return "assistant", message["content"].strip(), [(item["name"], item["arguments"]) for item in functions]


def read_chat(given: object) -> list[Message]:
    """Read the messages of a request in the form that templates expect: text content, call arguments as objects."""
    at = Place(REQUEST.source, REQUEST.row, "messages")
    if not isinstance(given, list) or not given:
        raise at.mismatch("a list of messages", given)
    messages = [read_message(item, at) for item in given]
    for message in messages:
        calls = message.pop("tool_calls", None)
        if calls and not isinstance(calls, list):
            raise at.mismatch("a list of tool calls", calls)
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
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            raise at.mismatch("JSON as the arguments of a tool call", arguments) from None
    return {**call, "function": {**function, "arguments": arguments}}
