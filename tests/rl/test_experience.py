"""Trajectories go through scoring, penalties, shaping, KL and advantages; every expected number is worked by hand.

Prompts are tokens 4 to 6, actions are 7 and 8, and 9 comes from an environment. The models assign each token a number:

    token                      7      8      any other
    policy's log-prob         -0.7   -0.8    -5
    reference's log-prob      -0.9   -0.4     0
    value                      1      2      100

so the k1 estimate of the KL is 0.2 at token 7 and -0.4 at token 8.
"""

import asyncio
import math
import pickle
import threading
from dataclasses import replace

import pytest
import torch

from openrlhf.algo import kl
from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.data.collate import Layout
from openrlhf.rl import samples
from openrlhf.rl.experience import make_experience
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import BatchScores, ModelRewards
from openrlhf.types import Prompt
from tests.samples import make_trajectory

LOG_PROBS = torch.tensor([-5.0] * 7 + [-0.7, -0.8, -5.0])
REFERENCE = torch.tensor([0.0] * 7 + [-0.9, -0.4, 0.0])
VALUES = torch.tensor([100.0] * 7 + [1.0, 2.0, 100.0])
NAN = float("nan")


class TableWorkers:
    """Models that look up each token in the table above."""

    def __init__(self, *, reference=True, critic=True, rewards=None):
        self.reference, self.critic, self.given = reference, critic, rewards

    async def score(self, batches, *, log_probs):
        def look_up(table, expected):
            return [table[batch.input_ids] for batch in batches] if expected else None

        return BatchScores(
            look_up(LOG_PROBS, log_probs), look_up(REFERENCE, self.reference), look_up(VALUES, self.critic)
        )

    async def rewards(self, trajectories):
        return self.given


def sample(index, ids, acts, reward, **more):
    prompt = Prompt(index, "", ids[: acts.index(1)])
    return make_trajectory(prompt, ids, acts, [-1.0 * act for act in acts], reward, **more)


TWO_GROUPS = [
    sample(0, (5, 6, 7, 8), (0, 0, 1, 1), 1.0),
    sample(0, (5, 6, 7, 9, 9, 8), (0, 0, 1, 0, 0, 1), 3.0, step_rewards=((2, 1.0), (5, 2.0))),
    sample(1, (4, 7), (0, 1), 2.0, extra_logs={"speed": 4.0}),
    sample(1, (4, 7, 8), (0, 1, 1), 2.0, truncated=True, extra_logs={"speed": 5.0}),
]
PPO = replace_flags(RLConfig(), lambd=0.5, no_advantage_std_norm=True)
GRPO = replace_flags(PPO, advantage_estimator="group_norm", lambd=1.0, use_kl_loss=True)
ALL_AT_ONCE = Batching(Layout(packing=False, pad_id=0), 100)


def experience(settings=PPO, workers=None, batching=ALL_AT_ONCE, trajectories=TWO_GROUPS, kl_coef=0.5):
    return asyncio.run(make_experience(trajectories, workers or TableWorkers(), batching, settings, kl_coef))


def at_actions(made, name):
    """Values at the action tokens of each sample."""
    rows = vars(made)[name].split(made.tokens.lengths.tolist())
    return [row[torch.from_numpy(item.action_mask)].tolist() for row, item in zip(rows, made.trajectories, strict=True)]


def approx_rows(rows):
    return [pytest.approx(row, abs=1e-5) for row in rows]


def test_ppo_with_a_critic_and_kl_in_the_reward_matches_hand_computation():
    found = experience()
    # Token rewards are -0.5 kl: -0.1 at 7 and 0.2 at 8, plus the sample's reward at its last action. In the first
    # sample delta is 1.2 - 2 at 8 and -0.1 + 2 - 1 at 7, so A is -0.8 and 0.9 - 0.5 x 0.8; environment tokens
    # are skipped, so the second sample follows in the same way from 3.2 - 2.
    assert at_actions(found, "returns") == approx_rows([[1.5, 1.2], [2.5, 3.2], [1.9], [2.0, 2.2]])
    mean = 4.5 / 7  # of the advantages over all action tokens
    raw = [[0.5, -0.8], [1.5, 1.2], [0.9], [1.0, 0.2]]
    assert at_actions(found, "advantages") == approx_rows([[value - mean for value in row] for row in raw])
    assert at_actions(found, "old_values") == approx_rows([[1, 2], [1, 2], [1], [1, 2]])
    assert at_actions(found, "old_log_probs") == approx_rows([[-0.7, -0.8], [-0.7, -0.8], [-0.7], [-0.7, -0.8]])
    (batch,) = found.micro_batches(range(4), ALL_AT_ONCE)
    sampled = batch.rollout_log_probs  # [samples, tokens]
    assert sampled.sum(1).tolist() == [-2, -2, -1, -2]
    assert found.kl == pytest.approx((4 * 0.2 - 3 * 0.4) / 7)


