"""pass@1 and pass@n by datasource, worked out by hand."""

import asyncio

import pytest
import torch
from hand import EchoEngine, NoModels, OneTurn, prompts

from openrlhf.rl.evaluate import evaluate
from openrlhf.rl.rollouts import RolloutSettings
from openrlhf.types import SamplingParams

SETTINGS = RolloutSettings(1, 3, SamplingParams(max_tokens=4), context_length=8, seed=0)
SOLVED = {(0, 1), (2, 0), (2, 2), (1, 2)}  # prompt, sample; prompts 0, 2, 4 are of source d0 and 1, 3 of d1


def evaluated(reward, workers):
    return asyncio.run(evaluate(prompts(5), EchoEngine(), OneTurn(reward), workers, SETTINGS))


def test_pass_rates_by_datasource():
    found = evaluated(lambda prompt, sample: float((prompt.index, sample) in SOLVED), NoModels())
    assert found == pytest.approx(
        {
            "eval_d0_pass1": 3 / 9,
            "eval_d0_pass3": 2 / 3,
            "eval_d0_response_length_mean": 1.0,
            "eval_d0_truncated_rate": 1 / 3,
            "eval_d1_pass1": 1 / 6,
            "eval_d1_pass3": 1 / 2,
            "eval_d1_response_length_mean": 1.0,
            "eval_d1_truncated_rate": 1 / 3,
            "eval_response_length_mean": 1.0,
            "eval_truncated_rate": 1 / 3,
            "eval_num_samples": 15.0,
        }
    )


def test_reward_models_score_evaluation_too():
    class Index:
        async def rewards(self, trajectories):
            return torch.tensor([float(item.prompt.index) for item in trajectories])

    found = evaluated(lambda prompt, sample: float("nan"), Index())
    assert found["eval_d0_pass1"] == 2.0
    assert found["eval_d1_pass3"] == 2.0
