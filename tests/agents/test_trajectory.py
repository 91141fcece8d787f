import math
from dataclasses import replace

import numpy as np
import pytest
from sessions import encode, prompt

from openrlhf.agents.trajectory import join_turn, read_trajectory
from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion
from tests.samples import plain

NUMBERS = Completion.of((21, 22), (-0.5, -0.25), "ab", "stop", 4)
MORE = Completion.of((23,), (-0.125,), "c", "length", 3)


def episode(**changes):
    """Return the tokens p p a a e e a, with two log-probs for the first action and one for the second."""
    return {
        "observation_tokens": [11, 12, 21, 22, 31, 32, 23],
        "action_ranges": [[2, 4], [6, 7]],
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.125],
        "reward": 1.5,
    } | changes


def read(context_length=100, each_step=False, completions=(NUMBERS, MORE), **changes):
    return read_trajectory(
        episode(**changes), prompt(), completions, context_length=context_length, step_rewards=each_step
    )


def test_join_turn_by_hand():
    got = join_turn(prompt("1+"), NUMBERS, 100)
    assert got.input_ids.tolist() == [*encode("1+"), 21, 22]
    assert got.action_mask.tolist() == [False, False, True, True]
    assert got.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert got.token_versions.tolist() == [-1, -1, 4, 4]
    assert (got.truncated, got.version) == (False, 4)
    assert math.isnan(got.reward)
    assert math.isnan(got.score)
    assert join_turn(prompt("1+"), MORE, 100).truncated


def test_two_turns_by_hand():
    got = read()
    assert got.input_ids.tolist() == [11, 12, 21, 22, 31, 32, 23]
    assert got.action_mask.tolist() == [False, False, True, True, False, False, True]
    assert got.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.125]
    assert got.token_versions.tolist() == [-1, -1, 4, 4, -1, -1, 3]
    assert (got.reward, got.score, got.truncated) == (1.5, 1.5, False)
    assert got.version == 3  # the oldest weights that sampled a turn
    assert got.step_rewards == ()


def with_experts(completion, prompt_length):
    """Experts [tokens, 1 layer, 1 choice] that name the completion's tokens and, negated, the places of its prompt."""
    experts = [-place - 10 for place in range(prompt_length)] + completion.token_ids.tolist()[:-1]
    return replace(completion, routed_experts=np.array(experts, np.int16).reshape(-1, 1, 1))


def test_each_turn_reports_the_experts_of_the_tokens_before_it():
    first, second = with_experts(NUMBERS, 2), with_experts(MORE, 6)
    assert read(completions=(first, second)).routed_experts.flatten().tolist() == [-10, -11, 21, -13, -14, -15, -1]
    assert read(completions=(first, MORE)).routed_experts.flatten().tolist() == [-10, -11, 21, -1, -1, -1, -1]
    other_prompt = with_experts(MORE, 5)  # the agent left a token out
    assert read(completions=(first, other_prompt)).routed_experts.flatten().tolist() == [-10, -11, 21, *[-1] * 4]
    assert read(3, completions=(first, second)).routed_experts.flatten().tolist() == [-10, -11, 21]
    assert read().routed_experts is None
    joined = join_turn(prompt("1+"), first, 100)
    assert joined.routed_experts.flatten().tolist() == [-10, -11, 21, -1]


def test_feedback_after_the_last_action_is_cut_off():
    got = read(action_ranges=[[2, 4]])
    assert got.input_ids.tolist() == [11, 12, 21, 22]
    assert not got.truncated


def test_episode_past_the_context_is_cut_and_truncated():
    got = read(context_length=3)
    assert got.input_ids.tolist() == [11, 12, 21]
    assert got.action_mask.tolist() == [False, False, True]
    assert got.truncated


def test_scores_logs_and_step_rewards_are_kept():
    given = {"scores": 0.0, "extra_logs": {"turns": 2}, "truncated": True, "step_rewards": [[3, 0.5], [6, 1.0]]}
    got = read(each_step=True, **given)
    assert (got.score, got.extra_logs, got.truncated) == (0.0, {"turns": 2.0}, True)
    assert got.step_rewards == ((3, 0.5), (6, 1.0))
    assert read(each_step=True, context_length=5, **given).step_rewards == ((3, 0.5), (3, 1.0))


def test_missing_log_probs_come_from_the_engine():
    assert plain(read(rollout_log_probs=None)) == plain(read())
    assert read(rollout_log_probs=None, action_ranges=[[2, 3]]).rollout_log_probs.tolist() == [0.0, 0.0, -0.5]
    joined = read(rollout_log_probs=None, observation_tokens=[11, 21, 22, 23], action_ranges=[[1, 4]])
    assert joined.rollout_log_probs.tolist() == [0.0, -0.5, -0.25, -0.125]


