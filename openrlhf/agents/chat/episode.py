"""Episodes in the form of a chat: answer chat requests with turns of the policy and collect the training sample.

Executors whose environment exchanges messages (OpenAI's client, GEM, NeMo Gym) extend `ChatExecutor`, open a
`ChatEpisode` and call `answer` for each turn. The chat is an append-only sequence of tokens: the chat template renders
the first request, and nothing is rendered or tokenised again after that. The policy's turns keep the sampled ids, and
each further request appends only the tokens that the template puts after them. A template that shortens earlier turns,
as those of reasoning models do, therefore cannot change the tokens that are trained on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from openrlhf.agents.chat.wire import REQUEST, ChatRequest, ChatTurn, ToolCall, Tools, find_calls
from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentSamplingParams, CompletionOutput, EpisodeExecutor, EpisodeResult, EpisodeTask
from openrlhf.agents.sandbox.messages import Json
from openrlhf.agents.transcript import Transcript, tokenise
from openrlhf.data.messages import Conversation, Message
from openrlhf.errors import ConfigError, DataError, OpenRLHFError, RolloutError, counted

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

FindCalls: TypeAlias = Callable[[str, int], tuple[str, list[ToolCall]]]


class EpisodeFull(Exception):
    """The episode has reached its token or turn limit, so no further turn is possible."""


@dataclass(eq=False)
class ChatEpisode:
    """One conversation with its tokens, the engine that continues it, and the first error that occurred.

    `name` and `key` identify the episode when it is served over HTTP.
    """

    chat: Chat
    task: EpisodeTask
    max_turns: int | None
    find_calls: FindCalls
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(16)}")
    error: OpenRLHFError | None = None  # error of the first request that could not be served
    is_full: bool = False  # a request arrived after the last possible turn
    last_answer: tuple[dict[str, Json], ChatTurn] | None = None  # body of the last request, and its answer
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request is answered
    messages: list[Message] = field(default_factory=list)  # all messages so far, of all roles
    tools: Tools = None
    transcript: Transcript = field(default_factory=Transcript)
    outputs: list[CompletionOutput] = field(default_factory=list)  # turns of the policy so far

    async def answer(self, request: ChatRequest) -> ChatTurn:
        """Generate the policy's next turn; raise EpisodeFull if a limit has been reached after the first turn."""
        task = self.task
        added = self.tokens_added(request.messages, request.tools)
        prompt_ids = [*self.transcript.tokens, *added]
        if len(prompt_ids) >= task.max_length or len(self.outputs) == self.max_turns:
            if not self.outputs:
                raise RolloutError(
                    f"the first request of an episode has {len(prompt_ids)} tokens: expected fewer than"
                    f" {task.max_length}, the limit for the whole episode",
                    try_this="a shorter request, or a larger --max_len (or --prompt_max_len and --generate_max_len)",
                )
            self.is_full = True
            raise EpisodeFull(
                f"the episode is over: it has {len(prompt_ids)} tokens (limit: {task.max_length}) before its next turn,"
                f" and {counted(len(self.outputs), 'turn')} (limit: {self.max_turns or 'none'})"
            )
        self.messages, self.tools = list(request.messages), request.tools
        self.transcript.add_feedback("", added)

        # The run's sampling parameters apply; a request may only make a turn end earlier.
        params: AgentSamplingParams = task.sampling_params.clone()
        limits = [limit for limit in (params.max_tokens, request.max_tokens) if limit is not None]
        params.max_tokens = min(limits, default=None)
        params.stop = [*params.stop, *request.stop]
        output = (await task.engine.generate(prompt_ids, params)).outputs[0]

        message = self._make_message(output, may_call=request.may_call)
        self.messages.append(message)
        self.transcript.add_turn(output)
        self.outputs.append(output)
        texts = [str(self.chat.tokenizer.decode([token])) for token in output.token_ids]
        return ChatTurn(len(self.outputs), message, output, prompt_ids, texts)

    def tokens_added(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the tokens that a request adds; raise RolloutError if it does not continue the conversation."""
        tokenizer = self.chat.tokenizer
        if not self.messages:
            return tokenise(self.render(messages, tools), tokenizer)
        self._check_continues(messages, tools)
        # Render with a mark in place of the policy's last turn; the request adds the text after the mark.
        last = len(self.messages) - 1
        mark = secrets.token_hex(16)  # random, because the policy or a tool could produce a fixed mark
        marked = [*messages[:last], {"role": "assistant", "content": mark}, *messages[last + 1 :]]
        _, found, after = self.render(marked, tools).rpartition(mark)
        if not found:
            raise RolloutError(
                "the chat template drops the assistant's last message, so turns cannot be joined into one episode",
                try_this="--tokenizer_chat_template with another template",
            )
        token_ids = tokenise(after, tokenizer)
        # Drop the template's end-of-turn token if the policy has already sampled it.
        end = self.transcript.tokens[-1]
        return token_ids[1:] if token_ids[:1] == [end] and end in tokenizer.all_special_ids else token_ids

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
                try_this='the same tools in every request, with tool_choice "none" to forbid calls',
            )
        difference = ""
        if len(messages) < len(self.messages):
            difference = f"it ends after {counted(len(messages), 'message')}, but the episode has {len(self.messages)}"
        for place, pair in enumerate(zip(messages, self.messages, strict=False)):
            if comparable(pair[0]) != comparable(pair[1]):
                given, expected = (shorten(json.dumps(item, ensure_ascii=False, default=str)) for item in pair)
                difference = f"message {place} is {given}, but the episode has {expected}"
                break
        if difference:
            raise RolloutError(
                f"a request does not continue the conversation of its episode: {difference}. Try: append messages"
                " without changing earlier ones, send back each reply of the assistant unchanged, and hold one"
                " conversation per episode"
            )

    def _make_message(self, output: CompletionOutput, *, may_call: bool) -> Message:
        """Return the output as the assistant's message, without trailing special tokens.

        An error in find_calls fails the episode. Otherwise a client would retry until the policy samples something
        that find_calls can parse.
        """
        ids, special = list(output.token_ids), self.chat.tokenizer.all_special_ids
        while ids and ids[-1] in special:
            ids.pop()
        text = str(self.chat.tokenizer.decode(ids))
        if not may_call:
            return {"role": "assistant", "content": text}
        try:
            content, calls = self.find_calls(text, len(self.outputs))
        except Exception as error:  # the user's code may raise anything
            raise RolloutError(
                f"find_calls raised {type(error).__name__}: {error}, for {shorten(text)}: expected"
                " it to return malformed calls as text"
            ) from error
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    def result(self) -> EpisodeResult:
        """Return the episode in the form that `execute` returns, without the reward."""
        return self.transcript.result(truncated=self.is_full or self.outputs[-1].finish_reason == "length")


def comparable(message: Message) -> object:
    """Return the part of a message that a later request must repeat unchanged.

    Clients may strip whitespace around the assistant's text and change the ids of its tool calls.
    """
    if message["role"] != "assistant":
        return message
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return "assistant", message["content"].strip(), [(item["name"], item["arguments"]) for item in functions]


class ChatExecutor(EpisodeExecutor):
    """Base class of executors whose episodes are chats, rendered with the chat template."""

    async def prepare(self) -> None:
        """Reject --apply_chat_template, which would apply the template twice."""
        if self.template.apply_chat_template:
            raise ConfigError(
                "--apply_chat_template would apply the template twice, because the agent's messages are also"
                " rendered with it: leave the flag out"
            )

    def open_chat(self, task: EpisodeTask, calls: FindCalls = find_calls) -> ChatEpisode:
        """Open an episode with the turn limit and chat template of this executor."""
        from openrlhf.data.templates import Chat  # imported late: transformers would delay the loading of agent files

        flags, tokenizer = self.template, task.tokenizer
        if flags.tokenizer_chat_template is None and not tokenizer.chat_template:
            raise RolloutError("the tokenizer has no chat template", try_this="--tokenizer_chat_template '...'")
        chat = Chat(tokenizer, flags.tokenizer_chat_template, flags.template_kwargs, flags.system_prompt)
        return ChatEpisode(chat, task, self.max_turns, calls)
