"""Values derived from flags of several sections."""

import pickle
from dataclasses import fields
from typing import get_args

import pytest

from openrlhf.algo.kl import KL_ESTIMATORS
from openrlhf.algo.policy_loss import CORRECTIONS, POLICY_LOSSES
from openrlhf.algo.reduce import AGGREGATIONS
from openrlhf.algo.shaping import SHAPING
from openrlhf.config.commands import COMMANDS, RLConfig
from openrlhf.config.flags import flags_of, replace_flags, without_none
from openrlhf.config.runtime import (
    caches_prefixes,
    evaluation_config,
    is_asynchronous,
    num_rollouts,
    policy_loss_flags,
    queue_size,
    scores_policy,
    staleness_limit,
    steps_per_rollout,
    surplus_groups,
)
from openrlhf.config.sections.training import OptimizerFlags

REGISTRIES = {
    "advantage_estimator": SHAPING,
    "kl_estimator": KL_ESTIMATORS,
    "policy_loss_type": POLICY_LOSSES,
    "loss_agg_mode": AGGREGATIONS,
    "vllm_is_correction_type": CORRECTIONS,
}


def rl(**flags):
    return replace_flags(RLConfig(), **flags)


@pytest.mark.parametrize("name", REGISTRIES)
def test_choices_are_the_keys_of_their_registry(name):
    assert set(get_args(without_none(flags_of(RLConfig)[name].type))) == set(REGISTRIES[name])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_can_be_sent_to_a_worker(command):
    config = COMMANDS[command]()
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_optimizer_flag_has_a_counterpart_for_the_critic():
    flags = flags_of(RLConfig)
    for item in fields(OptimizerFlags):
        shared, own = flags[item.name], flags[f"critic_{item.name}"]
        assert own.default is None
        assert own.within == shared.within
        assert without_none(own.type) == without_none(shared.type)


def test_the_critic_uses_its_own_values_or_else_the_policys():
    flags = rl(l2=0.1, max_norm=2.0, critic_l2=0.0, critic_optim="muon", critic_muon_nesterov=False).optimizer
    assert (flags.critic.l2, flags.critic.optim, flags.critic.muon_nesterov) == (0.0, "muon", False)
    assert flags.critic.max_norm == 2.0
    assert (flags.l2, flags.optim) == (0.1, "adam")


def test_only_asynchronous_training_has_a_queue():
    assert queue_size(rl(async_queue_size=3)) == 0
    assert queue_size(rl(async_train=True, async_queue_size=3)) == 3
    assert not is_asynchronous(rl(async_train=True, async_queue_size=0))


def test_steps_and_rollouts_are_rounded_up():
    config = rl(rollout_batch_size=10, n_samples_per_prompt=2, train_batch_size=8, max_epochs=2)
    assert steps_per_rollout(config) == 6  # 20 samples are 8 + 8 + 4
    assert num_rollouts(config, 25) == 3
    assert num_rollouts(rl(rollout_batch_size=10, max_steps=2), 25) == 2


def test_evaluation_has_its_own_count_and_temperature_and_keeps_every_group():
    config = rl(dynamic_filtering=True, eval_n_samples_per_prompt=3, eval_temperature=0.0, top_p=0.9)
    rollout = evaluation_config(config).rollout
    assert (rollout.n_samples_per_prompt, rollout.temperature, rollout.dynamic_filtering) == (3, 0.0, False)
    assert rollout.top_p == 0.9


@pytest.mark.parametrize(
    ("flags", "aggregation", "corrected"),
    [
        ({}, "token-mean", False),
        ({"advantage_estimator": "dr_grpo"}, "constant", False),
        ({"advantage_estimator": "dr_grpo", "loss_agg_mode": "seq-mean"}, "seq-mean", False),
        ({"policy_loss_type": "gspo", "loss_agg_mode": "token-mean"}, "seq-mean", False),
        ({"async_train": True}, "token-mean", True),
        ({"async_train": True, "enable_vllm_is_correction": False}, "token-mean", False),
        ({"enable_vllm_is_correction": True}, "token-mean", True),
    ],
)
def test_the_loss_takes_defaults_from_other_sections(flags, aggregation, corrected):
    found = policy_loss_flags(rl(**flags))
    assert (found.aggregation, found.enable_vllm_is_correction) == (aggregation, corrected)


ONE_STEP = {"rollout_batch_size": 8, "train_batch_size": 8}


@pytest.mark.parametrize(
    ("flags", "scores"),
    [
        ({**ONE_STEP, "init_kl_coef": 0.0}, False),
        ({**ONE_STEP, "use_kl_loss": True}, False),
        (ONE_STEP, True),  # for the KL in the reward
        ({"use_kl_loss": True}, True),  # several steps
        ({**ONE_STEP, "use_kl_loss": True, "enable_vllm_is_correction": True}, True),
        (
            {"use_kl_loss": True, "async_train": True, "enable_vllm_is_correction": False},
            False,
        ),  # uses the engine's
    ],
)
def test_the_policy_scores_its_samples_only_if_something_needs_it(flags, scores):
    assert scores_policy(rl(**flags)) is scores


def test_only_engines_without_lockstep_oversample():
    asked = {"rollout_batch_size": 8, "vllm_generate_batch_size": 10, "async_train": True}
    assert surplus_groups(rl(**asked, runtime="local")) == 0
    assert surplus_groups(rl(**asked, runtime="ray")) == 2
    assert surplus_groups(rl(**asked, vllm_num_engines=1)) == 2
    assert surplus_groups(rl(rollout_batch_size=8, vllm_generate_batch_size=4, vllm_num_engines=1)) == 0


def test_samples_of_the_surplus_are_limited_by_max_staleness():
    asked = {"rollout_batch_size": 8, "vllm_generate_batch_size": 10, "vllm_num_engines": 1}
    assert staleness_limit(rl(**asked, async_train=True)) is None
    assert staleness_limit(rl(**asked, async_train=True, max_staleness=3)) == 3
    assert staleness_limit(rl(**asked)) == 0  # synchronous
    assert staleness_limit(rl(async_train=True, max_staleness=3)) is None  # guaranteed by the queue


def test_prefixes_are_cached_by_default_for_agents():
    assert not caches_prefixes(rl())
    assert caches_prefixes(rl(enable_prefix_caching=True))
    assert caches_prefixes(rl(agent_func_path="agent.py"))
    assert not caches_prefixes(rl(agent_func_path="agent.py", enable_prefix_caching=False))