def test_whitening_divides_by_the_deviation_over_the_rollout():
    found = experience(replace_flags(PPO, no_advantage_std_norm=False))
    # The mean of squares is 6.43 / 7 and the mean 4.5 / 7, so the standard deviation is 0.710849.
    expected = [[-0.200967, -2.029766], [1.205802, 0.783771], [0.361740], [0.502417, -0.622998]]
    assert at_actions(found, "advantages") == approx_rows(expected)


def test_only_action_tokens_have_an_advantage():
    for settings in (PPO, GRPO):
        found = experience(settings)
        assert not found.advantages[~found.tokens.action_mask].any()


# The first episode has two trajectories, the second one.
BRANCHED = [
    sample(0, (5, 6, 7, 8), (0, 0, 1, 1), 1.0, episode=0),
    sample(0, (4, 7), (0, 1), 1.0, episode=0, extra_logs={"speed": 4.0}),
    sample(0, (5, 6, 8), (0, 0, 1), 3.0, episode=1, extra_logs={"speed": 6.0}),
]


@pytest.mark.parametrize(
    ("estimator", "advantage"),
    # 1 and 3 have mean 2 and standard deviation sqrt(2); the mean of the others is 3 and 1. Over trajectories the mean
    # would be 5/3.
    [("group_norm", 0.5**0.5), ("dr_grpo", 1.0), ("rloo", 2.0)],
)
def test_an_episode_counts_once_and_all_its_trajectories_get_its_advantage(estimator, advantage):
    settings = replace_flags(GRPO, advantage_estimator=estimator)
    found = experience(settings, TableWorkers(critic=False), trajectories=BRANCHED)
    assert at_actions(found, "advantages") == approx_rows([[-advantage] * 2, [-advantage], [advantage]])
    assert found.metrics["reward"] == 2.0
    assert found.metrics["group_reward_std"] == pytest.approx(2**0.5)
    assert found.metrics["speed"] == 5.0


def test_the_lowest_penalised_reward_of_an_episode_holds_for_all_its_trajectories():
    cut = [replace(BRANCHED[0], truncated=True), *BRANCHED[1:]]
    settings = replace_flags(GRPO, advantage_estimator="dr_grpo", stop_properly_penalty_coef=0.5)
    found = experience(settings, TableWorkers(critic=False), trajectories=cut)
    # 0.5 and 3 have mean 1.75.
    assert at_actions(found, "advantages") == approx_rows([[-1.25] * 2, [-1.25], [1.25]])


def test_reward_models_score_the_last_trajectory_of_an_episode():
    class Lengths(TableWorkers):
        async def rewards(self, trajectories):
            scores = torch.tensor([float(len(item.input_ids)) for item in trajectories])
            return ModelRewards(scores, scores, [()] * len(trajectories))

    unscored = [replace(item, reward=NAN, score=NAN) for item in BRANCHED]
    found = experience(GRPO, Lengths(critic=False), trajectories=unscored)
    assert [(item.reward, item.score) for item in found.trajectories] == [(2.0, 2.0), (2.0, 2.0), (3.0, 3.0)]


def test_grpo_compares_the_samples_of_a_prompt():
    found = experience(GRPO, TableWorkers(critic=False))
    # 1 and 3 have mean 2 and standard deviation sqrt(2); equal rewards carry no signal.
    a = 0.5**0.5
    assert at_actions(found, "advantages") == approx_rows([[-a, -a], [a, a], [0.0], [0.0, 0.0]])
    assert found.returns is None
    assert found.kl == pytest.approx(-0.4 / 7)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("reinforce", [-1.0, 1.0, 0.0]),  # rewards 1 1 3 3 2 2 2 over seven tokens have mean 2
        ("rloo", [-2.0, 2.0, 0.0]),
        ("reinforce_baseline", [-1.0, 1.0, 0.0]),
        ("dr_grpo", [-1.0, 1.0, 0.0]),
    ],
)
def test_the_other_estimators_match_hand_computation(estimator, expected):
    found = experience(replace_flags(GRPO, advantage_estimator=estimator), TableWorkers(critic=False))
    first, second, third = expected
    assert at_actions(found, "advantages") == approx_rows([[first] * 2, [second] * 2, [third], [third] * 2])


