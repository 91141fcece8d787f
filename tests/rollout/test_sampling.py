"""Sampling from a vocabulary of six tokens, compared with the exact distribution."""

import pytest
import torch

from openrlhf.rollout.sampling import SamplingState, sample_tokens
from openrlhf.types import SamplingParams

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.0, 0.2])
COUNT = 20_000  # samples; the deviation of a share is then at most 0.0035
TOLERANCE = 0.015

# What is left of 0.4, 0.25, 0.2, 0.1, 0.05 (tokens 1, 3, 5, 2, 0), before it is made to sum to one.
CASES = {
    "everything": ({}, PROBS),
    "top-k": ({"top_k": 3}, [0, 0.4, 0, 0.25, 0, 0.2]),
    "top-k of one": ({"top_k": 1}, [0, 1, 0, 0, 0, 0]),
    "top-p": ({"top_p": 0.7}, [0, 0.4, 0, 0.25, 0, 0.2]),
    "top-p just reached": ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0, 0]),
    "a small top-p keeps the likeliest": ({"top_p": 1e-6}, [0, 1, 0, 0, 0, 0]),
    "min-p": ({"min_p": 0.4}, [0, 0.4, 0, 0.25, 0, 0.2]),
    "top-p of what top-k leaves": ({"top_k": 2, "top_p": 0.61}, [0, 1, 0, 0, 0, 0]),
    "top-p of what min-p leaves": ({"min_p": 0.6, "top_p": 0.62}, [0, 0.4, 0, 0.25, 0, 0]),
    "temperature": ({"temperature": 0.5}, PROBS.square()),
    "temperature, then top-p": ({"temperature": 0.5, "top_p": 0.8}, [0, 0.16, 0, 0.0625, 0, 0]),
}


def sampled(params, count=COUNT):
    """Return tokens and log-probs of one row per seed."""
    rows = [SamplingParams(max_tokens=1, seed=seed, **params) for seed in range(count)]
    state = SamplingState.of(rows, 6, torch.device("cpu"))
    return sample_tokens(PROBS.log().repeat(count, 1), state, torch.zeros(count, dtype=torch.long))


@pytest.mark.parametrize("case", CASES)
def test_the_truncated_distribution(case):
    params, left = CASES[case]
    exact = torch.as_tensor(left, dtype=torch.float32)
    exact = exact / exact.sum()
    tokens, log_probs = sampled(params)
    shares = torch.bincount(tokens, minlength=6) / COUNT
    torch.testing.assert_close(shares, exact, atol=TOLERANCE, rtol=0)
    assert not shares[exact == 0].any()
    torch.testing.assert_close(log_probs, exact.log()[tokens], atol=1e-5, rtol=1e-5)


def test_whole_log_probs_are_those_before_truncation():
    rows = [SamplingParams(max_tokens=1, seed=seed, top_p=0.7) for seed in range(50)]
    state = SamplingState.of(rows, 6, torch.device("cpu"))
    logits, places = PROBS.log().repeat(50, 1), torch.zeros(50, dtype=torch.long)
    forbidden = logits.masked_fill(torch.arange(6) == 1, -torch.inf)
    tokens, log_probs = sample_tokens(forbidden, state, places, whole=logits)
    assert tokens.tolist() == sample_tokens(forbidden, state, places)[0].tolist()
    assert 1 not in tokens
    torch.testing.assert_close(log_probs, PROBS.log()[tokens], atol=1e-5, rtol=1e-5)


def test_temperature_zero_takes_the_likeliest_at_log_prob_zero():
    tokens, log_probs = sampled({"temperature": 0.0}, 50)
    assert (tokens == 1).all()
    assert not log_probs.any()


def test_rows_keep_their_own_parameters_and_streams():
    params = [SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=5, temperature=0.0, seed=2)]
    params += [SamplingParams(max_tokens=4, top_k=2, top_p=0.9, seed=3)]
    whole = SamplingState.of(params, 6, torch.device("cpu"))
    joined = SamplingState.of(params[:1], 6, torch.device("cpu")).joined(
        SamplingState.of(params[1:], 6, torch.device("cpu"))
    )
    kept = whole.rows(torch.tensor([0, 2]))
    logits = PROBS.log().repeat(3, 1)
    for place in range(3):
        places = torch.full((3,), place)
        tokens, log_probs = sample_tokens(logits, whole, places)
        again, _ = sample_tokens(logits, joined, places)
        some, some_log_probs = sample_tokens(logits[:2], kept, places[:2])
        assert torch.equal(tokens, again)
        assert torch.equal(tokens[[0, 2]], some)
        torch.testing.assert_close(log_probs[[0, 2]], some_log_probs)


def test_random_numbers_do_not_depend_on_the_length_of_other_requests():
    alone = SamplingState.of([SamplingParams(max_tokens=3, seed=9)], 6, torch.device("cpu"))
    beside = SamplingState.of(
        [SamplingParams(max_tokens=50, seed=1), SamplingParams(max_tokens=3, seed=9)], 6, torch.device("cpu")
    )
    assert torch.equal(alone.uniforms[0, :3], beside.uniforms[1, :3])
