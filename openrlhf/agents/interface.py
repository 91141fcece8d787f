"""What an agent's file works with: the classes it extends, and engine objects with vLLM's names.

Everything here runs in a worker process, next to the user's code and without torch.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from openrlhf.agents.messages import plain
from openrlhf.config.sections.data import Template
from openrlhf.errors import RolloutError
from openrlhf.types import Completion, SamplingParams

DEFAULTS = vars(SamplingParams(max_tokens=1))
KINDS: dict[str, Callable[[Any], Any]] = {
    name: list if type(value) is tuple else type(value) for name, value in DEFAULTS.items()
}


@dataclass
class AgentSamplingParams:
    """How the next tokens are drawn; user code may copy and change it. A seed of None follows from the episode."""

    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    n: int = 1
    logprobs: int = 1

    def clone(self) -> AgentSamplingParams:
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Logprob:
    """The log-prob of one token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One drawn continuation; `logprobs` has for each token a dict from its id."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """What `llm_engine.generate` returns."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLMEngine(Protocol):
    """`llm_engine` as user code sees it."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: None = None
    ) -> RequestOutput: ...


class AgentExecutorBase(ABC):
    """Full control: `execute` makes one episode, token by token."""

    max_turns: int | None = None  # set from --max_turns
    scored_later: bool = False  # set when reward models score episodes whose reward is None
    template: Template = Template()  # set from the flags of chat templates

    def __init__(self, agent_instance_cls: Any = None, *older: Any, **older_by_name: Any) -> None:
        """Files of 0.8.7 to 0.9.0 hand over their agent, the engine and more; what they need of it is set elsewhere."""
        if agent_instance_cls is not None:
            self.agent_instance_cls = agent_instance_cls

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once, before the first episode."""

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any) -> RequestOutput:
        """The policy's continuation, for files of 0.8.7 to 0.9.0, which are built with the engine."""
        engine: LLMEngine = vars(self)["llm_engine"]
        return await engine.generate(prompt_ids, sampling_params)

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: LLMEngine,
    ) -> dict[str, Any]:
        """One episode: observation_tokens, action_ranges, rollout_log_probs, reward, and optionally scores,
        extra_logs, truncated."""


class AgentInstanceBase(ABC):
    """The environment of one episode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The first observation, from {observation, label}."""
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Rewards, environment_feedback and done, from {observation_text, action_text, label, sampling_params}."""


def params_for_agent(params: SamplingParams) -> AgentSamplingParams:
    values = {item.name: getattr(params, item.name) for item in fields(params) if item.name != "seed"}
    return AgentSamplingParams(**values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)})


def params_for_engine(given: Any, *, room: int, seed: int) -> dict[str, Any]:
    """The fields of SamplingParams from whatever object with vLLM's names user code hands over.

    The tokens asked for never exceed `room`; `seed` stands in where the object has none.
    """
    if getattr(given, "n", 1) not in (1, None):
        raise RolloutError(f"sampling_params.n is {given.n}: an agent asks for one continuation at a time")
    names = [item.name for item in fields(SamplingParams)]
    values = {name: plain(getattr(given, name, None)) for name in names}
    values = DEFAULTS | {"max_tokens": room, "seed": seed} | {k: v for k, v in values.items() if v is not None}
    values["stop"] = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
    try:
        values = {name: KINDS[name](value) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise RolloutError(f"sampling_params holds something that cannot be used: {error}") from None
    if values["max_tokens"] < 1:
        raise RolloutError(f"sampling_params.max_tokens is {values['max_tokens']}: nothing can be drawn")
    return values | {"max_tokens": min(values["max_tokens"], room)}


def seed_for(episode: int, request: int) -> int:
    """Each request of an episode draws from numbers of its own: equal ones would tie its turns together."""
    if request == 0:
        return episode
    return int.from_bytes(hashlib.blake2b(f"{episode}:{request}".encode(), digest_size=4).digest())


def output_of(prompt_token_ids: list[int], completion: Completion) -> RequestOutput:
    log_probs = [
        {token: Logprob(value)} for token, value in zip(completion.token_ids, completion.log_probs, strict=True)
    ]
    drawn = CompletionOutput(list(completion.token_ids), completion.text, log_probs, completion.finish_reason)
    return RequestOutput(prompt_token_ids, [drawn])