def test_the_discount_counts_action_tokens():
    found = experience(replace_flags(PPO, gamma=0.5, lambd=1.0), kl_coef=0.0)
    assert at_actions(found, "returns") == approx_rows([[0.5, 1.0], [1.5, 3.0], [2.0], [1.0, 2.0]])


def test_step_rewards_are_at_the_ends_of_their_turns():
    summed = experience(replace_flags(PPO, lambd=1.0), kl_coef=0.0)
    spread = experience(replace_flags(PPO, lambd=1.0, step_rewards=True), kl_coef=0.0)
    assert at_actions(summed, "returns")[1] == approx_rows([[3.0, 3.0]])[0]
    assert at_actions(spread, "returns")[1] == approx_rows([[3.0, 2.0]])[0]
    assert at_actions(spread, "returns")[0] == at_actions(summed, "returns")[0]
    assert spread.metrics["return"] == pytest.approx(summed.metrics["return"])


# A group of two samples scored by a process reward model, which finds two steps in the first and one in the second;
# each step ends at a token 7. The score is the minimum over the steps.
REASONED = [
    sample(0, (5, 8, 7, 8, 7, 8), (0, 1, 1, 1, 1, 1), NAN),
    sample(0, (5, 7, 8), (0, 1, 1), NAN),
]
STEPS = [((2, 0.5), (4, 1.0)), ((1, 0.0),)]
PROCESS = ModelRewards(torch.tensor([0.5, 0.0]), None, STEPS)
OUTCOMES = torch.tensor([-1.0, 3.0])
BOTH = ModelRewards(PROCESS.scores + OUTCOMES, OUTCOMES, STEPS)
EACH_STEP = replace_flags(GRPO, step_rewards=True)


def process_experience(settings, rewards=PROCESS, kl_coef=0.0):
    return experience(settings, TableWorkers(critic=False, rewards=rewards), trajectories=REASONED, kl_coef=kl_coef)


def test_a_process_reward_model_rewards_each_step_at_its_last_token():
    found = process_experience(replace_flags(EACH_STEP, advantage_estimator="reinforce", no_advantage_std_norm=True))
    returns = [[1.5, 1.5, 1.0, 1.0, 0.0], [0.0, 0.0]]  # the remaining reward at each token
    mean = 5.0 / 7
    assert at_actions(found, "advantages") == approx_rows([[value - mean for value in row] for row in returns])
    assert [item.reward for item in found.trajectories] == [1.5, 0.0]
    assert [item.score for item in found.trajectories] == [0.5, 0.0]  # as without --step_rewards
    assert found.metrics["steps"] == 1.5
    at_the_end = process_experience(replace_flags(GRPO, advantage_estimator="reinforce"))
    assert [item.reward for item in at_the_end.trajectories] == [0.5, 0.0]
    assert at_actions(at_the_end, "advantages") == approx_rows([[0.5 - 2.5 / 7] * 5, [-2.5 / 7] * 2])


def test_grpo_compares_the_steps_of_a_group():
    # The steps 0.5, 1 and 0 have mean 0.5 and standard deviation 0.5: 0, 1 and -1 (arXiv 2402.03300, section 4.1.3).
    found = process_experience(EACH_STEP)
    assert at_actions(found, "advantages") == approx_rows([[1, 1, 1, 1, 0], [-1, 0]])


@pytest.mark.parametrize(
    ("estimator", "steps"),
    [("dr_grpo", (0.0, 0.5, -0.5)), ("rloo", (0.5, 1.0, -0.75))],  # the steps of the other samples average 0 and 0.75
)
def test_group_baselines_of_steps_match_hand_computation(estimator, steps):
    first, second, third = steps
    found = process_experience(replace_flags(EACH_STEP, advantage_estimator=estimator))
    both = first + second
    assert at_actions(found, "advantages") == approx_rows([[both, both, second, second, 0], [third, 0]])


def test_an_outcome_reward_is_added_at_the_last_token_to_the_step_rewards():
    found = process_experience(
        replace_flags(EACH_STEP, advantage_estimator="reinforce", no_advantage_std_norm=True), BOTH
    )
    returns = [[0.5, 0.5, 0.0, 0.0, -1.0], [3.0, 3.0]]
    assert at_actions(found, "advantages") == approx_rows([[value - 6.0 / 7 for value in row] for row in returns])
    assert [item.reward for item in found.trajectories] == [0.5, 3.0]


