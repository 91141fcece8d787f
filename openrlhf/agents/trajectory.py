"""Validation of an agent's result and its conversion to a `Trajectory`.

All functions are pure and run in the trainer; error messages name the invalid key. `AgentEpisodes` calls
`read_trajectory` with the result of a worker, and `SingleTurnSamples` calls `join_turn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from openrlhf.agents.scores import NOT_SCORED, Scored, kind_of, read_logs, read_number
from openrlhf.errors import RewardError, RolloutError, counted
from openrlhf.types import NOT_RECORDED, NOT_SAMPLED, Completion, Prompt, StepRewards, Trajectory

Ranges: TypeAlias = list[tuple[int, int]]  # half-open token ranges of the actions
Tokens: TypeAlias = NDArray[np.int32]  # [tokens] of an episode
Turn: TypeAlias = tuple[int, int, Completion]  # start index and number of its tokens in the episode


def join_turn(prompt: Prompt, completion: Completion, context_length: int, scored: Scored = NOT_SCORED) -> Trajectory:
    """Join a prompt and its response into a trajectory with scores, truncated to the context length."""
    start = min(len(prompt.input_ids), context_length)
    kept = min(len(completion.token_ids), context_length - start)
    return Trajectory(
        prompt=prompt,
        input_ids=np.concatenate([np.array(prompt.input_ids[:start], np.int32), completion.token_ids[:kept]]),
        action_mask=np.arange(start + kept) >= start,
        rollout_log_probs=np.concatenate([np.zeros(start, np.float32), completion.log_probs[:kept]]),
        token_versions=np.concatenate([np.full(start, NOT_SAMPLED, np.int32), completion.token_versions[:kept]]),
        reward=scored.reward,
        score=scored.score,
        truncated=completion.finish_reason == "length",
        version=completion.version,
        extra_logs=scored.extra_logs,
        routed_experts=spread_experts(start + kept, [(start, kept, completion)]),
    )


def read_trajectory(
    result: object,
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    context_length: int,
    step_rewards: bool = False,
    scored_later: bool = False,
    temperature_factors: Sequence[float] = (),
    whole_vocabulary: bool = True,
) -> Trajectory:
    """Validate the dict that an episode returned and convert it to a trajectory.

    Tokens beyond the context length and tokens after the last action are removed. `completions` are the engine's
    outputs for this episode, in order; `temperature_factors` has one entry for each. With `scored_later`, the reward
    may be None.
    """
    if not isinstance(result, Mapping):
        raise RolloutError(f"execute returned {kind_of(result)}: expected a dict with observation_tokens")
    tokens = read_tokens(result.get("observation_tokens"))
    ranges = read_ranges(result.get("action_ranges"), len(tokens))
    log_probs = read_log_probs(result.get("rollout_log_probs"), tokens, ranges, completions)
    versions = spread_versions(tokens, ranges, completions)
    factors = spread_temperatures(tokens, ranges, completions, temperature_factors)
    turns: list[Turn] = []
    if any(item.routed_experts is not None for item in completions):
        with suppress(RolloutError):  # the experts of an action that the engine did not sample are not known
            for place, count, number in match_completions(tokens, ranges, completions, "experts are recorded", ""):
                turns.append((place, count, completions[number]))

    # Truncate at the context length and after the last action.
    kept = [(start, min(end, context_length)) for start, end in ranges if start < context_length]
    if not kept:
        raise RolloutError(
            f"the episode of {len(tokens)} tokens has no action within {context_length} tokens: action_ranges are"
            f" {ranges}"
        )
    length = kept[-1][1]
    mask = np.zeros(length, np.bool_)  # [tokens]
    for start, end in kept:
        mask[start:end] = True
    mask[0] = False  # the first token is never predicted

    reward = read_reward(result.get("reward"), scored_later=scored_later)
    score = result.get("scores")
    return Trajectory(
        prompt=prompt,
        input_ids=tokens[:length],
        action_mask=mask,
        rollout_log_probs=np.where(mask, log_probs[:length], np.float32(0.0)),
        token_versions=np.where(mask, versions[:length], np.int32(NOT_SAMPLED)),
        reward=reward,
        score=reward if score is None else read_number(score, "'scores' of the episode"),
        truncated=bool(result.get("truncated")) or kept != ranges,
        version=min((item.version for item in completions), default=0),
        extra_logs=read_logs(result.get("extra_logs"), 1, "the episode")[0],
        step_rewards=read_step_rewards(result.get("step_rewards"), length) if step_rewards else (),
        temperature_factors=None if factors is None else factors[:length],
        routed_experts=spread_experts(length, turns),
        whole_vocabulary=whole_vocabulary,
    )


def read_reward(given: object, *, scored_later: bool) -> float:
    """Return the reward of an episode, or NaN if reward models score it later."""
    if given is not None:
        return read_number(given, "'reward' of the episode")
    if not scored_later:
        raise RewardError(
            "'reward' of the episode is None: expected a number", try_this="--reward_pretrain for a reward model"
        )
    return float("nan")


def read_step_rewards(given: object, length: int) -> StepRewards:
    """Return (index of a turn's last action token, reward); rewards of removed turns are assigned to the last token."""
    if given is None:
        return ()
    rewards: list[tuple[int, float]] = []
    for item in given if isinstance(given, list) else [given]:
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], int | float)):
            raise RolloutError(f"'step_rewards' holds {kind_of(item)}: expected (index of a token, reward)")
        rewards.append((min(int(item[0]), length - 1), read_number(item[1], "a step reward")))
    return tuple(rewards)


