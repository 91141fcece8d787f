"""pass@1 and pass@n by datasource, against hand-worked numbers."""

import asyncio
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.rl.evaluate import evaluate, pass_at_k, summary
from openrlhf.rl.rollouts import GroupRunner
from tests.rl.stand_ins import EchoEngine, NoModels, OneTurn, RewardFunction, prompts
from tests.samples import make_trajectory

CONFIG = replace_flags(RLConfig(), n_samples_per_prompt=3, max_len=8, max_new_tokens=4)
SOLVED = {(0, 1), (2, 0), (2, 2), (1, 2)}  # (prompt, sample); prompts 0, 2, 4 belong to source d0 and 1, 3 to d1


def run_evaluation(reward, workers):
    return asyncio.run(evaluate(prompts(5), EchoEngine(), GroupRunner(OneTurn(reward), print), workers, CONFIG))


def test_pass_rates_are_reported_by_datasource():
    found = run_evaluation(lambda prompt, sample: float((prompt.index, sample) in SOLVED), NoModels())
    assert found == pytest.approx(
        {
            "eval_d0_reward": 3 / 9,
            "eval_d0_pass1": 3 / 9,
            "eval_d0_pass3": 2 / 3,
            "eval_d0_response_length_mean": 1.0,
            "eval_d0_truncated_rate": 1 / 3,
            "eval_d1_reward": 1 / 6,
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
    found = run_evaluation(lambda prompt, sample: float("nan"), RewardFunction(lambda item: item.prompt.index))
    assert (found["eval_d0_reward"], found["eval_d1_reward"]) == (2.0, 2.0)
    assert not any("_pass" in name for name in found)  # the scores of a reward model are not right or wrong


def sample(prompt, reward, score):
    return make_trajectory(prompt, (1, 2), (False, True), (0.0, -1.0), reward, score=score)


def test_pass_rates_use_scores_and_ignore_partial_credit():
    (prompt,) = prompts(1)
    found = summary([sample(prompt, 0.4, 0.0), sample(prompt, 1.0, 1.0)], 2)
    assert (found["eval_d0_reward"], found["eval_d0_pass1"], found["eval_d0_pass2"]) == (0.7, 0.5, 1.0)
    partial = summary([sample(prompt, 0.4, 0.4), sample(prompt, 1.0, 1.0)], 2)
    assert partial["eval_d0_reward"] == 0.7
    assert not any("_pass" in name for name in partial)


def test_an_episode_with_several_trajectories_counts_once():
    (prompt,) = prompts(1)
    twice = [replace(sample(prompt, 1.0, 1.0), episode=0)] * 2
    found = summary([*twice, replace(sample(prompt, 0.0, 0.0), episode=1)], 2)
    assert (found["eval_d0_reward"], found["eval_d0_pass1"], found["eval_num_samples"]) == (0.5, 0.5, 2.0)


def test_a_prompt_that_lost_samples_counts_with_its_remaining_k():
    first, second = prompts(3)[0::2]  # both from the same source
    found = summary([sample(first, 1.0, 1.0), sample(second, 0.0, 0.0), sample(second, 1.0, 1.0)], 2)
    assert (found["eval_d0_pass1"], found["eval_d0_pass2"]) == (0.75, 1.0)
    assert "eval_d0_pass2" not in summary([sample(first, 1.0, 1.0)], 2)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_choices(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    choices = [any(chosen) for chosen in combinations(answers, k)]
    assert pass_at_k(len(answers), sum(answers), k) == pytest.approx(sum(choices) / len(choices))
