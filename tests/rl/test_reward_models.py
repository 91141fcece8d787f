"""Reward models of every kind, from their folder to the rewards in the recorded rollouts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from openrlhf.models.forward import Scores, TargetLogits
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.local import LocalFrozen
from tests.commands import FAST, FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts
from tests.tiny import CHARACTERS, SHAPE, character_tokenizer
from tests.toy_data import PAIRS, STEPS, pairs, steps, write_rows

AGENT = """
from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        sampled = (await llm_engine.generate(ids, sampling_params)).outputs[0].token_ids
        return {
            "observation_tokens": ids + sampled,
            "action_ranges": [(len(ids), len(ids) + len(sampled))],
            "reward": 7.0 if sampled[0] % 2 else None,
        }
"""
PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.05}


@pytest.fixture
def train_ppo(tmp_path, models):
    """Return a function that runs two steps of train_ppo with reward models only."""

    def start(name="out", **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": models()}
        prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(16))
        run_command("train_ppo", paths | SMALL | {"prompt_data": prompts} | flags)
        return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")

    return start


@pytest.fixture
def reward_model(tmp_path, models):
    """Return a function that trains a reward model on pairs and returns the flag's value."""

    def make(name="rm", pretrain=None, **flags):
        rows = write_rows(tmp_path / "pairs.jsonl", pairs(48))
        paths = {"pretrain": pretrain or models(), "save_path": name, "ckpt_path": f"{name}_ckpt", "dataset": rows}
        run_command("train_rm", FAST | PAIRS | paths | flags)
        return f"./{name}"

    return make


@pytest.fixture
def process_model(tmp_path, models):
    rows = write_rows(tmp_path / "steps.jsonl", steps(48))
    paths = {"pretrain": models(), "save_path": "prm", "ckpt_path": "prm_ckpt", "dataset": rows}
    run_command("train_prm", FAST | STEPS | paths)
    return "./prm"


