"""Checks of sampling parameters that an agent changes during an episode.

The trainer must score a token under the distribution it was sampled from. A changed temperature is recorded per token,
because the trainer can divide logits by any temperature. It cannot reproduce which tokens were excluded or penalised,
so top_p, top_k, min_p and penalties are rejected if the loss compares the log-probs of engine and trainer, unless the
engine returns log-probs of the whole vocabulary. `AgentEpisodes` calls these functions with the parameters of all
requests of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams


@dataclass(frozen=True)
class EngineLogProbs:
    """What the engine's log-probs are in a run, and whether the loss compares them with the trainer's."""

    compared: bool = False
    whole: bool = False  # over the whole vocabulary, before tokens are excluded or penalised
    before_temperature: bool = False  # also before the division by the temperature, as in vLLM


def check_overrides(run: SamplingParams, requested: Sequence[SamplingParams], log_probs: EngineLogProbs) -> None:
    """Raise RolloutError for sampling parameters that training cannot account for.

    `run` has the sampling parameters of the run, `requested` those of an episode's requests.
    """
    for params in requested:
        if params.temperature <= 0 < run.temperature:
            raise RolloutError(
                f"sampling_params.temperature is {params.temperature:g}: expected a number above 0, because greedy "
                "turns do not explore"
            )
        if log_probs.compared and (found := find_mismatch(run, params, log_probs)):
            raise RolloutError(
                f"sampling_params.{found} changes the sampling distribution, so the importance weights would be wrong",
                try_this=f"leave {found.split('=')[0]} unchanged, or --enable_vllm_is_correction false",
            )


def temperature_factors(run: SamplingParams, requested: Sequence[SamplingParams]) -> list[float]:
    """Return the temperature of each request divided by the run's, or 1 in greedy evaluation."""
    return [params.temperature / run.temperature if run.temperature > 0 else 1.0 for params in requested]


def find_mismatch(run: SamplingParams, params: SamplingParams, log_probs: EngineLogProbs) -> str | None:
    """Return the first parameter that makes the engine's log-probs differ from log softmax(logits / temperature)."""
    if log_probs.whole:
        differs = log_probs.before_temperature and params.temperature != run.temperature
        return f"temperature={params.temperature:g}" if differs else None
    restrictions = {
        f"top_p={params.top_p:g}": params.top_p < 1,
        f"top_k={params.top_k}": params.top_k > 0,
        f"min_p={params.min_p:g}": params.min_p > 0,
        f"repetition_penalty={params.repetition_penalty:g}": params.repetition_penalty != 1,
    }
    return next((name for name, applies in restrictions.items() if applies), None)
