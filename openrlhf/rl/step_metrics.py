"""Metrics of a step of the RL loop: select those in the progress bar, and average over several optimizer steps."""

from collections.abc import Mapping, Sequence

import numpy as np

NOT_AVERAGED = ("_lr", "_loss_scale", "_skipped_steps")  # suffixes of metrics for which only the last value counts
PROGRESS_NAMES = {  # metrics in the progress bar, with their short names
    "reward": "reward",
    "policy_loss": "act_loss",
    "kl": "kl",
    "response_length": "gen_len",
    "actor_lr": "act_lr",
    "timing/tokens_per_second": "tok/s",
    "actor_mfu": "mfu",
}


def in_progress_bar(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics for the progress bar, by their short names."""
    return {short: values[name] for name, short in PROGRESS_NAMES.items() if name in values}


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps of a rollout; for NOT_AVERAGED, the last value."""
    names = dict.fromkeys(name for metrics in steps for name in metrics)
    means = {name: float(np.mean([metrics[name] for metrics in steps if name in metrics])) for name in names}
    return means | {name: value for name, value in steps[-1].items() if name.endswith(NOT_AVERAGED)}
