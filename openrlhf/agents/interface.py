"""Public interface for agent files: base classes to extend, and engine objects named as in vLLM.

Agent files import the base classes from `openrlhf.utils.agent`. A worker process loads the file, builds its executor
and calls `execute` once per episode; it sends the returned dict (`EpisodeResult`) to the trainer, where
`trajectory.read_trajectory` validates it. Executors of this package extend `EpisodeExecutor`, which packs the arguments
of `execute` into one `EpisodeTask`. This module runs in the worker process and does not import torch.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from openrlhf.agents.sandbox.messages import Json, plain
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.errors import RolloutError
from openrlhf.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class AgentSamplingParams:
    """Sampling parameters of the next request, which user code may copy and change."""

    max_tokens: int | None  # None: limited only by the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None  # None: derived from the episode's seed
    n: int = 1
    logprobs: int = 1

    def clone(self) -> AgentSamplingParams:
        """Return a copy, like vLLM's method of the same name."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Logprob:
    """The log-prob of one token, in vLLM's format."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sampled continuation."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]]  # one dict per token, keyed by token id
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """Return value of `llm_engine.generate`."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True

    @classmethod
    def from_completion(cls, prompt_token_ids: list[int], completion: Completion) -> RequestOutput:
        """Convert an engine's completion to vLLM's format."""
        token_ids = completion.token_ids.tolist()
        pairs = zip(token_ids, completion.log_probs.tolist(), strict=True)
        log_probs = [{token: Logprob(value)} for token, value in pairs]
        output = CompletionOutput(token_ids, completion.text, log_probs, completion.finish_reason)
        return cls(prompt_token_ids, [output])


class LLMEngine(Protocol):
    """The `llm_engine` that user code gets; `sampling_params` may be any object with vLLM's attribute names."""

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: object, multi_modal_data: None = None
    ) -> RequestOutput: ...


class EpisodeResult(TypedDict, total=False):
    """Return value of `execute`."""

    observation_tokens: list[int]  # token ids of the whole episode, including the prompt
    action_ranges: list[tuple[int, int]]  # half-open token ranges of the policy's turns, in order
    rollout_log_probs: list[float] | None  # one per token, 0.0 outside actions; None: use the engine's
    reward: object  # a number; None: reward models score the episode
    scores: object  # a number for dynamic filtering; None: use the reward
    extra_logs: object  # a dict of numbers
    truncated: bool
    step_rewards: list[tuple[int, float]]  # (index of a turn's last action token, reward)
    prompt: str
    label: object


class AgentExecutorBase(ABC):
    """Base class for full control over an episode: `execute` runs it and returns its tokens."""

    max_turns: int | None = None  # set from --max_turns
    scored_later: bool = False  # True if reward models score episodes whose reward is None
    template: TemplateFlags = TemplateFlags()  # set from the template flags

    def __init__(
        self,
        agent_instance_cls: Callable[[], AgentInstanceBase] | None = None,
        *legacy: object,
        **legacy_by_name: object,
    ) -> None:
        """Accept the arguments that files for 0.8.7 to 0.9.0 pass: their agent class, the engine and others.

        Only the agent class is used; `LegacyExecutor` sets the other attributes.
        """
        if agent_instance_cls is not None:
            self.agent_instance_cls = agent_instance_cls

    async def prepare(self) -> None:  # noqa: B027 - most executors need no setup
        """Set up the executor; called once, before the first episode."""

    async def generate(self, prompt_ids: Sequence[int], sampling_params: object) -> RequestOutput:
        """Return the policy's continuation. Agent files written for OpenRLHF 0.8.7 to 0.9.0 call it."""
        engine: LLMEngine = vars(self)["llm_engine"]
        return await engine.generate(prompt_ids, sampling_params)

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: AgentSamplingParams,
        max_length: int,
        hf_tokenizer: PreTrainedTokenizerBase,
        llm_engine: LLMEngine,
    ) -> EpisodeResult | list[EpisodeResult]:
        """Run one episode of at most `max_length` tokens and return it.

        The result is a dict with observation_tokens, action_ranges, rollout_log_probs and reward. Optional keys are
        scores (default: the reward), extra_logs, truncated and step_rewards; `EpisodeResult` describes them.

        If the episode is not one growing sequence of tokens, return a list of such dicts, one for each sequence. The
        reward and the scores of the last one hold for all. An action belongs to the ranges of only one of them.
        """


