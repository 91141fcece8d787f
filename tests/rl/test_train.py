"""RL runs from the command line on a toy task: they learn, repeat exactly, and follow their flags."""

import json
import shutil
import time

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.data import row_cache
from openrlhf.monitor import shown_number
from openrlhf.rl.models import Trained
from openrlhf.training import checkpoint
from tests.commands import FAST, FinishedRun, run_command, unlisted_metrics
from tests.rl.toy_task import LABEL_REWARD, LENGTH, SMALL, make_prompts, read_rollouts, task_flags
from tests.tiny import make_tokenizer
from tests.toy_data import PAIRS, dataset_flags, pairs, write_rows

# The mean reward of the last two steps must exceed that of the first two by this; over five seeds and all estimators it
# does by 0.46 to 0.89.
MARGIN = 0.25


@pytest.fixture
def train_ppo(tmp_path, models):
    """Return a function that runs train_ppo on the toy task, with 32 prompts by default; its flags override these."""

    def start(name="out", rows=None, **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": models()}
        given = {} if "reward_pretrain" in flags else task_flags(tmp_path, rows or make_prompts(32))
        if not given:
            given = {"prompt_data": write_rows(tmp_path / "prompts.jsonl", rows or make_prompts(32))}
        run_command("train_ppo", paths | SMALL | given | flags)
        assert unlisted_metrics("train_ppo", tmp_path / name / "run", extra_logs=["labelled"]) == []
        return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")

    return start


def weights(ran, file="model.safetensors"):
    return load_file(ran.save_path / file)


def have_equal_weights(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def initial_weights(models):
    return load_file(f"{models()}/model.safetensors")


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"])
def test_every_estimator_learns(estimator, train_ppo):
    flags = {"n_samples_per_prompt": 8, "train_batch_size": 64, "micro_train_batch_size": 64}
    flags |= {"micro_rollout_batch_size": 64, "actor_learning_rate": 2e-2}
    rewards = train_ppo(rows=make_prompts(64), advantage_estimator=estimator, **flags).train("reward")
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + MARGIN


@pytest.mark.slow(seconds=2)
def test_the_same_seed_gives_the_same_run(train_ppo):
    once, again, other = train_ppo("once"), train_ppo("again"), train_ppo("other", seed=7)
    assert once.metrics == again.metrics
    assert have_equal_weights(weights(once), weights(again))
    assert not have_equal_weights(weights(once), weights(other))
    assert read_rollouts(once, 4) == read_rollouts(again, 4)


@pytest.mark.slow(seconds=2)
def test_reward_calls_with_several_groups_do_not_change_a_run(train_ppo, tmp_path):
    """The engine answers all prompts together, so that each call gets the next three of a rollout of eight."""
    alone = train_ppo("alone")
    reward = tmp_path / "recording.py"
    seen = tmp_path / "prompts_per_call"
    reward.write_text(
        (tmp_path / "reward.py")
        .read_text()
        .replace(
            "    answers =",
            f"    with open({str(seen)!r}, 'a') as out:\n        out.write(f'{{len(set(prompts))}} ')\n    answers =",
        )
    )
    together = train_ppo("together", remote_rm_url=str(reward), reward_batch_groups=3, reward_processes=1)
    assert seen.read_text().split() == ["3", "3", "2"] * 5  # the test with made-up answers, and four rollouts
    assert together.metrics == alone.metrics
    assert have_equal_weights(weights(together), weights(alone))


@pytest.mark.slow(seconds=2)
def test_prompts_from_the_cache_do_not_change_a_run(train_ppo, tmp_path, monkeypatch):
    in_memory = train_ppo("in_memory")
    monkeypatch.setattr(row_cache, "MIN_CACHED", 1)
    for start in ("first", "second"):
        assert train_ppo(start).metrics == in_memory.metrics
    assert len([*(tmp_path / "cache").rglob("*.arrow")]) == 1


BRANCHING = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        found, text = [], prompt
        for turn in range(2):
            ids = hf_tokenizer(text, add_special_tokens=False)["input_ids"]
            output = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            known = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs)]
            found.append({
                "observation_tokens": ids + output.token_ids,
                "action_ranges": [(len(ids), len(ids) + len(output.token_ids))],
                "rollout_log_probs": [0.0] * len(ids) + known,
            })
            text = prompt[:1]
        return [*found[:-1], {**found[-1], "reward": sum(letter.islower() for letter in output.text) / 8}]
