"""A chat as an append-only sequence of tokens.

The chat template renders the first request. Nothing is rendered or tokenised again after that: the policy's turns stay
the sampled ids, and each further request appends only the tokens that the template puts after them. A template that
shortens earlier turns, as those of reasoning models do, therefore cannot change the tokens that are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import CompletionOutput
from openrlhf.agents.multi_turn import Transcript, tokenise
from openrlhf.data.messages import Conversation, Field, Message, read_message
from openrlhf.data.records import Place
from openrlhf.errors import DataError, RolloutError

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

Tools = Sequence[Mapping[str, Any]] | None
MARK = "openrlhf-said-this"  # replaces the policy's last turn to find what the template puts after it
REQUEST = Place("the agent's request", 1)


class ChatSession:
    """The messages of an episode and their tokens, kept in step by `hear` and `say`."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.messages: list[Message] = []  # of all roles, in order
        self.tools: Tools = None
        self.transcript = Transcript("", [], [])

    def extension(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens that a request adds; raise RolloutError if it does not continue the conversation."""
        if not self.messages:
            return tokenise(self.render(messages, tools), self.chat.tokenizer)
        self._check(messages, tools)
        # Render with a mark in place of the policy's last turn; the text after the mark is what the request adds.
        last = len(self.messages) - 1
        marked = [*messages[:last], {"role": "assistant", "content": MARK}, *messages[last + 1 :]]
        _, found, after = self.render(marked, tools).rpartition(MARK)
        if not found:
            raise RolloutError(
                "the chat template leaves out what the assistant said last, so the turns of an episode cannot be"
                " joined; give another one by --tokenizer_chat_template"
            )
        return self._without_second_end(tokenise(after, self.chat.tokenizer))

    def hear(self, messages: Sequence[Message], tools: Tools, token_ids: list[int]) -> None:
        """Append a request, whose tokens come from `extension`."""
        self.messages, self.tools = list(messages), tools
        self.transcript.feed("", token_ids)

    def say(self, drawn: CompletionOutput, message: Message) -> None:
        """Append a turn of the policy."""
        self.messages.append(message)
        self.transcript.act(drawn)

    def render(self, messages: Sequence[Message], tools: Tools) -> str:
        """Render a request as text, up to the start of the assistant's turn."""
        if self.chat.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.chat.system_prompt}, *messages]
        try:
            return self.chat.render(Conversation(messages, tools, REQUEST), prompt=True).text
        except DataError as error:
            raise RolloutError(error.message) from None

    def _check(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raise RolloutError unless the request has the same tools and begins with the known messages."""
        if tools != self.tools:
            raise RolloutError(
                "the request has other tools than the first one of its episode, where they were put into the prompt;"
                ' send the same tools each time, with tool_choice "none" where none may be called'
            )
        for place, known in enumerate(self.messages):
            if place >= len(messages):
                raise rewritten(f"it ends after {len(messages)} messages, where the episode has {len(self.messages)}")
            if compared(messages[place]) != compared(known):
                raise rewritten(f"message {place} is {shown(messages[place])}, where the episode has {shown(known)}")

    def _without_second_end(self, token_ids: list[int]) -> list[int]:
        """Drop the template's end-of-turn token if the policy has already sampled it."""
        end = self.transcript.tokens[-1]
        is_ended = token_ids[:1] == [end] and end in self.chat.tokenizer.all_special_ids
        return token_ids[1:] if is_ended else token_ids


def rewritten(difference: str) -> RolloutError:
    """Return the error for a request that changes earlier messages."""
    return RolloutError(
        f"a request does not continue the conversation of its episode: {difference}. The messages of an episode may"
        " only grow: send back each reply of the assistant as it came, change nothing before it, have one conversation"
    )


def compared(message: Message) -> tuple[Any, ...]:
    """Return the part of a message that a later request must repeat unchanged.

    Clients may strip blanks around the assistant's text and change the ids of its tool calls.
    """
    if message["role"] != "assistant":
        return tuple(sorted(message.items(), key=lambda item: item[0]))
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return "assistant", message["content"].strip(), [(item["name"], item["arguments"]) for item in functions]


def shown(message: Message) -> str:
    return shorten(json.dumps(message, ensure_ascii=False, default=str))


def read_chat(given: Any) -> list[Message]:
    """Read the messages of a request in the form that templates expect: text content, call arguments as objects."""
    at = Field(REQUEST, "messages")
    if not isinstance(given, list) or not given:
        raise at.wants("a list of messages", given)
    return [with_open_arguments(read_message(item, at), at) for item in given]


def with_open_arguments(message: Message, at: Field) -> Message:
    """Decode the arguments of the message's tool calls; drop an empty `tool_calls`."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list):
        raise at.wants("a list of tool calls", calls)
    return {**message, "tool_calls": [open_call(call, at) for call in calls]}


def open_call(call: Any, at: Field) -> dict[str, Any]:
    """Validate a tool call and decode arguments that came as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise at.wants("a tool call with function.name and function.arguments", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            raise at.wants("JSON as the arguments of a tool call", arguments) from None
    return {**call, "function": {**function, "arguments": arguments}}
