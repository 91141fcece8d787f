"""An episode that is a chat: the policy's turns as messages, and the sample that comes of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat_session import ChatSession
from openrlhf.agents.chat_wire import Answer, ChatRequest, find_calls
from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentExecutorBase, AgentSamplingParams, CompletionOutput, LLMEngine
from openrlhf.data.messages import Message
from openrlhf.errors import ConfigError, OpenRLHFError, RolloutError

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

FindCalls = Callable[[str, int], tuple[str, list[dict[str, Any]]]]


class Full(Exception):
    """The episode has no room for another turn."""


@dataclass(eq=False)
class Episode:
    """A conversation, the engine that continues it, and what went wrong; served over HTTP, a name and a key."""

    chat: Chat
    params: AgentSamplingParams
    max_length: int
    max_turns: int | None
    engine: LLMEngine
    find_calls: FindCalls = find_calls
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(16)}")
    trouble: OpenRLHFError | None = None
    full: bool = False
    answered: tuple[Any, Answer] | None = None  # the last request and its answer
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.session = ChatSession(self.chat)
        self.drawn: list[CompletionOutput] = []

    async def answer(self, request: ChatRequest) -> Answer:
        """The policy's next turn."""
        session = self.session
        added = session.extension(request.messages, request.tools)
        asked = [*session.transcript.tokens, *added]
        if len(asked) >= self.max_length or len(self.drawn) == self.max_turns:
            raise self._full(len(asked))
        session.hear(request.messages, request.tools, added)
        output = (await self.engine.generate(asked, self._params(request))).outputs[0]
        message = self._message(output, request)
        session.say(output, message)
        self.drawn.append(output)
        texts = [str(self.chat.tokenizer.decode([token])) for token in output.token_ids]
        return Answer(len(self.drawn), message, output, asked, texts)

    def sample(self) -> dict[str, Any]:
        """The episode with the keys that training reads, less its reward."""
        said = self.session.transcript
        return {
            "observation_tokens": said.tokens,
            "action_ranges": said.action_ranges,
            "rollout_log_probs": said.log_probs,
            "truncated": self.full or self.drawn[-1].finish_reason == "length",
        }

    def _full(self, length: int) -> Exception:
        if not self.drawn:
            return RolloutError(
                f"the first request of an episode has {length} tokens, and prompt and turns together may have"
                f" {self.max_length}: ask with less, or raise --max_len (or --prompt_max_len and --generate_max_len)"
            )
        self.full = True
        return Full(
            f"the episode is over: its next turn would begin with {length} tokens of at most {self.max_length}, after"
            f" {len(self.drawn)} turns of at most {self.max_turns or 'any number'}"
        )

    def _params(self, request: ChatRequest) -> AgentSamplingParams:
        """The run's own; a request may only end a turn earlier."""
        params = self.params.clone()
        limits = [limit for limit in (params.max_tokens, request.max_tokens) if limit is not None]
        params.max_tokens = min(limits, default=None)
        params.stop = [*params.stop, *request.stop]
        return params

    def _message(self, output: CompletionOutput, request: ChatRequest) -> Message:
        """What was drawn, less the special tokens that end it, as the assistant's message."""
        ids, special = list(output.token_ids), self.chat.tokenizer.all_special_ids
        while ids and ids[-1] in special:
            ids.pop()
        text = str(self.chat.tokenizer.decode(ids))
        content, calls = self._calls_in(text) if request.may_call else (text, [])
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    def _calls_in(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """A client would ask again after an error of find_calls, until something is drawn that it can read."""
        try:
            return self.find_calls(text, len(self.drawn))
        except Exception as error:
            raise RolloutError(
                f"find_calls raised {type(error).__name__}: {error}, for {shorten(text)}; what it cannot read it should"
                " return as text"
            ) from error


def open_episode(
    executor: AgentExecutorBase,
    params: AgentSamplingParams,
    max_length: int,
    tokenizer: Any,
    engine: LLMEngine,
    calls: FindCalls = find_calls,
) -> Episode:
    """An episode under the limits and the chat template of an executor."""
    from openrlhf.data.templates import Chat  # transformers, which the file of an agent need not wait for

    flags = executor.template
    if flags.tokenizer_chat_template is None and not tokenizer.chat_template:
        raise RolloutError("the tokenizer brings no chat template; give one by --tokenizer_chat_template")
    chat = Chat(tokenizer, flags.tokenizer_chat_template, flags.template_kwargs, flags.system_prompt)
    return Episode(chat, params, max_length, executor.max_turns, engine, calls)


def refuse_rendered_prompts(executor: AgentExecutorBase, who: str) -> None:
    if executor.template.apply_chat_template:
        raise ConfigError(
            f"--apply_chat_template renders a prompt before {who} gets it, and its messages are rendered again; leave"
            " the flag out"
        )