"""


@pytest.mark.slow(seconds=3)
def test_an_agent_with_several_trajectories_trains_and_its_record_replays(train_ppo, tmp_path):
    """Each of the 32 episodes of a step has two trajectories, which share reward and advantage."""
    (tmp_path / "agent.py").write_text(BRANCHING)
    ran = train_ppo("once", remote_rm_url=None, agent_func_path="./agent.py", train_batch_size=64)
    rows = read_rollouts(ran, 1)
    assert len(rows) == 64
    episodes = {}
    for row in rows:
        acting = zip(row["advantages"], row["action_mask"], strict=True)
        advantage = {round(value, 5) for value, acts in acting if acts}
        episodes.setdefault((row["prompt"]["index"], row["episode"]), []).append((row["reward"], advantage))
    assert len(episodes) == 32
    assert all(len(items) == 2 and items[0] == items[1] for items in episodes.values())
    assert ran.train("reward")[0] == pytest.approx(sum(items[0][0] for items in episodes.values()) / 32)
    again = train_ppo("again", replay="./once/run/rollouts", train_batch_size=64)
    assert have_equal_weights(weights(again), weights(ran))


def test_an_empty_queue_equals_the_synchronous_run(train_ppo):
    flags = {"train_batch_size": 16}
    sync, queue = train_ppo("sync", **flags), train_ppo("queue", async_train=True, async_queue_size=0, **flags)
    assert queue.metrics == sync.metrics
    assert have_equal_weights(weights(queue), weights(sync))


def test_an_empty_queue_equals_the_synchronous_run_with_one_step_per_rollout(train_ppo):
    sync, queue = train_ppo("sync"), train_ppo("queue", async_train=True, async_queue_size=0)
    assert queue.metrics == sync.metrics


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(("size", "staleness"), [(1, [0, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2])])
def test_staleness_is_bounded_by_the_queue_length(size, staleness, train_ppo, models):
    ran = train_ppo(rows=make_prompts(40), async_train=True, async_queue_size=size)
    assert ran.train("staleness") == staleness
    assert [row["version"] for row in read_rollouts(ran, 5)] == [4 - size] * 32
    assert not have_equal_weights(weights(ran), initial_weights(models))
    again = train_ppo("again", rows=make_prompts(40), async_train=True, async_queue_size=size)
    assert again.metrics == ran.metrics
    assert have_equal_weights(weights(again), weights(ran))


@pytest.mark.parametrize("kind", ["lora", "mixtral", "tied"])
def test_a_separate_engine_receives_every_update(kind, train_ppo, models):
    flags = {
        "lora": {"lora_rank": 4},
        "mixtral": {"pretrain": models("mixtral")},
        "tied": {"pretrain": models(tie_word_embeddings=True)},
    }[kind]
    # The first rollout trains the weights that sampled it, the second those after one update.
    ran = train_ppo(rows=make_prompts(24), async_train=True, **flags)
    kl = ran.train("engine_kl")
    assert abs(kl[0]) < 1e-5
    assert abs(kl[1]) > 1e-4
    assert ran.train("staleness") == [0, 1, 1]


@pytest.mark.slow(seconds=3)
def test_asynchronous_training_corrects_for_old_samples_by_default(train_ppo):
    ran, explicit = (
        train_ppo("default", async_train=True),
        train_ppo("given", async_train=True, enable_vllm_is_correction=True),
    )
    assert ran.metrics == explicit.metrics
    assert "is_filter_ratio" in ran.metrics[0]
    assert "is_filter_ratio" not in train_ppo("sync").metrics[0]


def test_without_correction_the_ratio_and_its_clip_act_on_old_samples(train_ppo):
    """Also with one step per rollout: the old log-probs are those of the sampling weights."""
    flags = {"async_train": True, "enable_vllm_is_correction": "false", "actor_learning_rate": 5e-2}
    ran = train_ppo(**flags)
    assert abs(ran.train("ppo_kl")[0]) < 1e-5  # the first rollout is not stale
    assert all(abs(kl) > 1e-3 for kl in ran.train("ppo_kl")[1:])
    assert max(ran.train("ppo_clip_ratio")) > 0


def test_engine_and_trainer_agree_on_log_probs(train_ppo):
    ran = train_ppo(temperature=0.7, enable_vllm_is_correction=True, train_batch_size=16)
    assert max(abs(value) for value in ran.train("engine_kl")) < 1e-5
    for row in read_rollouts(ran, 3):
        assert row["old_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=1e-5)


@pytest.mark.parametrize("limit", [{"top_p": 0.6}, {"top_k": 3, "min_new_tokens": 3}], ids=str)
def test_correction_finds_no_difference_with_a_truncated_vocabulary(limit, train_ppo):
    """Sampling uses a part of the distribution; the comparison uses all of it."""
    ran = train_ppo(enable_vllm_is_correction=True, max_steps=2, **limit)
    assert max(abs(value) for value in ran.train("engine_kl")) < 1e-5


PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.05, "gamma": 0.99, "lambd": 0.95}


def test_ppo_runs_with_all_options(train_ppo, models, tmp_path):
    flags = {"max_epochs": 2, "train_batch_size": 16, "save_value_network": True, "enable_ema": True, "ema_beta": 0.5}
    ran = train_ppo(kl_target=0.1, kl_horizon=100, **PPO, **flags)
    (line, *_, last) = ran.metrics
    wanted = {"policy_loss", "critic_loss", "kl", "kl_coef", "actor_lr", "critic_lr", "actor_grad_norm", "ppo_kl"}
    assert wanted < line.keys()
    assert line["kl_coef"] == 0.05
    assert abs(line["kl"]) < 1e-5  # the policy still equals the reference
    assert last["kl_coef"] != 0.05
    assert last["labelled"] == 1.0  # an extra log of the reward function
    critic = load_file(tmp_path / "out_critic" / "model.safetensors")
    assert critic["score.weight"].shape[0] == 1
    assert not have_equal_weights(weights(ran), initial_weights(models))


def test_with_ema_the_saved_policy_is_the_average(train_ppo, models):
    plain = train_ppo("plain", max_steps=1)
    averaged = train_ppo("averaged", max_steps=1, enable_ema=True, ema_beta=0.75)
    first, trained, mean = initial_weights(models), weights(plain), weights(averaged)
    for name in first:
        torch.testing.assert_close(mean[name], 0.75 * first[name] + 0.25 * trained[name])


@pytest.mark.slow(seconds=3)
def test_kl_in_the_loss_keeps_the_policy_near_the_reference(train_ppo):
    without_kl = train_ppo("free", use_kl_loss=True, kl_estimator="k3", init_kl_coef=1e-9)
    with_kl = train_ppo("held", use_kl_loss=True, kl_estimator="k3", init_kl_coef=3.0)
    assert 0 < with_kl.train("kl_loss")[-1] < without_kl.train("kl_loss")[-1]  # 0.5 to 0.7 of it over five seeds


@pytest.mark.slow(seconds=3)
def test_the_policy_is_frozen_while_the_critic_warms_up(train_ppo):
    ran = train_ppo(freezing_actor_steps=2, **PPO)
    first, second, third, _ = ran.metrics
    assert "actor_lr" not in first
    assert "actor_lr" not in second
    assert "actor_lr" in third
    assert first["critic_grad_norm"] > 0


@pytest.mark.slow(seconds=2)
def test_a_frozen_policy_does_not_change(train_ppo, models, capsys):
    ran = train_ppo(freezing_actor_steps=4, **PPO)
    assert "the policy is never trained: --freezing_actor_steps 4 covers 4 rollouts" in capsys.readouterr().err
    assert have_equal_weights(weights(ran), initial_weights(models))


@pytest.mark.slow(seconds=3)
def test_a_reward_model_scores_the_samples(train_ppo, tmp_path, models):
    flags = FAST | PAIRS | dataset_flags(tmp_path, pairs(48), pairs(5, seed=1)) | {"pretrain": models()}
    run_command("train_rm", flags | {"save_path": "rm", "ckpt_path": "rm_ckpt", "max_epochs": 2})
    flags = {"reward_pretrain": "./rm", "normalize_reward": True}
    ran = train_ppo(**flags)
    assert len(set(ran.train("reward"))) == 4
    twice = train_ppo("twice", reward_pretrain="./rm,./rm", normalize_reward=True, max_steps=1)
    assert twice.train("reward")[0] == pytest.approx(2 * ran.train("reward")[0], rel=1e-5)
    half = train_ppo(
        "half", reward_pretrain="./rm,./rm", reward_weights=[0.25, 0.25], normalize_reward=True, max_steps=1
    )
    assert half.train("reward")[0] == pytest.approx(ran.train("reward")[0] / 2, rel=1e-5)
    ppo = train_ppo("ppo", max_steps=1, **flags, **PPO)
    assert ppo.train("reward")[0] == pytest.approx(ran.train("reward")[0], rel=1e-5)


def test_filtering_uses_the_reward_models_scores(train_ppo, tmp_path, models, capsys):
    flags = FAST | PAIRS | dataset_flags(tmp_path, pairs(16), pairs(5, seed=1)) | {"pretrain": models()}
    run_command("train_rm", flags | {"save_path": "rm", "ckpt_path": "rm_ckpt"})
    ran = train_ppo(
        reward_pretrain="./rm", dynamic_filtering=True, dynamic_filtering_reward_range=[-9.0, 9.0], max_steps=2
    )
    assert ran.train("dynamic_filtering_pass_rate") == [100.0, 100.0]
    with pytest.raises(SystemExit, match="1"):
        train_ppo("none", reward_pretrain="./rm", dynamic_filtering=True, dynamic_filtering_reward_range=[98.0, 99.0])
    stderr = capsys.readouterr().err
    assert (
        "error: no step was trained, and nothing is saved: no group of samples was kept. --dynamic_filtering" in stderr
    )
    assert "saved none" not in stderr
    assert not (tmp_path / "none" / "model.safetensors").exists()


def failing_reward(tmp_path, condition):
    """A reward function that raises in its third line if the condition holds for the first prompt of a group."""
    source = f"""def reward_func(queries, prompts, labels):
    if {condition}:
        raise LookupError("no such grader")
    return [float(len(query)) for query in queries]