def other_model(folder):
    """Make a model whose tokenizer has the same characters with other ids, and another EOS."""
    tokenizer = character_tokenizer(["<pad>", "<end>", *reversed(CHARACTERS)], eos="<end>", pad="<pad>")
    torch.manual_seed(3)
    config = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def plain_scores(folder, rows, read=lambda ids: ids):
    """Score recorded samples one at a time with plain Transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    return [model(torch.tensor([read(row["input_ids"])])).logits.item() for row in rows]


def rewards(rows):
    return [row["reward"] for row in rows]


def unpadded(rows, pad=1):
    """Drop samples in which the policy sampled a pad token, which plain Transformers ignores."""
    return [row for row in rows if pad not in row["input_ids"]]


def test_a_model_with_another_tokenizer_scores_the_text(train_ppo, reward_model, tmp_path, models, capsys):
    folder = reward_model(pretrain=other_model(tmp_path / "other"))
    rows = unpadded(read_rollouts(train_ppo(reward_pretrain=folder, max_steps=1, generate_max_len=32), 1))
    stderr = capsys.readouterr().err
    assert "the reward model ./rm has a different tokenizer than the policy: samples are tokenised again" in stderr
    policy, own = AutoTokenizer.from_pretrained(models()), AutoTokenizer.from_pretrained(folder)

    def read(ids):
        ended = ids[-1] == policy.eos_token_id
        text = policy.decode(ids[:-1] if ended else ids)
        return own(text, add_special_tokens=False)["input_ids"] + [own.eos_token_id] * ended

    assert any(row["input_ids"][-1] == policy.eos_token_id for row in rows)
    assert rewards(rows) == pytest.approx(plain_scores(folder, rows, read), abs=1e-5)


@pytest.mark.slow(seconds=2)
def test_a_reward_model_scores_episodes_without_an_agent_reward(train_ppo, reward_model, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    folder = reward_model()
    rows = read_rollouts(train_ppo(reward_pretrain=folder, agent_func_path="./agent.py", max_steps=1), 1)
    own = [row for row in rows if row["reward"] == 7.0]
    scored = unpadded([row for row in rows if row["reward"] != 7.0])
    assert own
    assert scored
    assert rewards(scored) == pytest.approx(plain_scores(folder, scored), abs=1e-5)


def test_a_reward_model_with_another_tokenizer_cannot_initialise_the_critic(
    train_ppo, reward_model, tmp_path, models, capsys
):
    folder = reward_model(pretrain=other_model(tmp_path / "other"))
    with pytest.raises(SystemExit):
        train_ppo(reward_pretrain=folder, **PPO)
    assert "has a different tokenizer than the policy. Try: --critic_pretrain" in capsys.readouterr().err
    ran = train_ppo("own", reward_pretrain=folder, critic_pretrain=models(), max_steps=1, **PPO)
    assert ran.train("critic_loss")[0] > 0


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("packing", [None, True], ids=["padded", "packed"])
def test_two_reward_models_are_weighted(train_ppo, reward_model, packing, models):
    one, other = reward_model("one"), reward_model("two", models(seed=5), seed=5)
    flags = {"reward_pretrain": f"{one},{other}", "reward_weights": [0.75, -2.0], "packing_samples": packing}
    rows = unpadded(read_rollouts(train_ppo(max_steps=1, **flags), 1))
    assert len(rows) > 20
    pairs_of_scores = zip(plain_scores(one, rows), plain_scores(other, rows), strict=True)
    expected = [0.75 * first - 2.0 * second for first, second in pairs_of_scores]
    assert rewards(rows) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_rewards_are_normalised_with_the_models_saved_statistics(train_ppo, reward_model, pad_is_eos, models, capsys):
    policy = models(pad_is_eos=pad_is_eos)
    folder = reward_model(pretrain=policy)
    flags = {"pretrain": policy, "reward_pretrain": folder, "max_steps": 1}
    plain, normal = (
        read_rollouts(train_ppo(name, **flags, **more), 1) for name, more in (("a", {}), ("b", NORMALISED))
    )
    saved = json.loads((Path(folder) / "config.json").read_text())
    assert saved["std"] > 0
    expected = [(reward - saved["mean"]) / saved["std"] for reward in rewards(plain)]
    assert rewards(normal) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    train_ppo("critic", **flags, **PPO)  # the critic starts from the reward model
    stderr = capsys.readouterr().err
    assert "no mean and std" not in stderr
    assert "different tokenizer" not in stderr


NORMALISED = {"normalize_reward": True}


def test_missing_statistics_are_reported_and_scores_stay_unchanged(train_ppo, reward_model, capsys):
    folder = reward_model()
    path = Path(folder) / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in saved.items() if name not in ("mean", "std")}))
    train_ppo(reward_pretrain=folder, normalize_reward=True, max_steps=1)
    assert "has no mean and std in its config.json, so its scores are not normalised" in capsys.readouterr().err


def test_a_language_model_is_rejected_as_reward_model(train_ppo, tmp_path, models, capsys):
    answers = write_rows(tmp_path / "answers.jsonl", [{"input": "a", "output": "b"}])
    with pytest.raises(SystemExit):
        train_ppo(reward_pretrain=models(), max_steps=1)
    assert not (tmp_path / "out").exists()  # rejected before a model was loaded
    with pytest.raises(SystemExit):
        run_command(
            "batch_inference", {"eval_task": "rm", "pretrain": models(), "dataset": answers, "output_path": "./scored"}
        )
    assert capsys.readouterr().err.count("has no weights for a scalar head called score") == 2


REDUCED = {"min": min, "mean": lambda steps: sum(steps) / len(steps), "last": lambda steps: steps[-1]}


@pytest.fixture
def plain_step_scores():
    """Return a function that scores steps with plain Transformers: (position of each marker, probability)."""

    @torch.no_grad()
    def steps_of(folder, rows, read=lambda ids: ids):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        mark, *labels = tokenizer.convert_tokens_to_ids(["#", "+", "-"])

        def steps(ids):
            logits = model(torch.tensor([ids])).logits[0]
            found = [place for place, token in enumerate(ids) if token == mark]
            return [(place, logits[place, labels].softmax(-1)[0].item()) for place in found]

        return [steps(read(row["input_ids"])) for row in rows]

    return steps_of


@pytest.mark.parametrize("reduce", REDUCED)
def test_a_process_reward_model_scores_the_steps(train_ppo, process_model, plain_step_scores, reduce):
    packs = reduce == "mean"
    ran = train_ppo(
        reward_pretrain=process_model, prm_reduce=reduce, max_steps=1, generate_max_len=32, packing_samples=packs
    )
    rows = read_rollouts(ran, 1)
    found = [[value for _, value in steps] for steps in plain_step_scores(process_model, rows)]
    expected = [REDUCED[reduce](steps) if steps else 0.0 for steps in found]
    assert any(value == 0 for value in expected)
    assert any(value > 0 for value in expected)
    assert rewards(rows) == pytest.approx(expected, abs=1e-5)


def flat(rows):
    return [number for steps in rows for step in steps for number in step]


def remaining_rewards(row, steps):
    """Return the remaining rewards at each token of a response."""
    total = [sum(value for place, value in steps if place >= here) for here in range(len(row["input_ids"]))]
    return [value if acts else 0.0 for value, acts in zip(total, row["action_mask"], strict=True)]


ONE_STEP_PROMPT = [
    {"input": f"a#{letter}", "label": ""} for letter in "bcdefghi"
]  # the first step belongs to the prompt


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["by number", "by tokens"])
def test_with_step_rewards_each_step_is_rewarded_at_its_end(
    train_ppo, process_model, reward_model, plain_step_scores, tmp_path, dynamic
):
    prompts = write_rows(tmp_path / "shown.jsonl", ONE_STEP_PROMPT)
    outcome = reward_model()
    flags = {"reward_pretrain": f"{process_model},{outcome}", "reward_weights": [2.0, 0.5], "step_rewards": True}
    flags |= {"advantage_estimator": "rloo", "prompt_data": prompts, "max_steps": 1, "generate_max_len": 80}
    if dynamic:
        flags |= {"use_dynamic_batch": True, "rollout_max_tokens_per_gpu": 256}
    rows = read_rollouts(train_ppo(**flags), 1)
    found = plain_step_scores(process_model, rows)
    assert all(steps[0][0] == 1 for steps in found)  # the step in the prompt
    whole = [0.5 * score for score in plain_scores(outcome, rows)]
    kept = [row for row in range(len(rows)) if 1 not in rows[row]["input_ids"]]  # see `unpadded`
    own = [[(place, 2 * value) for place, value in steps[1:]] for steps in found]
    assert any(len(steps) > 1 for steps in own)
    ends = [len(row["input_ids"]) - 1 for row in rows]
    merged = [
        [*steps, (end, score)] if not steps or steps[-1][0] < end else [*steps[:-1], (end, steps[-1][1] + score)]
        for steps, end, score in zip(own, ends, whole, strict=True)
    ]
    assert flat(rows[row]["step_rewards"] for row in kept) == pytest.approx(flat(merged[row] for row in kept), abs=1e-5)
    for row in kept:
        assert rows[row]["reward"] == pytest.approx(sum(value for _, value in merged[row]), abs=1e-5)
        least = min((value for _, value in own[row]), default=0.0)
        assert rows[row]["score"] == pytest.approx(least + whole[row], abs=1e-5)
    for row in rows:  # RLOO: the baseline of a step is the mean over the steps of the prompt's other samples
        others = [item for item in rows if item["prompt"] == row["prompt"] and item is not row]
        baseline = [value for item in others for _, value in item["step_rewards"]]
        shaped = [(place, value - sum(baseline) / len(baseline)) for place, value in row["step_rewards"]]
        assert row["advantages"] == pytest.approx(remaining_rewards(row, shaped), abs=1e-4)


def test_steps_are_found_with_another_tokenizer(train_ppo, tmp_path, models, plain_step_scores):
    rows = write_rows(tmp_path / "steps.jsonl", steps(48))
    paths = {"pretrain": other_model(tmp_path / "other"), "save_path": "prm", "ckpt_path": "prm_ckpt", "dataset": rows}
    run_command("train_prm", FAST | STEPS | paths)
    found = read_rollouts(train_ppo(reward_pretrain="./prm", step_rewards=True, max_steps=1, generate_max_len=24), 1)
    policy, own = AutoTokenizer.from_pretrained(models()), AutoTokenizer.from_pretrained("./prm")

    def read(ids):
        text = policy.decode([token for token in ids if token > 1])
        return own(text, add_special_tokens=False)["input_ids"]

    kept = [row for row in found if not {0, 1} & set(row["input_ids"][:-1])]  # special tokens do not survive decoding
    expected = plain_step_scores("./prm", kept, read)
    assert any(expected)
    assert flat(row["step_rewards"] for row in kept) == pytest.approx(flat(expected), abs=1e-5)


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_dynamic_batches_apply_to_reward_models_and_change_no_score(
    train_ppo, reward_model, process_model, kind, monkeypatch
):
    seen = []
    forward = LocalFrozen.forward

    def record_tokens(self, batch, ask, **options):
        seen.append(int((batch.sequence_ids >= 0).sum()) if ask in (Scores, TargetLogits) else 0)
        return forward(self, batch, ask, **options)

    monkeypatch.setattr(LocalFrozen, "forward", record_tokens)
    model = reward_model() if kind == "outcome" else process_model
    flags = {"reward_pretrain": model, "max_steps": 1, "skip_self_test": True}  # it would add batches
    by_number = read_rollouts(train_ppo("number", **flags), 1)
    tokens_by_count = [tokens for tokens in seen if tokens]
    seen.clear()
    by_tokens = read_rollouts(train_ppo("tokens", **flags, use_dynamic_batch=True, rollout_max_tokens_per_gpu=40), 1)
    tokens_by_budget = [tokens for tokens in seen if tokens]
    assert max(tokens_by_count) > 40 >= max(tokens_by_budget)
    assert sum(tokens_by_count) == sum(tokens_by_budget)
    assert rewards(by_tokens) == pytest.approx(rewards(by_number), abs=1e-5)


def test_process_and_outcome_reward_models_work_together(train_ppo, process_model, reward_model):
    ran = train_ppo(reward_pretrain=f"{process_model},{reward_model()}", reward_weights=[2.0, 1.0], max_steps=2, **PPO)
    assert all(value == value for line in ran.metrics for value in line.values())
    assert ran.train("critic_loss")[0] > 0


def fail_on_generate(*_):
    raise AssertionError("a replay used the engine")


def test_a_replay_with_reward_model_and_critic_equals_the_recorded_run(train_ppo, reward_model, monkeypatch):
    flags = {"reward_pretrain": reward_model(), "normalize_reward": True, "save_value_network": True, **PPO}
    live = train_ppo("live", **flags)
    monkeypatch.setattr(HFEngine, "generate", fail_on_generate)
    replayed = train_ppo("replayed", replay="./live/run/rollouts", **flags)
    expected = live.metrics
    for row in expected:
        row.pop("rollout/log_prob_difference", None)  # a replay has no samples of its engine to compare
    assert replayed.metrics == expected
    for name in ("live", "live_critic"):
        ours, theirs = (
            load_file(live.save_path.parent / name.replace("live", run_name) / "model.safetensors")
            for run_name in ("live", "replayed")
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
