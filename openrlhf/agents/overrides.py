"""What an agent changes about how its tokens are drawn: a temperature travels with them, other changes may be refused.

The trainer scores a token under the distribution that it was drawn from. It can divide logits by any temperature, but
it knows nothing of tokens that a turn left out or penalised.
"""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams


def check_overrides(own: SamplingParams, asked: Sequence[SamplingParams], *, compares_engine: bool) -> None:
    """Refuses what training cannot follow: `asked` are the parameters of an episode's requests, `own` the run's.

    `compares_engine` says that the loss compares the engine's log-probs with the trainer's.
    """
    for params in asked:
        if params.temperature <= 0 < own.temperature:
            raise RolloutError(
                f"sampling_params.temperature is {params.temperature:g}: expected a number above 0, because a turn "
                "that always takes the likeliest token explores nothing"
            )
        if compares_engine and (bent := bends(params)):
            raise RolloutError(
                f"sampling_params.{bent} changes which tokens can be drawn, so the importance correction would weigh "
                "them wrongly",
                try_this=f"leave {bent.split('=')[0]} as it is, or --enable_vllm_is_correction false",
            )


def temperature_factors(own: SamplingParams, asked: Sequence[SamplingParams]) -> list[float]:
    """Each request's temperature as a factor on the run's; an evaluation without chance is not trained on."""
    return [params.temperature / own.temperature if own.temperature > 0 else 1.0 for params in asked]


def bends(params: SamplingParams) -> str | None:
    """The parameter that makes the distribution another than softmax(logits / temperature), if there is one."""
    bent = {
        f"top_p={params.top_p:g}": params.top_p < 1,
        f"top_k={params.top_k}": params.top_k > 0,
        f"min_p={params.min_p:g}": params.min_p > 0,
        f"repetition_penalty={params.repetition_penalty:g}": params.repetition_penalty != 1,
    }
    return next((name for name, does in bent.items() if does), None)
