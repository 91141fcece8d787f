"""Does an engine draw from the policy that is trained? Log-probs of a few sampled tokens, on both sides, tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.agents.executor import sample_name
from openrlhf.errors import RolloutError
from openrlhf.rl.samples import Batching, batch_trajectories
from openrlhf.rl.workers import Workers
from openrlhf.types import Trajectory

SAMPLES = 4


@dataclass(frozen=True)
class LogProbProof:
    """How far engine and trainer may be apart, as the mean over a sample's tokens, and how often that is looked at."""

    tolerance: float
    every: int = 0  # steps; 0: only once, when there are samples that tell

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


async def log_prob_difference(
    trajectories: Sequence[Trajectory], workers: Workers, batching: Batching, proof: LogProbProof, version: int
) -> float | None:
    """The largest mean difference of a few samples; raises where it is too large, and says which sample.

    Samples of older weights tell nothing: None where there are only such.
    """
    fresh = [item for item in trajectories if item.version == version and any(item.action_mask)][:SAMPLES]
    if not fresh:
        return None
    scores = await workers.score([batch_trajectories([item], batching.layout) for item in fresh], log_probs=True)
    assert scores.log_probs is not None
    found = {}
    for place, (item, trained) in enumerate(zip(fresh, scores.log_probs, strict=True)):
        pairs = zip(trained.flatten().tolist(), item.rollout_log_probs, item.action_mask, strict=False)
        apart = [abs(own - drawn) for own, drawn, acts in pairs if acts]
        found[place] = sum(apart) / len(apart)
    worst = max(found, key=lambda place: found[place])
    if not found[worst] <= proof.tolerance:  # also where it is not a number
        raise RolloutError(
            f"the engine's log-probs are {found[worst]:.3g} a token from the trainer's, {proof.tolerance:g} allowed, "
            f"in {sample_name(fresh[worst].prompt)}, though the weights arrived: the two do not compute the same model",
            try_this="--param_dtype fp32 to see whether precision is the cause, or --attn_implementation eager",
        )
    return found[worst]