def test_arrays_have_the_types_that_training_expects():
    for got in (join_turn(prompt("1+"), NUMBERS, 3), read(), read(rollout_log_probs=None)):
        assert len(got.input_ids) == len(got.action_mask) == len(got.rollout_log_probs) == len(got.token_versions)
        assert (got.input_ids.dtype, got.action_mask.dtype) == (np.int32, np.bool_)
        assert (got.rollout_log_probs.dtype, got.token_versions.dtype) == (np.float32, np.int32)


def test_a_turn_may_have_tokens_of_several_versions():
    changing = replace(NUMBERS, token_versions=np.array([4, 5], np.int32))
    assert join_turn(prompt("1+"), changing, 100).token_versions.tolist() == [-1, -1, 4, 5]
    assert read(completions=(changing, MORE)).token_versions.tolist() == [-1, -1, 4, 5, -1, -1, 3]
    assert read(completions=(changing,), action_ranges=[[2, 4]]).token_versions.tolist() == [-1, -1, 4, 5]


def test_an_action_that_the_engine_did_not_sample_has_the_oldest_version():
    got = read(observation_tokens=[11, 12, 29, 22, 31, 32, 23])
    assert got.token_versions.tolist() == [-1, -1, 3, 3, -1, -1, 3]


def test_first_token_is_never_an_action():
    got = read(action_ranges=[[0, 4]])
    assert got.action_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation_tokens": None}, "'observation_tokens' is None"),
        ({"observation_tokens": [1, "x"]}, "'x' (str): expected token ids"),
        ({"observation_tokens": [1, 2**40]}, "1099511627776 (int): expected token ids"),
        ({"action_ranges": None}, "'action_ranges' is None"),
        ({"action_ranges": [[2]]}, "expected (start, end)"),
        ({"action_ranges": [[2, 9]]}, "(2, 9) is not within the 7 observation_tokens"),
        ({"action_ranges": [[4, 2]]}, "(4, 2) is not within"),
        ({"action_ranges": [[2, 4], [3, 5]]}, "(3, 5) starts before the previous one ends, at 4"),
        ({"action_ranges": []}, "no action within 100 tokens"),
        ({"rollout_log_probs": [0.0]}, "1 value for 7 observation_tokens"),
        ({"rollout_log_probs": "none"}, "'none' (str)"),
        ({"rollout_log_probs": None, "observation_tokens": [1, 2, 3, 4, 5, 6, 7]}, "were not sampled by the engine"),
    ],
)
def test_malformed_episode_is_reported(changes, message):
    with pytest.raises(RolloutError) as error:
        read(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("reward", "message"),
    [(None, "is None"), (float("nan"), "is nan"), (float("inf"), "is inf"), ("1", "'1' (str)"), ([1, 2], "[1, 2]")],
)
def test_missing_or_non_finite_reward_is_an_error(reward, message):
    with pytest.raises(RewardError, match="'reward' of the episode") as error:
        read(reward=reward)
    assert message in str(error.value)


def test_result_that_is_not_a_dict_is_shown():
    with pytest.raises(RolloutError, match=r"execute returned None"):
        read_trajectory(None, prompt(), [], context_length=10)


def temperatures(factors, **changes):
    return read_trajectory(
        episode(**changes), prompt(), (NUMBERS, MORE), context_length=6, temperature_factors=factors
    ).temperature_factors


def test_each_token_has_the_temperature_of_its_turn():
    assert temperatures([1.0, 1.0]) is None
    assert temperatures([1.0, 0.5]).tolist() == [1.0] * 4
    assert temperatures([2.0, 0.5]).tolist() == [1.0, 1.0, 2.0, 2.0]
    whole = read_trajectory(episode(), prompt(), (NUMBERS, MORE), context_length=99, temperature_factors=[2.0, 0.5])
    assert whole.temperature_factors.tolist() == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 0.5]


def test_tokens_that_the_engine_did_not_sample_cannot_have_several_temperatures():
    other = {"observation_tokens": [11, 12, 29, 22, 31, 32, 23]}
    assert temperatures([0.5, 0.5], **other).tolist() == [1.0, 1.0, 0.5, 0.5]  # all turns have the same
    with pytest.raises(RolloutError, match=r"several temperatures.*\(2, 4\) were not sampled by the engine"):
        temperatures([2.0, 0.5], **other)
