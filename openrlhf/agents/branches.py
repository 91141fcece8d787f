"""Episodes with several trajectories: an agent that compacts its context, drops its reasoning or calls sub-agents.

Such an episode is not one growing sequence of tokens, so `execute` returns a list of results, one for each sequence.
They share the reward of the last one and count as one sample of the group: `Trajectory.episode` says which belong
together. Baselines and other statistics are computed over episodes (`episode_numbers`, `last_of_episodes`), and each
trajectory of an episode gets the episode's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from openrlhf.errors import RolloutError
from openrlhf.types import Trajectory

SHARED = ("reward", "scores")  # keys of the last result that apply to all trajectories


def read_episode(
    result: object, number: int, read: Callable[[object], Trajectory], *, step_rewards: bool
) -> list[Trajectory]:
    """Convert the result of an episode, one or a list, to trajectories; `read` validates and converts one result.

    `number` identifies the episode within its group.
    """
    if not isinstance(result, list) or not all(isinstance(item, Mapping) for item in result):
        return [read(result)]
    if not result:
        raise RolloutError("execute returned an empty list: expected one result for each trajectory of the episode")
    shared = {key: result[-1].get(key) for key in SHARED}
    trajectories = [read(item | shared) for item in result]
    if len(trajectories) == 1:
        return trajectories
    if step_rewards:
        raise RolloutError(f"execute returned {len(result)} trajectories: expected one, because of --step_rewards")
    for place, item in enumerate(result):
        if item.get("rollout_log_probs") is None:  # tokens alone do not identify their completion
            raise RolloutError(
                f"'rollout_log_probs' of trajectory {place} is None: expected one number for each token, because the"
                " episode has several trajectories",
                try_this="return the engine's log-probs with the tokens",
            )
    return [replace(item, episode=number) for item in trajectories]


def episode_numbers(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Return the episode of each trajectory, [trajectories]; episodes are numbered from 0 in order of appearance."""
    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for place, item in enumerate(trajectories):
        key: Hashable = place if item.episode is None else (item.prompt.index, item.episode)
        found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, np.int64)


def last_of_episodes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return one trajectory per episode: the last one."""
    return list(dict(zip(episode_numbers(trajectories).tolist(), trajectories, strict=True)).values())
