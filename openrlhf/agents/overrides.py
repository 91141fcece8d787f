"""Checks of sampling parameters that an agent changes during an episode.

The trainer must score a token under the distribution it was sampled from. A changed temperature is recorded per token,
because the trainer can divide logits by any temperature. It cannot reproduce which tokens were excluded or penalised,
so top_p, top_k, min_p and penalties are rejected if the loss compares the log-probs of engine and trainer.
`AgentEpisodes` calls these functions with the parameters of all requests of an episode.
"""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams


def check_overrides(run: SamplingParams, requested: Sequence[SamplingParams], *, compares_engine: bool) -> None:
    """Raise RolloutError for sampling parameters that training cannot account for.

    `run` has the sampling parameters of the run, `requested` those of an episode's requests. `compares_engine` means
    that the loss compares the log-probs of engine and trainer.
    """
    for params in requested:
        if params.temperature <= 0 < run.temperature:
            raise RolloutError(
                f"sampling_params.temperature is {params.temperature:g}: expected a number above 0, because greedy "
                "turns do not explore"
            )
        if compares_engine and (found := find_restriction(params)):
            raise RolloutError(
                f"sampling_params.{found} changes the sampling distribution, so the importance weights would be wrong",
                try_this=f"leave {found.split('=')[0]} unchanged, or --enable_vllm_is_correction false",
            )


def temperature_factors(run: SamplingParams, requested: Sequence[SamplingParams]) -> list[float]:
    """Return the temperature of each request divided by the run's, or 1 in greedy evaluation."""
    return [params.temperature / run.temperature if run.temperature > 0 else 1.0 for params in requested]


def find_restriction(params: SamplingParams) -> str | None:
    """Return the first parameter that makes the distribution differ from softmax(logits / temperature), or None."""
    restrictions = {
        f"top_p={params.top_p:g}": params.top_p < 1,
        f"top_k={params.top_k}": params.top_k > 0,
        f"min_p={params.min_p:g}": params.min_p > 0,
        f"repetition_penalty={params.repetition_penalty:g}": params.repetition_penalty != 1,
    }
    return next((name for name, applies in restrictions.items() if applies), None)