@dataclass(frozen=True)
class EpisodeTask:
    """The arguments of `AgentExecutorBase.execute` for one episode."""

    prompt: str
    label: Any  # the value of --label_key
    sampling_params: AgentSamplingParams
    max_length: int  # maximum tokens of the episode, including the prompt
    tokenizer: PreTrainedTokenizerBase
    engine: LLMEngine


class EpisodeExecutor(AgentExecutorBase):
    """Base class of the executors in this package; subclasses implement `run_episode`."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: AgentSamplingParams,
        max_length: int,
        hf_tokenizer: PreTrainedTokenizerBase,
        llm_engine: LLMEngine,
    ) -> EpisodeResult | list[EpisodeResult]:
        """Run one episode and return it with its prompt and label."""
        task = EpisodeTask(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        result = await self.run_episode(task)
        if not isinstance(result, Mapping):  # several, or invalid: `read_trajectory` reports what is expected
            return result
        return {"prompt": prompt, "label": label, **result}

    @abstractmethod
    async def run_episode(self, task: EpisodeTask) -> EpisodeResult | list[EpisodeResult]:
        """Run one episode and return its tokens and reward; see `execute`."""


class ResetStates(TypedDict):
    """Argument and return value of `AgentInstanceBase.reset`."""

    observation: str  # the prompt; `reset` may return other text
    label: Any


class StepStates(TypedDict):
    """Argument of `AgentInstanceBase.step`."""

    observation_text: str  # everything before the policy's turn
    action_text: str  # the policy's turn
    label: Any
    sampling_params: Any  # parameters of this turn; `step` may return others for the next turn


class AgentInstanceBase(ABC):
    """The environment of one episode."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    async def reset(self, states: ResetStates, **kwargs: object) -> Mapping[str, object]:
        """Return a dict with the first observation; `states` contains observation (the prompt) and label."""
        return states

    @abstractmethod
    async def step(self, states: StepStates, **kwargs: object) -> Mapping[str, object]:
        """Respond to a turn of the policy: return a dict with rewards, environment_feedback and done.

        `states` contains observation_text, action_text, label and sampling_params. Optional keys of the result are
        scores, extra_logs and sampling_params (for the next turn).
        """


def params_for_agent(params: SamplingParams) -> AgentSamplingParams:
    """Convert the sampling parameters of a run for user code, without the seed."""
    given = AgentSamplingParams(**vars(params))
    given.stop, given.stop_token_ids, given.seed = list(params.stop), list(params.stop_token_ids), None
    return given


def params_for_engine(given: object, *, limit: int, seed: int) -> SamplingParams:
    """Read the fields of SamplingParams from any object with vLLM's attribute names.

    max_tokens is at most `limit`; `seed` is used if the object has none. Missing fields and None become the defaults.
    """
    count = getattr(given, "n", 1)
    if count not in (1, None):
        raise RolloutError(
            f"sampling_params.n is {count}: expected 1, because an agent gets one continuation per request"
        )
    defaults = vars(SamplingParams(max_tokens=limit, seed=seed))
    values = dict(defaults)
    for name, default in defaults.items():
        value: Json = plain(getattr(given, name, None))
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        try:
            values[name] = type(default)(value)  # int, float or tuple
        except (TypeError, ValueError) as error:
            raise RolloutError(f"sampling_params.{name} cannot be used: {error}") from None
    if "" in values["stop"]:
        raise RolloutError("sampling_params.stop has an empty string, which every response contains")
    if values["max_tokens"] < 1:
        raise RolloutError(f"sampling_params.max_tokens is {values['max_tokens']}: expected at least 1")
    return SamplingParams(**values | {"max_tokens": min(values["max_tokens"], limit)})


def seed_for(episode: int, request: int) -> int:
    """Derive the seed of a request, different for each turn of an episode; equal seeds would correlate the turns."""
    if request == 0:
        return episode
    return int.from_bytes(hashlib.blake2b(f"{episode}:{request}".encode(), digest_size=4).digest())