def test_gae_over_step_rewards_and_kl_matches_hand_computation():
    blank = replace_flags(PPO, step_rewards=True, lambd=1.0, gamma=0.5)
    workers = TableWorkers(rewards=PROCESS)
    found = experience(blank, workers, trajectories=REASONED, kl_coef=0.5)
    # Token rewards are 0.2 at tokens 8 and -0.1 at tokens 7, plus the steps: 0.2 0.4 0.2 0.9 0.2 and -0.1 0.2.
    # Returns, from the end: 0.2, 0.9 + 0.1 = 1, 0.2 + 0.5, 0.4 + 0.35, 0.2 + 0.375.
    assert at_actions(found, "returns") == approx_rows([[0.575, 0.75, 0.7, 1.0, 0.2], [0.0, 0.2]])


def test_whole_sample_penalties_apply_to_the_last_step():
    settings = replace_flags(
        EACH_STEP, advantage_estimator="dr_grpo", max_len=5, overlong_buffer_len=1, overlong_penalty_factor=0.75
    )  # the first sample is too long
    # Its last step becomes 1 - 0.75, so the steps are 0.5, 0.25 and 0 around 0.25.
    assert at_actions(process_experience(settings), "advantages") == approx_rows([[0.25, 0.25, 0, 0, 0], [-0.25, 0]])


def test_each_step_reward_is_clipped():
    settings = replace_flags(EACH_STEP, reward_clip_range=(-0.5, 0.75))
    assert at_actions(process_experience(settings), "advantages") == approx_rows(
        [[0.75, 0.75, 0.75, 0.75, 0], [-0.5, 0]]
    )


def test_a_sample_without_a_finished_step_counts_as_one_step_with_reward_zero():
    none = ModelRewards(torch.tensor([0.5, 0.0]), None, [STEPS[0], ()])
    found = process_experience(replace_flags(EACH_STEP, advantage_estimator="dr_grpo"), none)
    assert at_actions(found, "advantages") == approx_rows([[0.5, 0.5, 0.5, 0.5, 0], [-0.5, -0.5]])


def test_rewards_of_several_models_add_up_by_position():
    outcome = ModelRewards(OUTCOMES, OUTCOMES, [(), ()])
    other = ModelRewards(torch.tensor([2.0, 2.0]), None, [((4, 2.0), (5, 1.0)), ()])
    total = PROCESS + outcome + other + outcome
    assert total.scores.tolist() == [0.5, 8.0]
    assert total.outcomes is not None
    assert total.outcomes.tolist() == [-2.0, 6.0]
    assert total.steps == [((2, 0.5), (4, 3.0), (5, 1.0)), ((1, 0.0),)]
    assert (PROCESS + other).outcomes is None
    swapped = ModelRewards.join([total.take([1]), total.take([0])]).take([1, 0])
    assert (swapped.scores.tolist(), swapped.steps) == (total.scores.tolist(), total.steps)


def test_penalties_are_applied_before_the_group_comparison():
    # The two-turn response spans 4 tokens, two of them in the buffer: 3 - 1. The truncated one keeps half of 2.
    found = experience(
        replace_flags(
            GRPO,
            advantage_estimator="dr_grpo",
            max_len=4,
            overlong_buffer_len=2,
            overlong_penalty_factor=1.0,
            stop_properly_penalty_coef=0.5,
        )
    )
    assert at_actions(found, "advantages") == approx_rows([[-0.5, -0.5], [0.5, 0.5], [0.5], [-0.5, -0.5]])
    assert found.metrics["reward"] == pytest.approx((1 + 2 + 2 + 1) / 4)
    assert found.metrics["score"] == pytest.approx(2.0)


def test_clipping_is_applied_after_the_group_comparison():
    found = experience(replace_flags(GRPO, reward_clip_range=(-0.25, 0.5)))
    assert at_actions(found, "advantages") == approx_rows([[-0.25, -0.25], [0.5, 0.5], [0.0], [0.0, 0.0]])


def test_reward_models_score_samples_without_a_reward():
    blank = [replace(item, reward=NAN, score=NAN) for item in TWO_GROUPS]
    given = [item.reward for item in TWO_GROUPS]
    scores = torch.tensor(given)
    rewards = ModelRewards(scores, scores, [()] * len(given))
    found = experience(GRPO, TableWorkers(rewards=rewards), trajectories=blank)
    assert at_actions(found, "advantages") == at_actions(experience(GRPO), "advantages")
    assert [item.score for item in found.trajectories] == given
    assert experience(GRPO).trajectories == TWO_GROUPS


def test_without_a_reference_there_is_no_kl():
    found = experience(GRPO, TableWorkers(reference=False, critic=False))
    assert found.kl is None
    assert "kl" not in found.metrics
    assert found.reference_log_probs is found.old_values is found.returns is None
    assert found.old_log_probs is not None