"""
    (tmp_path / "failing.py").write_text(source)
    return str(tmp_path / "failing.py")


def test_a_run_in_which_all_samples_fail_says_why_and_exits_with_1(train_ppo, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        train_ppo(remote_rm_url=failing_reward(tmp_path, "True"), on_reward_error="skip")
    lines = capsys.readouterr().err.splitlines()
    cause = f"failing.py raised LookupError: no such grader at {tmp_path / 'failing.py'}:3"
    (first,) = [line for line in lines if "a sample failed and is skipped (--on_reward_error skip)" in line]
    assert cause in first
    counts = [line for line in lines if "samples failed and were skipped" in line and "the latest: " in line]
    assert len(counts) == 3  # 4, 16 and 64 of 128
    assert lines[-1].startswith("openrlhf: error: no step was trained, and nothing is saved")
    assert "128 of 128 samples failed" in lines[-1]
    assert cause in lines[-1]
    assert not any("saved ./out" in line for line in lines)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_skipped_failures_are_counted_over_the_run(train_ppo, tmp_path, capsys):
    ran = train_ppo(remote_rm_url=failing_reward(tmp_path, "prompts[0][0] in 'abc'"), on_reward_error="skip")
    # Six of 32 prompts begin with a, b or c; the groups that fail are replaced, so the last rollout is smaller.
    assert [row["prompt"]["text"][0] in "abc" for row in read_rollouts(ran, 4)] == [False] * 8
    each = [row.get("rollout/failures", 0.0) for row in ran.metrics]
    assert [row.get("rollout/failures_total", 0.0) for row in ran.metrics] == [sum(each[: n + 1]) for n in range(4)]
    assert sum(each) == 24
    stderr = capsys.readouterr().err
    assert stderr.count("a sample failed and is skipped") == 1
    assert "24 of 128 samples failed and were skipped (--on_reward_error skip), the first: reward_func in" in stderr


def test_filtered_groups_are_replaced_and_accepted_groups_are_trained(train_ppo, tmp_path):
    # Every third prompt gives a reward of 0.5 to all its samples; the others give zero and are filtered out.
    rows = [row | {"label": "0.5" if number % 3 == 0 else "0"} for number, row in enumerate(make_prompts(33))]
    ran = train_ppo(rows=rows, dynamic_filtering=True, remote_rm_url=str(solved_task(tmp_path)))
    good = {row["input"] for row in rows if row["label"] == "0.5"}
    trained = [{row["prompt"]["text"] for row in read_rollouts(ran, step + 1)} for step in range(len(ran.metrics))]
    assert [len(texts) for texts in trained] == [8, 3]
    assert set.union(*trained) == good
    assert all(0 < rate < 100 for rate in ran.train("dynamic_filtering_pass_rate"))


@pytest.mark.slow(seconds=3)
def test_a_filtered_run_completes_its_learning_rate_schedule(train_ppo, tmp_path):
    """Two of three prompts are filtered out, so there are two rollouts instead of five, with 8 and 3 prompts."""
    rows = [row | {"label": "0.5" if number % 3 == 0 else "0"} for number, row in enumerate(make_prompts(33))]
    flags = {"lr_scheduler": "linear", "remote_rm_url": str(solved_task(tmp_path)), "actor_learning_rate": 1.0}
    whole = train_ppo("whole", rows=rows, **flags)
    # five rollouts of 8, 8, 8, 8 and 1 prompts
    assert whole.train("actor_lr") == pytest.approx([1 - place / 33 for place in (0, 8, 16, 24, 32)])
    ran = train_ppo("filtered", rows=rows, dynamic_filtering=True, **flags)
    rates, consumed = ran.train("actor_lr"), 800 / ran.train("dynamic_filtering_pass_rate")[0]
    assert rates == pytest.approx([1.0, 1 - consumed / 33])
    limited = train_ppo("limited", rows=rows, dynamic_filtering=True, max_steps=1, train_batch_size=8, **flags)
    assert limited.train("actor_lr") == pytest.approx([0.25])  # the last of four steps in the only rollout


def test_a_schedule_stays_in_range_for_any_number_of_remaining_prompts():
    trained = Trained(None, lambda step: 1 - step / 10, 10, 1.0)
    cases = {(0.0, 0.0): 1.0, (0.5, 0.0): 0.5, (0.55, 0.1): 0.5, (0.2, 0.4): 1.0, (1.2, 0.0): 0.0, (1.0, 1.0): 1.0}
    assert {case: trained.scale(*case) for case in cases} == pytest.approx(cases)


def test_a_frozen_policy_warms_up_when_its_training_starts(train_ppo):
    ran = train_ppo(
        freezing_actor_steps=2, lr_scheduler="linear", actor_learning_rate=1.0, critic_learning_rate=1.0, **PPO
    )
    assert ran.train("critic_lr") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert [line.get("actor_lr") for line in ran.metrics] == [None, None, pytest.approx(1.0), pytest.approx(0.5)]


def solved_task(folder):
    (folder / "solved.py").write_text(LABEL_REWARD)
    return folder / "solved.py"


VARIANTS = {
    "gspo": {"policy_loss_type": "gspo", "eps_clip_low_high": [3e-4, 4e-4], "train_batch_size": 16},
    "tis": {"enable_vllm_is_correction": True},
    "icepop": {"enable_vllm_is_correction": True, "vllm_is_correction_type": "icepop"},
    "sequence mask": {"enable_vllm_is_correction": True, "vllm_is_correction_type": "seq-mask-tis"},
    "dual clip": {"dual_clip": 3.0, "train_batch_size": 16},
    "entropy": {"entropy_loss_coef": 0.01},
    "lora": {"lora_rank": 4},
    "sequences": {"loss_agg_mode": "seq-mean"},
    "penalties": {"overlong_buffer_len": 4, "stop_properly_penalty_coef": 0.5},
    "truncated sampling": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "stop": {"stop": ["a", "b"]},
    "experts": {"aux_loss_coef": 0.01},
    "experts of the engine": {"router_replay": True, "packing_samples": True, "gradient_checkpointing": True},
    "few episodes at a time": {"max_concurrent_episodes": 6},
    "adapted experts beside an engine of their own": {
        "lora_rank": 4,
        "target_modules": ["all-linear"],
        "async_train": True,
        "async_queue_size": 1,
        "router_replay": True,
    },
    "muon": {"optim": "muon"},
    "averaged adapters": {"lora_rank": 4, "enable_ema": True},
    "adapters of policy and critic": {"lora_rank": 4, "advantage_estimator": "gae", "save_value_network": True},
    "packed ppo": {"packing_samples": True, "advantage_estimator": "gae", "init_kl_coef": 0.01},
    "recomputed activations": {"gradient_checkpointing": True},
    "model folders": {"save_steps": 1, "save_hf_ckpt": True},
    "offloaded reference": {
        "ref_reward_offload": True,
        "init_kl_coef": 0.01,
        "use_kl_loss": True,
        "kl_estimator": "k3",
    },
}


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_rl_runs_finish(variant, train_ppo, models):
    flags = VARIANTS[variant] | ({"pretrain": models("mixtral")} if "experts" in variant else {})
    ran = train_ppo(max_steps=2, **flags)
    assert all(value == value for line in ran.metrics for value in line.values())
    assert all(norm > 0 for norm in ran.train("actor_grad_norm"))


@pytest.mark.slow(seconds=2)
def test_experts_of_the_critic_are_balanced_too(train_ppo, models, capsys):
    flags = {"pretrain": models("mixtral"), "advantage_estimator": "gae", "max_steps": 1}
    plain, balanced = train_ppo("plain", **flags), train_ppo("balanced", **flags, aux_loss_coef=0.5)
    assert balanced.train("critic_aux_loss")[0] > 1
    assert balanced.train("aux_loss")[0] > 1
    assert balanced.train("critic_grad_norm")[0] != pytest.approx(plain.train("critic_grad_norm")[0], rel=1e-3)
    capsys.readouterr()
    dense = train_ppo("dense", **flags, aux_loss_coef=0.5, critic_pretrain=models())
    assert "critic_aux_loss" not in dense.metrics[0]
    assert "--aux_loss_coef does not apply to the critic" in capsys.readouterr().err


def test_entropy_is_logged_without_a_loss_weight(train_ppo):
    ran = train_ppo("logged", entropy_loss_coef=0.0, max_steps=2)
    assert all(value > 0 for value in ran.train("entropy"))
    assert ran.train("actor_grad_norm") == pytest.approx(
        train_ppo("plain", max_steps=2).train("actor_grad_norm"), rel=1e-3
    )


def test_a_stop_text_ends_a_response(train_ppo):
    a, b = make_tokenizer()("ab")["input_ids"]
    rows = read_rollouts(train_ppo(stop=["a", "b"], max_steps=1), 1)
    stderr = [[token for token, acts in zip(row["input_ids"], row["action_mask"], strict=True) if acts] for row in rows]
    ended = [row for row, tokens in zip(rows, stderr, strict=True) if tokens[-1] in (a, b)]
    assert ended
    assert not any(row["truncated"] for row in ended)
    assert not any({a, b} & set(tokens[:-1]) for tokens in stderr)


@pytest.mark.slow(seconds=2)
def test_micro_batch_sizes_do_not_change_the_result(train_ppo):
    whole = train_ppo("whole", micro_train_batch_size=32, micro_rollout_batch_size=32)
    cut = train_ppo("cut", micro_train_batch_size=5, micro_rollout_batch_size=3)
    budget = train_ppo("budget", use_dynamic_batch=True, train_max_tokens_per_gpu=64, rollout_max_tokens_per_gpu=40)
    for other in (cut, budget):
        assert other.train("reward")[:2] == whole.train("reward")[:2]
        for name in ("policy_loss", "actor_grad_norm"):
            assert other.train(name)[0] == pytest.approx(whole.train(name)[0], rel=1e-4, abs=1e-6)


def test_incomplete_batches_are_trained_and_reported(train_ppo, capsys):
    ran = train_ppo(rows=make_prompts(10))
    assert [len(read_rollouts(ran, step)) for step in (1, 2)] == [32, 8]
    few = train_ppo("few", rows=make_prompts(3), num_episodes=2)
    assert [len(read_rollouts(few, step)) for step in (1,)] == [24]
    assert (
        "only 3 prompts, fewer than --rollout_batch_size: rollouts are smaller or repeat prompts"
        in capsys.readouterr().err
    )


def test_no_rollout_is_wasted_on_a_learning_rate_of_zero(train_ppo):
    ran = train_ppo(lr_scheduler="linear", lr_warmup_ratio=0.5, actor_learning_rate=1.0)
    assert ran.train("actor_lr") == pytest.approx([0.25, 0.5, 1.0, 0.5])


def test_every_episode_uses_every_prompt_once(train_ppo):
    ran = train_ppo(rows=make_prompts(8), num_episodes=3, n_samples_per_prompt=2)
    orders = [[row["prompt"]["text"] for row in read_rollouts(ran, step)][::2] for step in (1, 2, 3)]
    assert {frozenset(texts) for texts in orders} == {frozenset(row["input"] for row in make_prompts(8))}
    assert orders[0] != orders[1] != orders[2]


def test_evaluation_is_reported_by_datasource(train_ppo, tmp_path):
    rows = [row | {"datasource": "left" if number % 2 else "right"} for number, row in enumerate(make_prompts(5))]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    ran = train_ppo(eval_dataset=held_out, eval_steps=2, eval_n_samples_per_prompt=3, save_steps=2)
    lines = [line for line in ran.metrics if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [0, 2, 4]
    for source in ("left", "right"):
        for line in lines:
            assert 0 <= line[f"eval_{source}_reward"] <= 1
            assert f"eval_{source}_pass1" not in line  # partially correct answers give no pass rate
            assert 1 <= line[f"eval_{source}_response_length_mean"] <= LENGTH
    assert lines[0]["eval_num_samples"] == 15
    best = checkpoint.read_state(ran.ckpt_path / "best")
    assert best["best"] == max(line["eval_left_reward"] for line in lines[1:])
    assert best["best_key"] == "eval_left_reward"
    assert (ran.ckpt_path / "latest").read_text() == "global_step4"


def test_evaluation_counts_correct_answers(train_ppo, tmp_path, capsys):
    """Half the prompts have a reward of 0.5 and count as correct."""
    (tmp_path / "graded.py").write_text(GRADED)
    rows = [row | {"label": str(number % 2)} for number, row in enumerate(make_prompts(4))]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    flags = {"remote_rm_url": str(tmp_path / "graded.py"), "best_metric_key": "eval_default_acc", "save_steps": 1}
    ran = train_ppo(rows=rows, eval_dataset=held_out, eval_steps=1, eval_n_samples_per_prompt=2, max_steps=1, **flags)
    for line in (line for line in ran.metrics if line["kind"] == "eval"):
        assert (line["eval_default_reward"], line["eval_default_pass1"], line["eval_default_pass2"]) == (0.25, 0.5, 0.5)
    stderr = capsys.readouterr().err
    assert "step 0: eval_default_reward 0.2500, eval_default_pass1 0.5000, eval_default_pass2 0.5000" in stderr
    assert "--best_metric_key eval_default_acc is not among the evaluation's metrics: eval_default_reward," in stderr


GRADED = """
def reward_func(queries, prompts, labels):
    right = [float(label) for label in labels]
    return {"rewards": [value / 2 for value in right], "scores": right}
