"""An episode in the form of a chat: answers chat requests with turns of the policy and collects the training sample.

Executors whose environment speaks in messages (OpenAI's client, GEM, NeMo Gym) open an `Episode` and call `answer` for
each turn. The episode keeps the exact token ids that were sampled, so nothing is tokenised twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wire import Answer, ChatRequest, find_calls
from openrlhf.agents.executor import shorten
from openrlhf.agents.interface import AgentExecutorBase, AgentSamplingParams, CompletionOutput, LLMEngine
from openrlhf.data.messages import Message
from openrlhf.errors import ConfigError, OpenRLHFError, RolloutError

if TYPE_CHECKING:
    from openrlhf.data.templates import Chat

FindCalls = Callable[[str, int], tuple[str, list[dict[str, Any]]]]


class Full(Exception):
    """The episode has reached its token or turn limit and cannot take another turn."""


@dataclass(eq=False)
class Episode:
    """One conversation, the engine that continues it, and the first error that occurred.

    `name` and `key` identify the episode when it is served over HTTP.
    """

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
    answered: tuple[Any, Answer] | None = None  # body of the last request, and its answer
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request is answered

    def __post_init__(self) -> None:
        self.session = ChatSession(self.chat)
        self.drawn: list[CompletionOutput] = []

    async def answer(self, request: ChatRequest) -> Answer:
        """Generate the policy's next turn; raise Full if a limit has been reached after the first turn."""
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
        """Return the episode as a dict with the keys that training reads, without the reward."""
        said = self.session.transcript
        return {
            "observation_tokens": said.tokens,
            "action_ranges": said.action_ranges,
            "rollout_log_probs": said.log_probs,
            "truncated": self.full or self.drawn[-1].finish_reason == "length",
        }

    def _full(self, length: int) -> Exception:
        """Return the error for a request that does not fit: RolloutError before the first turn, Full after it."""
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
        """Return the run's sampling parameters; a request may only make a turn end earlier."""
        params = self.params.clone()
        limits = [limit for limit in (params.max_tokens, request.max_tokens) if limit is not None]
        params.max_tokens = min(limits, default=None)
        params.stop = [*params.stop, *request.stop]
        return params

    def _message(self, output: CompletionOutput, request: ChatRequest) -> Message:
        """Return the output as the assistant's message, without trailing special tokens."""
        ids, special = list(output.token_ids), self.chat.tokenizer.all_special_ids
        while ids and ids[-1] in special:
            ids.pop()
        text = str(self.chat.tokenizer.decode(ids))
        content, calls = self._calls_in(text) if request.may_call else (text, [])
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    def _calls_in(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Split a turn into text and tool calls; an error in find_calls fails the episode.

        Otherwise a client would retry until the policy samples something that find_calls can parse.
        """
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
    """Open an episode with the turn limit and chat template of an executor."""
    from openrlhf.data.templates import Chat  # imports transformers, which would delay the loading of agent files

    flags = executor.template
    if flags.tokenizer_chat_template is None and not tokenizer.chat_template:
        raise RolloutError("the tokenizer brings no chat template; give one by --tokenizer_chat_template")
    chat = Chat(tokenizer, flags.tokenizer_chat_template, flags.template_kwargs, flags.system_prompt)
    return Episode(chat, params, max_length, executor.max_turns, engine, calls)


def refuse_rendered_prompts(executor: AgentExecutorBase, who: str) -> None:
    """Reject --apply_chat_template, which would apply the template twice."""
    if executor.template.apply_chat_template:
        raise ConfigError(
            f"--apply_chat_template renders a prompt before {who} gets it, and its messages are rendered again; leave"
            " the flag out"
        )
