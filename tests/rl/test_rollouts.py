"""Rollouts: prompts in order, one group for each, and filtering of groups."""

import asyncio
from dataclasses import replace

import pytest

from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.errors import RolloutError
from openrlhf.rl.group_stream import GeneratedRollouts, StreamState
from openrlhf.rl.rollouts import GroupRunner, PromptOrder, is_kept, run_groups, sampling
from openrlhf.types import Prompt
from tests.rl.stand_ins import EchoEngine, NoModels, OneTurn, RewardFunction, SeveralTurns, prompts
from tests.samples import make_trajectory, plain

CONFIG = replace_flags(RLConfig(), rollout_batch_size=3, n_samples_per_prompt=2, max_len=8, max_new_tokens=10, seed=5)


def make_rollout(reward=lambda prompt, sample: 1.0, config=CONFIG, place=0, count=8, workers=None):
    order = PromptOrder(prompts(count), 1, 0)
    state = StreamState(drawn=place)
    runner = GroupRunner(OneTurn(reward), print)
    source = GeneratedRollouts(order, EchoEngine(), runner, workers or NoModels(), config, state)
    return order, asyncio.run(source.take(4, place))


def prompt_indices(rollout):
    return [item.prompt.index for item in rollout.trajectories]


def test_every_episode_has_its_own_shuffle():
    order = PromptOrder(prompts(20), 3, seed=1)
    texts = [order.prompt(position).text for position in range(len(order))]
    assert len(texts) == len(order) == 60
    episodes = [texts[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(episode) == sorted(prompt.text for prompt in prompts(20)) for episode in episodes)
    assert episodes[0] != episodes[1] != episodes[2]
    assert [order.prompt(position).index for position in (18, 21)] == [18, 21]
    other = PromptOrder(prompts(20), 3, seed=2)
    assert [other.prompt(position).text for position in range(len(other))] != texts


def test_a_rollout_takes_prompts_in_order():
    order, rollout = make_rollout(place=2)
    assert prompt_indices(rollout) == [2, 2, 3, 3, 4, 4]
    assert [item.prompt for item in rollout.trajectories][::2] == [order.prompt(position) for position in (2, 3, 4)]
    assert (rollout.number, rollout.next_place, rollout.metrics) == (4, 5, {})


def test_the_last_rollout_takes_the_remaining_prompts():
    _, rollout = make_rollout(place=6)
    assert prompt_indices(rollout) == [6, 6, 7, 7]
    assert rollout.next_place == 8


def test_samples_have_their_own_seed_and_token_limit():
    prompt = prompts(3)[2]
    flags = CONFIG.rollout
    params = sampling(prompt, flags, 5)
    assert {item.max_tokens for item in params} == {6}  # the context minus a prompt of two tokens
    assert len({item.seed for item in params}) == 2
    assert params == sampling(prompt, flags, 5)
    assert params[0].seed != sampling(replace(prompt, index=9), flags, 5)[0].seed
    assert params[0].seed != sampling(prompt, flags, 6)[0].seed
    assert sampling(prompt, replace(flags, max_len=2), 5)[0].max_tokens == 1


FILTERED = replace_flags(CONFIG, dynamic_filtering=True)


def reward_by_index(kept):
    return lambda prompt, sample: 0.5 if prompt.index in kept else 1.0


def test_rejected_groups_are_replaced_by_the_next_prompts():
    _, rollout = make_rollout(reward_by_index({0, 3, 4, 6}), FILTERED)
    assert prompt_indices(rollout)[::2] == [0, 3, 4]
    assert rollout.next_place == 5
    assert rollout.metrics == {"dynamic_filtering_pass_rate": pytest.approx(60.0)}


def test_accepted_groups_are_kept_when_prompts_run_out():
    _, rollout = make_rollout(reward_by_index({1, 7}), FILTERED)
    assert prompt_indices(rollout)[::2] == [1, 7]
    assert rollout.next_place == 8
    _, nothing = make_rollout(reward_by_index({}), FILTERED)
    assert nothing.trajectories == []


def test_reward_models_score_before_a_group_is_filtered():
    half = RewardFunction(lambda item: 0.5 if item.prompt.index % 2 else 0.0)
    _, rollout = make_rollout(lambda prompt, sample: float("nan"), FILTERED, workers=half)
    assert prompt_indices(rollout)[::2] == [1, 3, 5]
    assert {item.reward for item in rollout.trajectories} == {0.5}


def test_a_group_left_with_one_sample_is_dropped_and_counted():
    def reward(prompt, sample):
        return None if prompt.index == 1 and sample == 0 else 1.0

    _, rollout = make_rollout(reward)
    assert prompt_indices(rollout)[::2] == [0, 2, 3]
    assert rollout.metrics == {"rollout/failures": 1.0}
    _, single = make_rollout(reward, replace_flags(CONFIG, n_samples_per_prompt=1))
    assert prompt_indices(single) == [0, 2, 3]


def test_all_samples_of_all_prompts_advance_together():
    engine = EchoEngine()
    runner = GroupRunner(SeveralTurns(lambda prompt, sample: prompt.index), print)
    asyncio.run(run_groups(prompts(3), engine, runner, replace_flags(CONFIG, n_samples_per_prompt=1)))
    assert engine.batches == [[(1, 0, 0), (2, 0, 0)], [(2, 0, 1)]]


def test_a_limit_runs_groups_one_after_the_other_with_the_same_result():
    engine = EchoEngine()
    runner = GroupRunner(SeveralTurns(lambda prompt, sample: 1), print)
    settings = replace_flags(CONFIG, n_samples_per_prompt=1, max_concurrent_episodes=2)
    asyncio.run(run_groups(prompts(5), engine, runner, settings))
    assert engine.batches == [[(0, 0, 0), (1, 0, 0)], [(2, 0, 0), (3, 0, 0)], [(4, 0, 0)]]
    _, free = make_rollout()
    _, bounded = make_rollout(config=replace_flags(CONFIG, max_concurrent_episodes=2))
    assert plain(replace(free, times={})) == plain(replace(bounded, times={}))


def test_a_failing_group_cancels_waiting_groups():
    class FailingExecutor:
        async def run_group(self, prompt, params, sessions):
            raise RolloutError(f"prompt {prompt.index}")

    runner = GroupRunner(FailingExecutor(), print)
    with pytest.raises(RolloutError, match="prompt 0"):
        asyncio.run(run_groups(prompts(5), EchoEngine(), runner, replace_flags(CONFIG, max_concurrent_episodes=1)))


def test_a_group_is_filtered_by_the_scores_of_its_episodes():
    """Over trajectories, the mean score would be 0.5."""
    flags = RolloutFlags(n_samples_per_prompt=3, dynamic_filtering=True, dynamic_filtering_reward_range=(0.4, 1.0))

    def trajectory(episode, score):
        return make_trajectory(Prompt(0, "", (5,)), (5, 7), (0, 1), score=score, episode=episode)

    group = [trajectory(0, 1.0), trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, 0.0)]
    assert not is_kept(group, flags)
    assert is_kept([*group, trajectory(3, 1.0)], flags)
    assert not is_kept(group[:2], RolloutFlags(n_samples_per_prompt=2))  # one sample is left
