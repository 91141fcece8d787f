"""Validation of an agent's response and its conversion to a `Trajectory`.

All functions are pure and run in the trainer; their error messages say which part of the response is wrong. `Episodes`
calls `read_trajectory`, and `SingleTurn` calls `one_turn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openrlhf.agents.scores import kind_of, read_logs, read_number
from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion, Prompt, Trajectory

Ranges = list[tuple[int, int]]  # half-open token ranges of the actions


def one_turn(prompt: Prompt, completion: Completion, context_length: int) -> Trajectory:
    """Join a prompt and its response, cut to the context length; reward and score are NaN until they are set."""
    input_ids = (*prompt.input_ids, *completion.token_ids)[:context_length]
    start = min(len(prompt.input_ids), len(input_ids))
    drawn = len(input_ids) - start
    return Trajectory(
        prompt=prompt,
        input_ids=input_ids,
        action_mask=(False,) * start + (True,) * drawn,
        rollout_log_probs=(0.0,) * start + completion.log_probs[:drawn],
        reward=float("nan"),
        score=float("nan"),
        truncated=completion.finish_reason == "length",
        version=completion.version,
    )


def read_trajectory(
    response: Any,
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    context_length: int,
    step_rewards: bool = False,
    scored_later: bool = False,
    temperature_factors: Sequence[float] = (),
    whole_vocabulary: bool = True,
) -> Trajectory:
    """Validate the response dict of an episode and convert it to a trajectory.

    Tokens past the context length are cut, and so are those after the last action, which are not trained on.
    `completions` are the engine's outputs for this episode, in order; `temperature_factors` has one entry for each.
    With `scored_later` the reward may be None.
    """
    if not isinstance(response, Mapping):
        raise RolloutError(f"execute returned {kind_of(response)}; expected a dict with observation_tokens")
    tokens = read_tokens(response.get("observation_tokens"))
    ranges = read_ranges(response.get("action_ranges"), len(tokens))
    log_probs = read_log_probs(response.get("rollout_log_probs"), tokens, ranges, completions)
    factors = read_temperatures(tokens, ranges, completions, temperature_factors)
    kept = [(start, min(end, context_length)) for start, end in ranges if start < context_length]
    if not kept:
        raise RolloutError(
            f"the episode has no action within {context_length} tokens: action_ranges are {ranges} of {len(tokens)}"
        )
    length = kept[-1][1]
    mask = [False] * length  # [tokens]
    for start, end in kept:
        mask[start:end] = [True] * (end - start)
    mask[0] = False  # nothing predicts the first token
    reward = read_reward(response.get("reward"), scored_later=scored_later)
    score = response.get("scores")
    return Trajectory(
        prompt=prompt,
        input_ids=tuple(tokens[:length]),
        action_mask=tuple(mask),
        rollout_log_probs=tuple(value if acted else 0.0 for value, acted in zip(log_probs, mask, strict=False)),
        reward=reward,
        score=reward if score is None else read_number(score, "'scores' of the episode"),
        truncated=bool(response.get("truncated")) or kept != ranges,
        version=min((item.version for item in completions), default=0),
        extra_logs=read_logs(response.get("extra_logs"), "the episode"),
        step_rewards=read_step_rewards(response.get("step_rewards"), length) if step_rewards else (),
        temperature_factors=tuple(factors[:length]),
        whole_vocabulary=whole_vocabulary,
    )


def read_reward(given: Any, *, scored_later: bool) -> float:
    """Return the reward of an episode; NaN if reward models score it later."""
    if given is not None:
        return read_number(given, "'reward' of the episode")
    if not scored_later:
        raise RewardError(
            "'reward' of the episode is None, not a number", try_this="--reward_pretrain for a model that scores it"
        )
    return float("nan")


def read_tokens(given: Any) -> list[int]:
    """Validate the token ids of an episode."""
    if not isinstance(given, list) or not given:
        raise RolloutError(f"'observation_tokens' is {kind_of(given)}; wanted are the ids of the whole episode")
    wrong = next((item for item in given if not isinstance(item, int)), None)
    if wrong is not None:
        raise RolloutError(f"'observation_tokens' holds {kind_of(wrong)}, which is no token id")
    return given


def read_ranges(given: Any, length: int) -> Ranges:
    """Validate action ranges: ordered, within the tokens, not overlapping. Drop empty ones."""
    if not isinstance(given, list):
        raise RolloutError(f"'action_ranges' is {kind_of(given)}; expected a list of (start, end)")
    ranges: Ranges = []
    last = 0
    for item in given:
        if not (isinstance(item, (list, tuple)) and len(item) == 2 and all(isinstance(edge, int) for edge in item)):
            raise RolloutError(f"'action_ranges' holds {kind_of(item)}; expected (start, end)")
        start, end = item
        if not 0 <= start <= end <= length:
            raise RolloutError(f"action range ({start}, {end}) does not lie within the {length} observation_tokens")
        if start < last:
            raise RolloutError(f"action range ({start}, {end}) begins before the one before it ends, at {last}")
        last = end
        if start < end:
            ranges.append((start, end))
    return ranges


def read_log_probs(
    given: Any, tokens: Sequence[int], ranges: Ranges, completions: Sequence[Completion]
) -> Sequence[float]:
    """Return one log-prob per token: the agent's, or the engine's if the agent returned None."""
    if given is None:
        return log_probs_from_engine(tokens, ranges, completions)
    if not isinstance(given, list):
        raise RolloutError(f"'rollout_log_probs' is {kind_of(given)}; expected a list, or None")
    if len(given) != len(tokens):
        raise RolloutError(
            f"'rollout_log_probs' has {len(given)} values for {len(tokens)} observation_tokens; expected one for each,"
            " 0.0 where no action is"
        )
    return [read_number(value, f"rollout_log_probs[{place}]") for place, value in enumerate(given)]


def log_probs_from_engine(tokens: Sequence[int], ranges: Ranges, completions: Sequence[Completion]) -> list[float]:
    """Look up the log-probs of the actions in the engine's completions; 0.0 outside actions."""
    log_probs = [0.0] * len(tokens)  # [tokens]
    trouble = "'rollout_log_probs' is None", "return the log-probs with them"
    for place, count, number in find_drawn(tokens, ranges, completions, *trouble):
        log_probs[place : place + count] = completions[number].log_probs[:count]
    return log_probs


