"""RL runs with vLLM in the trainer's process: the same loop, with an engine that has its own weights."""

import pytest

from openrlhf.rl.local import LocalSync
from openrlhf.rollout.engine import Weights
from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts, task_flags

pytestmark = pytest.mark.slow(seconds=6)
VLLM = {
    "vllm_num_engines": 1,
    "enforce_eager": True,
    "init_kl_coef": 0.0,
}  # on CPU, heads must have at least 32 dimensions
MODES = {
    "synchronous, the engine sleeps": {"vllm_enable_sleep": True, "enable_prefix_caching": True},
    "asynchronous": {"async_train": True, "async_queue_size": 1, "sync_check_every": 1},
    "asynchronous, partial rollouts": {"async_train": True, "async_queue_size": 1, "partial_rollout": True},
    "adapters of a tied model, packed": {"lora_rank": 4, "packing_samples": True},
}


@pytest.fixture
def train_ppo(tmp_path, models):
    def start(**flags):
        tied = "lora_rank" in flags
        paths = {"save_path": "./out", "pretrain": models(head_dim=32, tie_word_embeddings=tied)}
        run_command(
            "train_ppo", paths | SMALL | task_flags(tmp_path, make_prompts(24)) | VLLM | {"max_steps": 3} | flags
        )
        return FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")

    return start


@pytest.mark.parametrize("mode", MODES)
def test_engine_and_trainer_agree_in_every_mode(mode, train_ppo):
    bound = MODES[mode].get("async_queue_size", 0)
    ran = train_ppo(enable_vllm_is_correction=True, **MODES[mode])
    lines = [line for line in ran.metrics if line["kind"] == "train"]
    assert lines[0]["rollout/log_prob_difference"] < 1e-4
    assert max(line["staleness"] for line in lines) <= bound
    for step, line in enumerate(lines, 1):
        samples = read_rollouts(ran, step)
        assert len(samples) == 32
        assert len({(row["prompt"]["index"], tuple(row["rollout_log_probs"])) for row in samples}) == 32
        assert all(step - 1 - bound <= row["version"] < step for row in samples)
        if bound == 0:
            apart = [
                abs(sampled - own)
                for row in samples
                for sampled, own, acts in zip(
                    row["rollout_log_probs"], row["old_log_probs"], row["action_mask"], strict=True
                )
                if acts
            ]
            assert max(apart) < 1e-4
        assert line["actor_grad_norm"] > 0
        if bound == 0 or "sync_check_every" in MODES[mode]:
            assert line["rollout/log_prob_difference"] < 1e-4


def test_incomplete_weights_stop_the_run(train_ppo, monkeypatch, capsys):
    honest = LocalSync.sync

    async def send_without_a_layer(self, version):
        weights = self.models.weights

        def some() -> Weights:
            return [(name, tensor) for name, tensor in weights() if "layers.1.mlp" not in name]

        monkeypatch.setattr(self.models, "weights", some)
        await honest(self, version)

    monkeypatch.setattr(LocalSync, "sync", send_without_a_layer)
    with pytest.raises(SystemExit):
        train_ppo()
    assert "layers.1.mlp" in capsys.readouterr().err


def test_changed_weights_that_do_not_take_effect_stop_the_run(train_ppo, monkeypatch, capsys):
    """The first sync sends weights that the engine already has; the log-probs of the next rollout reveal the second."""
    honest = LocalSync.sync

    async def send_only_once(self, version):
        if version > 0:
            first = [(name, tensor.clone()) for name, tensor in self.first]
            monkeypatch.setattr(self.models, "weights", lambda: first)
        else:
            self.first = [(name, tensor.clone()) for name, tensor in self.models.weights()]
        await honest(self, version)

    monkeypatch.setattr(LocalSync, "sync", send_only_once)
    with pytest.raises(SystemExit):
        train_ppo()
    assert "step 2: the log-probs of engine and trainer differ" in capsys.readouterr().err


def trained_prompts(ran, steps):
    return [row["prompt"]["index"] for step in range(1, steps + 1) for row in read_rollouts(ran, step)][::4]


@pytest.mark.slow(seconds=12)
def test_a_resumed_run_with_a_surplus_trains_every_prompt_once(train_ppo):
    flags = {"async_train": True, "vllm_generate_batch_size": 11, "max_staleness": 2, "save_steps": 1}
    train_ppo(**flags, max_steps=2)
    ran = train_ppo(**flags, max_steps=None, load_checkpoint=True)
    steps = len(ran.train("staleness"))
    assert sorted(trained_prompts(ran, steps)) == list(range(24))
    assert [len(read_rollouts(ran, step)) for step in range(1, steps + 1)] == [32, 32, 32]
    assert max(ran.train("staleness")) <= 2


def test_a_synchronous_run_aborts_stragglers_and_trains_only_on_current_samples(train_ppo, capsys):
    """No sample is older than its step, and the aborted prompts come back."""
    ran = train_ppo(vllm_generate_batch_size=10, abort_stragglers=True, vllm_enable_sleep=True)
    assert sorted(trained_prompts(ran, 3)) == list(range(24))
    assert ran.train("staleness") == [0, 0, 0]
    assert "openrlhf: step 3: engines " in capsys.readouterr().err