def read_tokens(given: object) -> Tokens:
    """Validate the token ids of an episode."""
    if not isinstance(given, list) or not given:
        raise RolloutError(f"'observation_tokens' is {kind_of(given)}: expected the token ids of the whole episode")
    if not set(map(type, given)) <= {int, bool}:
        wrong = next(item for item in given if not isinstance(item, int))
        raise RolloutError(f"'observation_tokens' holds {kind_of(wrong)}: expected token ids")
    try:
        return np.array(given, dtype=np.int32)
    except OverflowError:
        raise RolloutError(f"'observation_tokens' holds {kind_of(max(given, key=abs))}: expected token ids") from None


def read_ranges(given: object, length: int) -> Ranges:
    """Check that action ranges are ordered, disjoint and within the tokens; remove empty ranges."""
    if not isinstance(given, list):
        raise RolloutError(f"'action_ranges' is {kind_of(given)}: expected a list of (start, end)")
    ranges: Ranges = []
    last = 0
    for item in given:
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(edge, int) for edge in item)):
            raise RolloutError(f"'action_ranges' holds {kind_of(item)}: expected (start, end)")
        start, end = item
        if not 0 <= start <= end <= length:
            raise RolloutError(f"action range ({start}, {end}) is not within the {length} observation_tokens")
        if start < last:
            raise RolloutError(f"action range ({start}, {end}) starts before the previous one ends, at {last}")
        last = end
        if start < end:
            ranges.append((start, end))
    return ranges


def read_log_probs(
    given: object, tokens: Tokens, ranges: Ranges, completions: Sequence[Completion]
) -> NDArray[np.float32]:
    """Return one log-prob per token, from the agent's result or, if that is None, from the engine."""
    if given is None:
        log_probs = np.zeros(len(tokens), np.float32)  # [tokens]
        problem = "'rollout_log_probs' is None", "return the log-probs with the tokens"
        for place, count, number in match_completions(tokens, ranges, completions, *problem):
            log_probs[place : place + count] = completions[number].log_probs[:count]
        return log_probs
    if not isinstance(given, list):
        raise RolloutError(f"'rollout_log_probs' is {kind_of(given)}: expected a list, or None")
    if len(given) != len(tokens):
        raise RolloutError(
            f"'rollout_log_probs' has {counted(len(given), 'value')} for {len(tokens)} observation_tokens: expected one"
            " for each, 0.0 outside actions"
        )
    if set(map(type, given)) <= {float, int}:  # almost always; the check of each value below takes ten times as long
        with suppress(OverflowError):  # an integer that no float can hold
            numbers = np.array(given, dtype=np.float64)
            if np.isfinite(numbers).all():
                return numbers.astype(np.float32)
    checked = [read_number(value, f"rollout_log_probs[{place}]") for place, value in enumerate(given)]
    return np.array(checked, dtype=np.float32)


