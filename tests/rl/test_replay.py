"""Training from recorded rollouts equals the run that recorded them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.config.check import check
from openrlhf.config.commands import LocalRLConfig
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError
from openrlhf.rl import train as rl
from openrlhf.rollout.hf import HFEngine
from tests.commands import as_argv
from tests.toy_data import write_rows

REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [sum(letter in "aeiou" for letter in query[len(prompt):]) - 0.1 * len(query)
                        for query, prompt in zip(queries, prompts)]}
"""


@pytest.fixture
def train(tmp_path, models):
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"input": letter * 3} for letter in "abcdefgh"])

    def start(name, **flags):
        """Two rollouts of four prompts, four samples each; two optimizer steps on each rollout."""
        common = {
            "pretrain": models(),
            "prompt_data": prompts,
            "input_template": "{}=",
            "remote_rm_url": "reward.py",
            "save_path": f"./{name}",
            "advantage_estimator": "group_norm",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "train_batch_size": 8,
            "micro_train_batch_size": 4,
            "max_len": 24,
            "actor_learning_rate": 1e-2,
            "param_dtype": "fp32",
        }
        result = rl.run(check(parse(LocalRLConfig, as_argv(common | flags))))
        return load_file(result.save_path / "model.safetensors")

    return start


def have_equal_weights(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def fail_on_generate(*_):
    raise AssertionError("a replay used the engine")


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("more", [{}, {"enable_vllm_is_correction": True}, {"async_train": True}])
def test_a_replay_gives_the_weights_of_the_recorded_run(train, models, monkeypatch, tmp_path, more):
    first = train("one", max_steps=1, **more)
    whole = train("live", **more)
    monkeypatch.setattr(HFEngine, "generate", fail_on_generate)
    replayed_first = train("replayed_one", max_steps=1, replay="./one/run/rollouts", **more)
    replayed = train("replayed", replay="./live/run/rollouts", **more)

    assert have_equal_weights(first, replayed_first)
    assert have_equal_weights(whole, replayed)
    assert not have_equal_weights(first, whole)
    recorded = [sorted((tmp_path / name / "run" / "rollouts").iterdir()) for name in ("live", "replayed")]
    assert [file.read_bytes() for file in recorded[0]] == [file.read_bytes() for file in recorded[1]]


def test_the_run_ends_with_a_shorter_record(train):
    train("one", max_steps=1)
    train("replayed", replay="./one/run/rollouts")
    metrics = [json.loads(line) for line in Path("replayed/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == [1]


@pytest.mark.slow(seconds=3)
def test_a_policy_that_a_longer_record_trains_is_not_reported_as_frozen(train, models, capsys):
    flags = {"advantage_estimator": "gae", "critic_pretrain": models()}
    train("live", **flags)
    train("replayed", replay="./live/run/rollouts", rollout_batch_size=8, freezing_actor_steps=1, **flags)
    metrics = [json.loads(line) for line in Path("replayed/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert ["actor_lr" in line for line in metrics if line["kind"] == "train"] == [False, True]
    assert "never trained" not in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["./nowhere", "."])
def test_a_folder_without_rollouts_is_rejected(train, folder):
    with pytest.raises(ConfigError, match=r"--replay .* (no such folder|has no step_)"):
        train("out", replay=folder)


@pytest.mark.parametrize("flags", [{}, {"run_dir": "./one/run"}])
def test_replaying_from_the_output_folder_is_rejected(train, flags):
    train("one", max_steps=1)
    with pytest.raises(ConfigError, match="is the folder that this run writes its rollouts to"):
        train("other" if flags else "one", replay="./one/run/rollouts", **flags)
    assert list(Path("one/run/rollouts").glob("step_*.parquet"))