"""


@pytest.mark.parametrize("flags", [{}, {"async_train": True}])
def test_timings_of_a_step_add_up(flags, train_ppo, tmp_path, capsys):
    """A step includes generation but not evaluation. Steps do not overlap, so together they take less than the run."""
    held_out = write_rows(tmp_path / "held_out.jsonl", make_prompts(3))
    started = time.perf_counter()
    ran = train_ppo(eval_dataset=held_out, eval_steps=1, **flags)
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (ran.save_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    parts = ["make_experience", "ppo_train", "broadcast", *([] if flags else ["generation"])]
    for row in steps:
        assert row["timing/step_total"] >= sum(row[f"timing/{part}"] for part in parts)
        assert row["timing/generation"] > 0
    assert sum(row["timing/step_total"] for row in steps) < seconds
    assert f"tok/s {shown_number(steps[-1]['timing/tokens_per_second'])}" in capsys.readouterr().err


@pytest.mark.slow(seconds=2)
def test_evaluation_does_not_change_training(train_ppo, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", make_prompts(5))
    with_it = train_ppo("with", eval_dataset=held_out, eval_steps=1)
    assert have_equal_weights(weights(with_it), weights(train_ppo("without")))


def test_recorded_rollouts_can_be_loaded_as_a_dataset(train_ppo):
    ran = train_ppo(rows=make_prompts(12), **PPO)
    rows = datasets.load_dataset("parquet", data_files=str(ran.save_path / "run" / "rollouts" / "*.parquet"))["train"]
    assert len(rows) == 12 * 4
    row = rows[0]
    wanted = {"step", "prompt", "response", "input_ids", "reward", "advantages", "version", "rollout_log_probs"}
    assert wanted | {"reference_log_probs", "returns", "old_values"} <= set(row)
    assert len(row["advantages"]) == len(row["input_ids"]) == len(row["rollout_log_probs"])


def test_plain_transformers_loads_the_policy(train_ppo):
    ran = train_ppo(max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(ran.save_path)
    tokenizer = AutoTokenizer.from_pretrained(ran.save_path)
    inputs = tokenizer("ab", return_tensors="pt")
    assert model.generate(input_ids=inputs["input_ids"], max_new_tokens=3, do_sample=False).shape[1] <= 5
    assert have_equal_weights(dict(model.state_dict()), weights(ran))


@pytest.mark.slow(seconds=2)
def test_a_finished_run_can_resume_with_more_steps(train_ppo):
    train_ppo("more", max_steps=2, save_steps=2)
    ran = train_ppo("more", max_steps=4, save_steps=2, load_checkpoint=True)
    whole = train_ppo("whole", max_steps=4, save_steps=2)
    assert ran.metrics == whole.metrics
    assert have_equal_weights(weights(ran), weights(whole))


def rollouts(ran):
    return sorted(path.name for path in (ran.save_path / "run" / "rollouts").glob("step_*.parquet"))


def test_a_new_run_in_an_old_folder_keeps_only_its_own_rollouts(train_ppo):
    train_ppo(max_steps=3, save_steps=2)
    ran = train_ppo(max_steps=3, save_steps=2, load_checkpoint=True, seed=9)
    assert rollouts(ran) == ["step_000001.parquet", "step_000002.parquet", "step_000003.parquet"]
    assert rollouts(train_ppo(max_steps=1)) == ["step_000001.parquet"]


def test_checkpoints_of_an_earlier_run_are_reported(train_ppo, capsys):
    train_ppo(max_steps=2, save_steps=1)
    stderr = capsys.readouterr().err
    assert "earlier run" not in stderr
    train_ppo(max_steps=1)
    assert "2 checkpoints of an earlier run are in out_ckpt: rotation (--max_ckpt_num)" in capsys.readouterr().err


def test_a_run_resumes_without_its_run_folder(train_ppo):
    ran = train_ppo(max_steps=2, save_steps=2)
    shutil.rmtree(ran.save_path)
    ran = train_ppo(max_steps=3, load_checkpoint=True)
    assert rollouts(ran) == ["step_000003.parquet"]
    assert [line["step"] for line in ran.metrics] == [3]