def spread_versions(tokens: Tokens, ranges: Ranges, completions: Sequence[Completion]) -> NDArray[np.int32]:
    """Return the version of the weights that sampled each token, NOT_SAMPLED outside actions.

    If versions differ, they are taken from the completions; an action whose tokens are not those that the engine
    sampled gets the oldest version.
    """
    spread = np.full(len(tokens), NOT_SAMPLED, np.int32)  # [tokens]
    oldest = min((item.version for item in completions), default=0)
    for start, end in ranges:
        spread[start:end] = oldest
    if any((item.token_versions != oldest).any() for item in completions):
        with suppress(RolloutError):
            for place, count, number in match_completions(tokens, ranges, completions, "the versions differ", ""):
                spread[place : place + count] = completions[number].token_versions[:count]
    return spread


def spread_temperatures(
    tokens: Tokens, ranges: Ranges, completions: Sequence[Completion], factors: Sequence[float]
) -> NDArray[np.float32] | None:
    """Return the temperature factor of each token, taken from its completion; None if all are 1."""
    if all(factor == 1.0 for factor in factors):
        return None
    spread = np.ones(len(tokens), np.float32)  # [tokens]
    if len(set(factors)) == 1:
        for start, end in ranges:
            spread[start:end] = factors[0]
        return spread
    problem = "the turns have several temperatures", "return the tokens as they were sampled"
    for place, count, number in match_completions(tokens, ranges, completions, *problem):
        spread[place : place + count] = factors[number]
    return spread


def spread_experts(length: int, turns: Sequence[Turn]) -> NDArray[np.int16] | None:
    """Return the experts of the first `length` tokens of an episode, [length, layers, k]; None if none are reported.

    A completion also reports the experts of its prompt, and so those of the observations before a turn. They are
    ignored if the prompt was not the episode up to that turn.
    """
    spread: NDArray[np.int16] | None = None
    known = 0  # number of leading tokens whose experts are known
    for place, count, completion in turns:
        found = completion.routed_experts  # [prompt and completion - 1, layers, k]
        if found is None or len(found) + 1 - len(completion.token_ids) != place:
            continue
        if spread is None:
            spread = np.full((length, *found.shape[1:]), NOT_RECORDED, np.int16)
        end = min(place + count, len(found), length)
        spread[known:end] = found[known:end]
        known = max(known, end)
    return spread


def match_completions(
    tokens: Tokens, ranges: Ranges, completions: Sequence[Completion], reason: str, advice: str
) -> Iterator[tuple[int, int, int]]:
    """Match action tokens to completions; yield (start index, token count, completion number) in order.

    An action range may span several completions, and a completion may be truncated. Completions without a matching
    action are skipped. If an action has no matching completion, a RolloutError with `reason` and `advice` is raised.
    """
    unused = iter(range(len(completions)))
    for start, end in ranges:
        place = start
        while place < end:
            action = tokens[place:end]
            for number in unused:
                # The shorter one must be a prefix of the longer one.
                sampled = completions[number].token_ids
                count = min(len(sampled), len(action))
                if count and np.array_equal(sampled[:count], action[:count]):
                    yield place, count, number
                    place += count
                    break
            else:
                raise RolloutError(
                    f"{reason}, and the tokens of action range ({start}, {end}) were not sampled by the engine",
                    try_this=advice,
                )