def test_with_one_optimizer_step_old_log_probs_are_not_computed_and_kl_uses_rollout_log_probs():
    found = experience(replace_flags(GRPO, train_batch_size=1024), TableWorkers(critic=False))
    assert found.old_log_probs is None
    assert found.kl == pytest.approx((4 * (-1 + 0.9) + 3 * (-1 + 0.4)) / 7)


def test_the_ratio_of_old_samples_may_use_the_engines_log_probs():
    """The KL still uses the policy's log-probs; the ratio uses the log-probs of the sampling engine."""
    usual, found = experience(), experience(replace_flags(PPO, async_train=True, enable_vllm_is_correction=False))
    assert found.kl == usual.kl
    sampled = torch.cat([torch.from_numpy(item.rollout_log_probs) for item in TWO_GROUPS])
    assert torch.equal(found.old_log_probs, sampled)
    assert not torch.equal(usual.old_log_probs, sampled)


def test_experience_metrics_match_hand_computation():
    assert experience().metrics == pytest.approx(
        {
            "reward": 2.0,
            "score": 2.0,
            "return": (1.1 + 3.1 + 1.9 + 2.1) / 4,
            "response_length": 7 / 4,
            "total_length": 15 / 4,
            "truncated": 1 / 4,
            "group_reward_std": 2**0.5 / 2,
            "rollout/reward_std": 0.5**0.5,  # of 1, 3, 2 and 2
            "rollout/reward_max": 3.0,
            "rollout/equal_groups": 1 / 2,
            "rollout/entropy": 1.0,
            "speed": 4.5,
            "kl": -0.4 / 7,
        }
    )


CUTS = {
    "one by one": (False, 1, None),
    "by three": (False, 3, None),
    "packed by two": (True, 2, None),
    "six tokens": (True, 1, 6),
    "ten tokens, padded": (False, 1, 10),
    "an overlong sample": (True, 1, 3),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("settings", [PPO, GRPO], ids=["ppo", "grpo"])
def test_splitting_into_micro_batches_changes_nothing(cut, settings):
    packing, size, budget = CUTS[cut]
    whole, cut_up = experience(settings), experience(settings, batching=Batching(Layout(packing, 0), size, budget))
    assert cut_up.metrics == whole.metrics
    assert cut_up.trajectories == whole.trajectories
    for name in ("advantages", "returns", "old_values", "old_log_probs", "reference_log_probs"):
        assert torch.equal(vars(cut_up)[name], vars(whole)[name]), name


@pytest.mark.parametrize("settings", [PPO, GRPO, replace_flags(PPO, overlong_buffer_len=2, gamma=0.5)])
def test_computing_a_few_samples_at_a_time_changes_nothing(settings, monkeypatch):
    whole = experience(settings)
    monkeypatch.setattr(samples, "CHUNK_TOKENS", 7)
    chunks = list(whole.tokens.chunks())
    assert len(chunks) > 2
    assert sorted(number for chunk in chunks for number in chunk) == [0, 1, 2, 3]
    parts = experience(settings)
    assert parts.metrics == whole.metrics
    assert torch.equal(parts.advantages, whole.advantages)


def test_tensors_are_computed_outside_of_the_event_loop(monkeypatch):
    threads = []

    def kl_penalty(*arguments):
        threads.append(threading.current_thread())
        return kl.kl_penalty(*arguments)

    monkeypatch.setattr("openrlhf.rl.experience.kl_penalty", kl_penalty)
    experience()
    assert threads
    assert threading.main_thread() not in threads


def test_a_batch_is_sent_without_values_derived_from_its_lengths():
    for layout in (Layout(packing=True, pad_id=0), Layout(packing=False, pad_id=0)):
        batching = Batching(layout, 4)
        (batch,) = experience(batching=batching).micro_batches([2, 1, 0], batching)
        derived = {name: getattr(batch, name) for name in ("position_ids", "sequence_ids")}
        sent = pickle.loads(pickle.dumps(batch))
        assert sent.input_ids.dtype == torch.int32
        assert not {*derived, "places"} & vars(sent).keys()
        assert all(torch.equal(getattr(sent, name), value) for name, value in derived.items())


def test_a_rollout_without_actions_has_advantages_of_zero():
    nothing = make_trajectory(Prompt(0, "", (5,)), (5, 6), (False, False), reward=1.0)
    found = experience(GRPO, trajectories=[nothing, nothing])
    assert not found.advantages.any()
    assert math.isnan(found.metrics["rollout/entropy"])
