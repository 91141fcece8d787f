"""Warnings of reinforcement learning: each fault gives one line with what to try, and healthy runs give none."""

from dataclasses import replace

import pytest

from openrlhf.config.commands import RLConfig
from openrlhf.config.parser import parse
from openrlhf.rl.health import FIRST_STEPS, IN_A_ROW, RLHealth, StepNumbers
from tests.commands import run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags

HEALTHY = StepNumbers(
    step=0,
    reward=0.3,
    reward_std=0.4,
    reward_max=1.0,
    equal_groups=0.2,
    truncated=0.1,
    entropy=1.2,
    kl=0.05,
    policy_norm=1.5,
)


def config(*argv):
    return parse(RLConfig, ["--pretrain", "m", "--prompt_data", "p", *argv])


GROUPS = config("--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4", "--init_kl_coef", "0.02")


def watch(steps, settings=GROUPS):
    """Return the lines of a run with the numbers of these steps."""
    health = RLHealth(settings)
    return [line for place, numbers in enumerate(steps) for line in health.check(replace(numbers, step=place + 1))]


def after_healthy(count=30, **fault):
    """Numbers of healthy steps and then of faulty ones."""
    return [HEALTHY] * 30 + [replace(HEALTHY, **fault)] * count


FAULTS = {
    "no signal": ({"reward": 0.0, "reward_std": 0.0, "equal_groups": 1.0}, "every sample got the reward 0, so there"),
    "no signal above the mean": (  # an earlier sample got more, so this is not a success
        {"reward": 0.5, "reward_std": 0.0, "reward_max": 0.5, "equal_groups": 1.0},
        "every sample got the reward 0.5, so there",
    ),
    "no signal within groups": ({"equal_groups": 1.0}, "all samples of each prompt got the same reward, so there"),
    "little signal within groups": (
        {"equal_groups": 0.97, "reward": 0.01},
        "all samples of 97% of the prompts got the same reward, so",
    ),
    "saturated": ({"reward": 1.0, "reward_std": 0.0, "equal_groups": 1.0}, "the highest reward of the run, 1, so"),
    "truncated": ({"truncated": 0.97}, "97% of the responses ended at the length limit (1024 tokens)"),
    "kl": ({"kl": 7.5}, "the KL to the reference was above 2 nats per token (now 7.5)"),
    "entropy": ({"entropy": 0.01}, "below a tenth of its initial value (now 0.01 nats per token, at first 1.2)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_gives_one_line_with_advice_and_only_if_it_persists(fault):
    numbers, expected = FAULTS[fault]
    (line,) = watch(after_healthy(**numbers))
    assert line.startswith(f"step {30 + IN_A_ROW}: for {IN_A_ROW} steps in a row, ")
    assert expected in line
    assert ". Try: " in line
    assert watch(after_healthy(IN_A_ROW - 1, **numbers)) == []
    assert watch(after_healthy(IN_A_ROW - 1, **numbers) * 3) == []  # interrupted by healthy steps


def test_equal_rewards_within_prompts_matter_only_to_estimators_that_compare_them():
    assert watch(after_healthy(equal_groups=1.0), config("--advantage_estimator", "reinforce")) == []


def test_the_line_names_the_flag_that_limits_the_length():
    flags = {
        "--generate_max_len": (),
        "--max_len": ("--max_len", "512"),
        "--max_new_tokens": ("--max_new_tokens", "64"),
    }
    for flag, argv in flags.items():
        (line,) = watch(after_healthy(truncated=1.0), config(*argv))
        assert f"Try: a larger {flag}, " in line


def test_an_exact_task_that_is_learned_may_lower_the_entropy():
    """In the quickstart, GRPO lowers it from 1.4 to 0.3 while the reward rises from 0.1 to 1."""
    steps = [
        replace(HEALTHY, reward=0.1 + 0.009 * step, entropy=1.4 * 0.95**step, equal_groups=step / 101)
        for step in range(100)
    ]
    assert watch(steps) == []


def test_a_jump_in_the_gradient_norm_is_reported_once():
    steps = [replace(HEALTHY, policy_norm=1.0 + step % 3, critic_norm=0.5) for step in range(30)]
    spikes = [replace(HEALTHY, policy_norm=200.0)] * 2
    (line,) = watch([*steps, *spikes])
    assert line.startswith("step 31: the policy's gradient norm is 200, 100 times the usual 2; --max_norm limits")
    assert "a smaller --actor_learning_rate" in line
    (line,) = watch([*steps, replace(HEALTHY, critic_norm=50.0)], config("--advantage_estimator", "gae"))
    assert "the critic's gradient norm is 50, 100 times" in line


def test_metrics_that_a_step_does_not_log_are_not_judged():
    few = {"reward": 0.5, "rollout/reward_std": 0.1, "rollout/reward_max": 0.7, "truncated": 0.0}
    assert watch([StepNumbers.of(1, few)] * (FIRST_STEPS + IN_A_ROW)) == []


# The responses of this task end by themselves at a digit, and shorter ones are not worse.
SHARE = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [sum(letter.islower() for letter in answer) / max(len(answer), 1) for answer in answers]
"""
ENDING = {"generate_max_len": 32, "stop": list("0123456789"), "num_episodes": 3}


@pytest.fixture
def run(tmp_path, models, capsys):
    """Return a function that trains on the toy task and returns the warnings."""

    def start(reward=SHARE, **flags):
        paths = {"save_path": "./out", "ckpt_path": "./ckpt", "pretrain": models()}
        run_command("train_ppo", paths | SMALL | task_flags(tmp_path, make_prompts(32), reward) | flags)
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if "in a row" in line or "times the usual" in line or "Likely cause" in line]

    return start


@pytest.mark.slow(seconds=4)
def test_a_healthy_run_gives_no_warning(run):
    assert run(**ENDING) == []
    assert run(advantage_estimator="gae", init_kl_coef=0.01, **ENDING) == []


def test_truncation_is_reported(run, monkeypatch):
    monkeypatch.setattr("openrlhf.rl.health.TRUNCATED", 0.5)
    (line,) = run(min_new_tokens=8)  # about nine in ten do not end with the last token that the limit allows
    assert "% of the responses ended at the length limit (8 tokens)" in line


@pytest.mark.slow(seconds=4)
def test_a_policy_that_leaves_its_reference_is_reported(run):
    lines = run(init_kl_coef=1e-6, actor_learning_rate=0.3, **ENDING)
    assert [line for line in lines if "the KL to the reference was above 2 nats per token" in line]
