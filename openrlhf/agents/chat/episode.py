"""An episode in the form of a chat: answers chat requests with turns of the policy and collects the training sample.

Executors whose environment exchanges messages (OpenAI's client, GEM, NeMo Gym) extend `ChatExecutor`, open a
`ChatEpisode` and call `answer` for each turn. The episode keeps the exact token ids that were sampled, so nothing is
tokenised twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wire import ChatRequest, ChatTurn, ToolCall, find_calls
from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentSamplingParams, CompletionOutput, EpisodeExecutor, EpisodeResult, EpisodeTask
from openrlhf.agents.sandbox.messages import Json
from openrlhf.data.messages import Message
from openrlhf.errors import ConfigError, OpenRLHFError, RolloutError

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

FindCalls: TypeAlias = Callable[[str, int], tuple[str, list[ToolCall]]]


class EpisodeFull(Exception):
    """The episode has reached its token or turn limit and cannot take another turn."""


@dataclass(eq=False)
class ChatEpisode:
    """One conversation, the engine that continues it, and the first error that occurred.

    `name` and `key` identify the episode when it is served over HTTP.
    """

    chat: Chat
    task: EpisodeTask
    max_turns: int | None
    find_calls: FindCalls
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(16)}")
    error: OpenRLHFError | None = None  # first request that could not be served
    is_full: bool = False  # a request arrived after the last possible turn
    last_answer: tuple[dict[str, Json], ChatTurn] | None = None  # body of the last request, and the turn it got
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request is answered
    outputs: list[CompletionOutput] = field(default_factory=list)  # turns of the policy so far

    def __post_init__(self) -> None:
        self.session = ChatSession(self.chat)

    async def answer(self, request: ChatRequest) -> ChatTurn:
        """Generate the policy's next turn; raise EpisodeFull if a limit has been reached after the first turn."""
        session, task = self.session, self.task
        added = session.tokens_added(request.messages, request.tools)
        prompt_ids = [*session.transcript.tokens, *added]
        if len(prompt_ids) >= task.max_length or len(self.outputs) == self.max_turns:
            if not self.outputs:
                raise RolloutError(
                    f"the first request of an episode has {len(prompt_ids)} tokens, and prompt and turns together may"
                    f" have {task.max_length}",
                    try_this="a shorter request, or a larger --max_len (or --prompt_max_len and --generate_max_len)",
                )
            self.is_full = True
            raise EpisodeFull(
                f"the episode is over: its next turn would begin with {len(prompt_ids)} tokens of at most"
                f" {task.max_length}, after {len(self.outputs)} turns of at most {self.max_turns or 'any number'}"
            )
        session.add_request(request.messages, request.tools, added)

        # The run's sampling parameters apply; a request may only make a turn end earlier.
        params: AgentSamplingParams = task.sampling_params.clone()
        limits = [limit for limit in (params.max_tokens, request.max_tokens) if limit is not None]
        params.max_tokens = min(limits, default=None)
        params.stop = [*params.stop, *request.stop]
        output = (await task.engine.generate(prompt_ids, params)).outputs[0]

        message = self._make_message(output, may_call=request.may_call)
        session.add_turn(output, message)
        self.outputs.append(output)
        texts = [str(self.chat.tokenizer.decode([token])) for token in output.token_ids]
        return ChatTurn(len(self.outputs), message, output, prompt_ids, texts)

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
        except Exception as error:
            raise RolloutError(
                f"find_calls raised {type(error).__name__}: {error}, for {shorten(text)}; it should return calls it"
                " cannot parse as text"
            ) from error
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    def result(self) -> EpisodeResult:
        """Return the episode in the form that `execute` returns, without the reward."""
        return self.session.transcript.result(truncated=self.is_full or self.outputs[-1].finish_reason == "length")


class ChatExecutor(EpisodeExecutor):
    """Base of executors whose episodes are chats: turns go through the chat template."""

    async def prepare(self) -> None:
        """Reject --apply_chat_template, which would apply the template twice."""
        if self.template.apply_chat_template:
            raise ConfigError(
                "--apply_chat_template renders prompts before the agent gets them, and its messages are rendered again:"
                " leave the flag out"
            )

    def open_chat(self, task: EpisodeTask, calls: FindCalls = find_calls) -> ChatEpisode:
        """Open an episode with the turn limit and chat template of this executor."""
        from openrlhf.data.templates import Chat  # imports transformers, which would delay the loading of agent files

        flags, tokenizer = self.template, task.tokenizer
        if flags.tokenizer_chat_template is None and not tokenizer.chat_template:
            raise RolloutError("the tokenizer has no chat template", try_this="--tokenizer_chat_template '...'")
        chat = Chat(tokenizer, flags.tokenizer_chat_template, flags.template_kwargs, flags.system_prompt)
        return ChatEpisode(chat, task, self.max_turns, calls)
