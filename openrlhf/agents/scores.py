"""Strict validation of rewards from functions, servers and agents: one finite number per sample, or a precise error.

Inputs are plain numbers, strings, lists and dicts: JSON from a server, or the output of `messages.plain`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.executor import clip, sample_name
from openrlhf.errors import RewardError
from openrlhf.types import Prompt


@dataclass(frozen=True)
class Scored:
    """The verdict on a sample: `reward` is the training signal, `score` decides dynamic filtering."""

    reward: float
    score: float
    extra_logs: Mapping[str, float] = field(default_factory=dict)


NOT_YET = Scored(math.nan, math.nan)  # placeholder until reward models score


@dataclass(frozen=True)
class Group:
    """The samples of a prompt in the form that reward functions get."""

    prompt: Prompt
    queries: tuple[str, ...]  # prompt and response, with special tokens
    responses: tuple[str, ...]
    seed: int = 0

    def part(self, places: Sequence[int]) -> Group:
        """Return the group with only the samples at these indices."""
        queries, responses = (tuple(texts[place] for place in places) for texts in (self.queries, self.responses))
        return Group(self.prompt, queries, responses, self.seed)

    def name(self, place: int) -> str:
        """Describe a sample for a message."""
        return sample_name(self.prompt, self.responses[place])


def read_scores(result: Any, group: Group, source: str) -> list[Scored | RewardError]:
    """Return a verdict or an error for each sample; raise RewardError if the result as a whole is malformed."""
    count = len(group.queries)
    given = result if isinstance(result, Mapping) else {"rewards": result}
    if "rewards" not in given:
        raise RewardError(f"{source} returned a dict without 'rewards': its keys are {sorted(given)}")
    rewards = per_sample(given["rewards"], count, f"{source}: rewards")
    scores = rewards if given.get("scores") is None else per_sample(given["scores"], count, f"{source}: scores")
    logs = _logs(given.get("extra_logs"), count, source)

    def read(place: int) -> Scored | RewardError:
        try:
            reward = read_number(rewards[place], "the reward")
            score = read_number(scores[place], "the score")
        except RewardError as error:
            return RewardError(f"{source}: {error} for {group.name(place)}")
        return Scored(reward, score, {name: values[place] for name, values in logs.items()})

    return [read(place) for place in range(count)]


def per_sample(values: Any, count: int, what: str) -> list[Any]:
    """Return one value per sample; a single number is accepted for a single sample."""
    if isinstance(values, int | float) and count == 1:
        return [values]
    if not isinstance(values, list):
        raise RewardError(
            f"{what} of {count} samples came as {kind_of(values)}; expected a list or tensor of {count} numbers"
        )
    if len(values) != count:
        raise RewardError(
            f"{what} has {len(values)} values for {count} samples; a call gets all samples of a prompt and returns one"
            " value for each"
        )
    return values


def read_number(value: Any, what: str) -> float:
    """Return a finite number, also from a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise RewardError(f"{what} is {kind_of(value)}, not a number")
    if not math.isfinite(value):
        raise RewardError(f"{what} is {float(value)}, not a finite number")
    return float(value)


def read_logs(given: Any, source: str) -> dict[str, float]:
    """Read the extra_logs of one sample."""
    return {name: values[0] for name, values in _logs(given, 1, source).items()}


def _logs(given: Any, count: int, source: str) -> dict[str, list[float]]:
    """Read extra_logs as a list of values per name, one value per sample."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RewardError(f"{source}: extra_logs is {kind_of(given)}, not a dict of numbers")
    return {str(name): _log_values(values, count, f"{source}: extra_logs {name!r}") for name, values in given.items()}


def _log_values(values: Any, count: int, what: str) -> list[float]:
    """Return one float per sample; a single value applies to all. NaN and infinity are allowed in logs."""
    if not isinstance(values, list):
        values = [values]
    if len(values) == 1:
        values = values * count
    floats = [value for value in values if isinstance(value, int | float)]
    if len(values) != count or len(floats) != count:
        raise RewardError(f"{what} is {clip(repr(values))}; expected a number, or one for each of {count} samples")
    return [float(value) for value in floats]


def kind_of(value: Any) -> str:
    """Describe a value and its type for a message."""
    return "None" if value is None else f"{clip(repr(value), 60)} ({type(value).__name__})"
