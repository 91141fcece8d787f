"""Evaluation: pass@1 and pass@n per datasource, with the engine and rewards of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.agents.executor import GroupExecutor
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.rollouts import RolloutSettings, run_groups
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.types import Prompt, Trajectory


async def evaluate(
    prompts: Sequence[Prompt], engine: Engine, executor: GroupExecutor, workers: Workers, settings: RolloutSettings
) -> dict[str, float]:
    """Metrics over all evaluation prompts, the tail included; groups are told apart by their place in the set."""
    results = await run_groups(prompts, engine, executor, settings)
    trajectories = [item for result in results for item in result.trajectories]
    return summary(await with_model_rewards(trajectories, workers), settings.samples_per_prompt)


def summary(trajectories: Sequence[Trajectory], n: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for source in sorted({item.prompt.datasource for item in trajectories}):
        own = [item for item in trajectories if item.prompt.datasource == source]
        groups: dict[int, list[float]] = {}
        for item in own:
            groups.setdefault(item.prompt.index, []).append(item.reward)
        values[f"eval_{source}_pass1"] = float(np.mean([item.reward for item in own]))
        values[f"eval_{source}_pass{n}"] = float(np.mean([max(group) for group in groups.values()]))
        values |= {f"eval_{source}_{name}": value for name, value in _lengths(own).items()}
    values |= {f"eval_{name}": value for name, value in _lengths(trajectories).items()}
    return values | {"eval_num_samples": float(len(trajectories))}


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "response_length_mean": float(np.mean([sum(item.action_mask) for item in trajectories])),
        "truncated_rate": float(np.mean([item.truncated for item in trajectories])),
    }
