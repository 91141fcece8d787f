"""Evaluation: mean reward, pass@1 and pass@n per data source, with the engine and rewards of training.

The controller calls `evaluate` before the first step and then every --eval_steps steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from openrlhf.agents.branches import last_of_episodes
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import generates_in_lockstep
from openrlhf.monitor import Progress
from openrlhf.rl.experience import with_model_rewards
from openrlhf.rl.rollouts import GroupRunner, run_groups
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.types import Prompt, Trajectory


async def evaluate(
    prompts: Sequence[Prompt], engine: Engine, runner: GroupRunner, workers: Workers, config: RLConfig
) -> dict[str, float]:
    """Return metrics over all evaluation prompts.

    `config` is the result of `runtime.evaluation_config`.
    """
    # In lockstep, prompts end together, and the engine shows the progress of its responses.
    hidden = generates_in_lockstep(config)
    with Progress("evaluate", total=len(prompts), unit="prompt", hidden=hidden, brief=True) as progress:
        results = await run_groups(prompts, engine, runner, config, progress)
    trajectories = [item for result in results for item in result.trajectories]
    # Evaluation uses one score per sample, so step rewards are not needed.
    scored = await with_model_rewards(trajectories, workers, each_step=False)
    return summary(scored, config.rollout.n_samples_per_prompt)


def summary(trajectories: Sequence[Trajectory], n: int) -> dict[str, float]:
    """Return the mean reward and lengths per data source, and pass@1 and pass@n if all scores are 0 or 1."""
    values: dict[str, float] = {}
    for source in sorted({item.prompt.datasource for item in trajectories}):
        own = [item for item in trajectories if item.prompt.datasource == source]
        episodes = last_of_episodes(own)
        groups: dict[int, list[float]] = {}
        for item in episodes:
            groups.setdefault(item.prompt.index, []).append(item.score)
        values[f"eval_{source}_reward"] = float(np.mean([item.reward for item in episodes]))
        if all(item.score in (0.0, 1.0) for item in episodes):
            for k in (1, n):
                rates = [pass_at_k(len(group), int(sum(group)), k) for group in groups.values() if len(group) >= k]
                if rates:  # empty if too many samples failed
                    values[f"eval_{source}_pass{k}"] = float(np.mean(rates))
        values |= {f"eval_{source}_{name}": value for name, value in _lengths(own).items()}
    if trajectories:  # otherwise all samples failed
        values |= {f"eval_{name}": value for name, value in _lengths(trajectories).items()}
    return values | {"eval_num_samples": float(len(last_of_episodes(trajectories)))}


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement, include a correct one.

    This is the unbiased estimator of Chen et al. (arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "response_length_mean": float(np.mean([item.action_mask.sum() for item in trajectories])),
        "truncated_rate": float(np.mean([item.truncated for item in trajectories])),
    }
