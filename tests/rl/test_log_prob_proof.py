"""Engine and trainer are compared on sampled tokens; too far apart stops the run and says where."""

import asyncio

import pytest
import torch

from openrlhf.data.collate import Layout
from openrlhf.errors import RolloutError
from openrlhf.rl.proof import LogProbProof, log_prob_difference
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import Scores
from openrlhf.types import Prompt, Trajectory

BATCHING = Batching(Layout(packing=False, pad_id=0), 8)


class Trainer:
    """Log-probs of -1 for every token."""

    async def score(self, batches, *, log_probs):
        assert log_probs
        return Scores(log_probs=[torch.full(batch.input_ids.shape, -1.0) for batch in batches])


def drawn(log_prob, version=0, index=0):
    mask, drawn = (False, True, True), (0.0, log_prob, log_prob)
    return Trajectory(Prompt(index, f"prompt {index}", (1,)), (1, 2, 3), mask, drawn, 0.0, 0.0, False, version)


def difference(*trajectories, tolerance=0.1, version=0):
    proof = LogProbProof(tolerance)
    return asyncio.run(log_prob_difference(trajectories, Trainer(), BATCHING, proof, version))


def test_the_distance_is_a_mean_over_the_tokens_that_were_drawn():
    assert difference(drawn(-1.0), drawn(-1.05)) == pytest.approx(0.05)


def test_too_far_apart_is_an_error_that_names_the_sample():
    with pytest.raises(RolloutError, match=r"0\.5 a token.*0\.1 allowed.*prompt 3"):
        difference(drawn(-1.0), drawn(-1.5, index=3))


def test_not_a_number_is_too_far():
    with pytest.raises(RolloutError):
        difference(drawn(float("nan")))


def test_samples_of_older_weights_prove_nothing():
    assert difference(drawn(-9.0, version=1), version=2) is None


@pytest.mark.parametrize(("every", "due"), [(0, []), (2, [4, 6, 8])])
def test_when_it_is_looked_at_again(every, due):
    proof = LogProbProof(0.1, every)
    assert [step for step in range(4, 9) if proof.is_due(step)] == due
