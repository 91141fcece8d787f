"""Strict validation of rewards from functions, servers and agents: one finite number per sample, or a precise error.

Inputs are plain numbers, strings, lists and dicts: JSON from a server, or the output of `messages.plain`. The sources
in `rewards.py` return one `Scored` or `RewardError` for each of their `Samples`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openrlhf.agents.executor import clip, sample_name
from openrlhf.data.records import as_float
from openrlhf.errors import RewardError, counted
from openrlhf.types import Prompt


@dataclass(frozen=True)
class Scored:
    """The scores of a sample."""

    reward: float  # the training signal
    score: float  # used for dynamic filtering
    extra_logs: Mapping[str, float] = field(default_factory=dict)


NOT_SCORED = Scored(math.nan, math.nan)  # placeholder until reward models score the sample


@dataclass(frozen=True)
class Samples:
    """The samples of one or more groups in the form that reward functions get: one entry per sample in each field."""

    prompts: tuple[Prompt, ...]
    queries: tuple[str, ...]  # prompt and response, with special tokens
    responses: tuple[str, ...]
    seed: int = 0  # seeds the random generators in the reward function

    @classmethod
    def join(cls, groups: Sequence[Samples]) -> Samples:
        """Concatenate the samples of several groups, with the seed of the first."""
        return cls(
            tuple(prompt for group in groups for prompt in group.prompts),
            tuple(query for group in groups for query in group.queries),
            tuple(response for group in groups for response in group.responses),
            groups[0].seed,
        )

    def part(self, indices: Sequence[int]) -> Samples:
        """Return only the samples at these indices."""
        prompts = tuple(self.prompts[index] for index in indices)
        queries, responses = (tuple(texts[index] for index in indices) for texts in (self.queries, self.responses))
        return Samples(prompts, queries, responses, self.seed)

    def describe(self, index: int) -> str:
        """Describe a sample for an error message."""
        return sample_name(self.prompts[index], self.responses[index])


def read_scores(result: object, samples: Samples, origin: str) -> list[Scored | RewardError]:
    """Return scores or an error for each sample; raise RewardError if the result as a whole is malformed."""
    count = len(samples.queries)
    given = result if isinstance(result, Mapping) else {"rewards": result}
    if "rewards" not in given:
        raise RewardError(f"{origin} returned a dict without 'rewards': its keys are {clip(repr(sorted(given)))}")
    rewards = per_sample(given["rewards"], count, f"{origin}: rewards")
    scores = rewards if given.get("scores") is None else per_sample(given["scores"], count, f"{origin}: scores")
    logs = read_logs(given.get("extra_logs"), count, origin)
    results: list[Scored | RewardError] = []
    for index in range(count):
        try:
            reward = read_number(rewards[index], "the reward")
            score = read_number(scores[index], "the score")
        except RewardError as error:
            results.append(RewardError(f"{origin}: {error} for {samples.describe(index)}"))
        else:
            results.append(Scored(reward, score, logs[index]))
    return results


def per_sample(values: object, count: int, name: str) -> list[object]:
    """Return one value per sample; a single number is accepted for a single sample."""
    if isinstance(values, int | float) and count == 1:
        return [values]
    if not isinstance(values, list):
        raise RewardError(
            f"{name} of {counted(count, 'sample')}: expected a list or tensor of {counted(count, 'number')}, got"
            f" {kind_of(values)}"
        )
    if len(values) != count:
        raise RewardError(
            f"{name} has {counted(len(values), 'value')} for {counted(count, 'sample')}: expected one value for each"
            " sample of a prompt"
        )
    return values


def read_number(value: object, name: str) -> float:
    """Return a finite number; a list of one number is also accepted."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise RewardError(f"{name} is {kind_of(value)}: expected a number")
    number = as_float(value)
    if not math.isfinite(number):
        raise RewardError(f"{name} is {number}: expected a finite number")
    return number


def read_logs(given: object, count: int, origin: str) -> list[dict[str, float]]:
    """Return the extra_logs of each sample; a single value applies to all samples.

    NaN and infinity are allowed in logs.
    """
    logs: list[dict[str, float]] = [{} for _ in range(count)]
    if given is None:
        return logs
    if not isinstance(given, Mapping):
        raise RewardError(f"{origin}: extra_logs is {kind_of(given)}: expected a dict of numbers")
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        values = values * count if len(values) == 1 else values
        floats = [as_float(item) for item in values if isinstance(item, int | float)]
        if len(values) != count or len(floats) != count:
            raise RewardError(
                f"{origin}: extra_logs {clip(repr(name))} is {clip(repr(values))}: expected a number, or a list"
                f" with one number for each sample ({count})"
            )
        for own, number in zip(logs, floats, strict=True):
            own[str(name)] = number
    return logs


def kind_of(value: object) -> str:
    """Describe a value and its type for an error message."""
    return "None" if value is None else f"{clip(repr(value), 60)} ({type(value).__name__})"
