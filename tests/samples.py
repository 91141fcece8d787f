"""Trajectories made of tuples, and the plain values of objects with arrays, which can be compared."""

from dataclasses import fields, is_dataclass

import numpy as np

from openrlhf.types import NOT_SAMPLED, Trajectory


def make_trajectory(prompt, ids, mask, log_probs=None, reward=0.0, *, score=None, truncated=False, version=0, **more):
    """Make a trajectory of sequences of numbers; all its actions were sampled by weights of the same version."""
    mask = np.array(mask, np.bool_)
    return Trajectory(
        prompt=prompt,
        input_ids=np.array(ids, np.int32),
        action_mask=mask,
        rollout_log_probs=np.zeros(len(mask), np.float32) if log_probs is None else np.array(log_probs, np.float32),
        token_versions=np.where(mask, np.int32(version), np.int32(NOT_SAMPLED)),
        reward=reward,
        score=reward if score is None else score,
        truncated=truncated,
        version=version,
        **more,
    )


def plain(value):
    """Return an object, or a list of them, as dicts and lists."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