def read_temperatures(
    tokens: Sequence[int], ranges: Ranges, completions: Sequence[Completion], factors: Sequence[float]
) -> list[float]:
    """Spread the temperature factors of the completions over their tokens; empty if all are 1."""
    if all(factor == 1.0 for factor in factors):
        return []
    found = [1.0] * len(tokens)  # [tokens]
    if len(set(factors)) == 1:
        for start, end in ranges:
            found[start:end] = [factors[0]] * (end - start)
        return found
    trouble = "the turns have several temperatures", "return the tokens as they were drawn"
    for place, count, number in find_drawn(tokens, ranges, completions, *trouble):
        found[place : place + count] = [factors[number]] * count
    return found


def find_drawn(
    tokens: Sequence[int], ranges: Ranges, completions: Sequence[Completion], reason: str, advice: str
) -> Iterator[tuple[int, int, int]]:
    """Match action tokens to completions; yield (start index, token count, completion number) in order.

    An action range may span several completions, and a completion may be cut short. Completions that match no action
    are skipped. If an action matches none, raise RolloutError with `reason` and `advice`.
    """
    waiting = iter(range(len(completions)))
    for start, end in ranges:
        place = start
        while place < end:
            wanted = tuple(tokens[place:end])
            drawn = (number for number in waiting if completions[number].token_ids)
            found = next((number for number in drawn if starts_alike(completions[number].token_ids, wanted)), None)
            if found is None:
                raise RolloutError(
                    f"{reason}, and the tokens of action range ({start}, {end}) are not what the engine drew: {advice}"
                )
            count = min(len(completions[found].token_ids), len(wanted))
            yield place, count, found
            place += count


def starts_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether the shorter sequence is a prefix of the longer one."""
    return all(a == b for a, b in zip(one, other, strict=False))


def read_step_rewards(given: Any, length: int) -> tuple[tuple[int, float], ...]:
    """Return (index of a turn's last action token, reward); rewards of turns that were cut move to the last token."""
    if given is None:
        return ()
    return tuple((min(int(place), length - 1), read_number(reward, "a step reward")) for place, reward in given)
