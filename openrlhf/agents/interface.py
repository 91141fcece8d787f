"""Public interface for agent files: base classes to extend, and engine objects with vLLM's names.

Agent files import the base classes through `openrlhf.utils.agent`. Everything here runs in a worker process next to the
user's code and does not import torch.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from openrlhf.agents.sandbox.messages import plain
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.errors import RolloutError
from openrlhf.types import Completion, SamplingParams

DEFAULTS = vars(SamplingParams(max_tokens=1))
KINDS: dict[str, Callable[[Any], Any]] = {
    name: list if type(value) is tuple else type(value) for name, value in DEFAULTS.items()
}


@dataclass
class AgentSamplingParams:
    """Sampling settings of the next request, which user code may copy and change.

    With a seed of None, the seed is derived from the episode. With max_tokens of None, only the context limits a turn.
    """

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
    """The log-prob of one token, in vLLM's format."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sampled continuation; `logprobs` holds one dict per token, keyed by token id."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """Return value of `llm_engine.generate`."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLMEngine(Protocol):
    """The `llm_engine` that user code gets."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: None = None
    ) -> RequestOutput: ...


class AgentExecutorBase(ABC):
    """Base class for full control: `execute` runs one episode and returns its tokens."""

    max_turns: int | None = None  # set from --max_turns
    scored_later: bool = False  # set when reward models score episodes whose reward is None
    template: TemplateFlags = TemplateFlags()  # set from the flags of chat templates

    def __init__(self, agent_instance_cls: Any = None, *older: Any, **older_by_name: Any) -> None:
        """Accept the arguments that files of 0.8.7 to 0.9.0 pass: their agent class, the engine and more.

        Only the agent class is used; `OlderExecutor` sets the other attributes.
        """
        if agent_instance_cls is not None:
            self.agent_instance_cls = agent_instance_cls

    async def prepare(self) -> None:  # noqa: B027 - most executors need no setup
        """Set up the executor; called once, before the first episode."""

    async def generate(self, prompt_ids: Sequence[int], sampling_params: Any) -> RequestOutput:
        """Return the policy's continuation; for files of 0.8.7 to 0.9.0, which are built with the engine."""
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
        """Run one episode and return it as a dict.

        observation_tokens: ids of the whole episode, prompt included.
        action_ranges: half-open (start, end) ranges of the tokens that the policy sampled, in order.
        rollout_log_probs: one per token, 0.0 outside actions; None to take them from the engine's record.
        reward: a number; None to leave it to reward models.
        Optional: scores (default: the reward), extra_logs, truncated, step_rewards.
        """


class AgentInstanceBase(ABC):
    """The environment of one episode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return {observation}, the first observation; `states` holds observation (the prompt) and label."""
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Respond to a turn of the policy with rewards, environment_feedback and done.

        `states` holds observation_text, action_text, label and sampling_params.
        """


def params_for_agent(params: SamplingParams) -> AgentSamplingParams:
    """Convert the run's parameters for user code, without the seed."""
    values = {item.name: getattr(params, item.name) for item in fields(params) if item.name != "seed"}
    return AgentSamplingParams(**values | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)})


def params_for_engine(given: Any, *, room: int, seed: int) -> dict[str, Any]:
    """Read the fields of SamplingParams from any object with vLLM's attribute names.

    max_tokens is capped at `room`; `seed` is used if the object has none.
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
    """Derive the seed of a request; turns of an episode with equal seeds would be correlated."""
    if request == 0:
        return episode
    return int.from_bytes(hashlib.blake2b(f"{episode}:{request}".encode(), digest_size=4).digest())


def output_of(prompt_token_ids: list[int], completion: Completion) -> RequestOutput:
    """Convert an engine's completion to vLLM's format."""
    log_probs = [
        {token: Logprob(value)} for token, value in zip(completion.token_ids, completion.log_probs, strict=True)
    ]
    drawn = CompletionOutput(list(completion.token_ids), completion.text, log_probs, completion.finish_reason)
    return RequestOutput(prompt_token_ids, [drawn])
