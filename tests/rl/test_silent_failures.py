"""Faults that raise nothing and only make a run worse: each is injected into real components, and must be reported.

Two more have separate tests: templates that rewrite the history (tests/agents/test_openai_agent.py) and reward
models with another tokenizer (tests/rl/test_reward_models.py).
"""

from dataclasses import replace

import pytest
import torch

from openrlhf.agents import single_turn
from openrlhf.models import forward, inputs
from openrlhf.models.plain import PlainTensor
from openrlhf.rl import build as rl_build
from openrlhf.rollout import hf
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.sampling import SamplingState
from openrlhf.rollout.sync_proof import RecordedWeights
from openrlhf.training import backend, build, checkpoint, objectives, rl_objectives
from openrlhf.training.fit import Fit
from openrlhf.training.optim import MasterOptimizer
from tests.commands import FAST, run_command
from tests.rl.toy_task import REWARD, SMALL, make_prompts, task_flags
from tests.toy_data import ANSWERS, answers, dataset_flags

OVERLAPPED = {"async_train": True, "async_queue_size": 1, "sync_check_every": 1}


@pytest.fixture
def run(tmp_path, models, capsys):
    """Return a function that runs a command and returns its exit code and the lines on stderr."""

    def start(command="train_ppo", reward=REWARD, **flags):
        paths = {"save_path": "./out", "ckpt_path": "./ckpt", "pretrain": models(sharp=True)}
        if command == "train_ppo":
            given = SMALL | task_flags(tmp_path, make_prompts(32), reward)
        else:
            given = FAST | ANSWERS | dataset_flags(tmp_path, answers(64), answers(8, seed=1))
        code = 0
        try:
            run_command(command, paths | given | flags)
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return start


@pytest.mark.slow(seconds=5)
def test_without_a_fault_nothing_is_reported(run):
    for flags in ({}, OVERLAPPED, {"temperature": 0.5}, {"lora_rank": 4, **OVERLAPPED}):
        code, stderr = run(**flags)
        assert code == 0, stderr
        assert "Likely cause" not in stderr
        assert not [line for line in stderr.splitlines() if "in a row" in line and "length limit" not in line]
        assert "frozen" not in stderr


@pytest.mark.parametrize(
    ("flags", "trace"),
    [
        ({}, "they agreed until the weights changed"),
        ({"init_kl_coef": 0.01}, "the engine agrees with the reference model"),
    ],
)
def test_stale_engine_weights(run, monkeypatch, flags, trace):
    """The engine reads the weights and keeps its own."""

    async def load(self, weights, version, *, verify=False):
        read = RecordedWeights(weights, verify=verify)
        list(read)
        self.version = version
        return read.checksums

    monkeypatch.setattr(HFEngine, "load", load)
    code, stderr = run(**OVERLAPPED, **flags)
    assert code == 1
    assert f"Likely cause: stale weights: {trace}" in stderr


def test_a_missing_adapter(run, monkeypatch):
    """The engine gets the base model, without the adapters."""
    monkeypatch.setattr(PlainTensor, "compute", lambda self, unshard: unshard(self.tensor))
    code, stderr = run(**OVERLAPPED, lora_rank=4, actor_learning_rate=0.1)
    assert code == 1
    assert "Likely cause: stale weights" in stderr
    assert "adapters do not reach the engine" in stderr


def with_params(monkeypatch, **changed):
    """Let the engine sample with parameters other than the requested ones."""
    right = SamplingState.of

    def of(params, vocabulary, device):
        return right([replace(item, **changed) for item in params], vocabulary, device)

    monkeypatch.setattr(SamplingState, "of", of)


def test_another_temperature_in_the_engine(run, monkeypatch):
    with_params(monkeypatch, temperature=1.0)
    code, stderr = run(temperature=0.5)
    assert code == 1
    assert "Likely cause: temperature: the engine seems to sample at 2 times the trainer's" in stderr


def test_another_top_p_in_the_engine(run, monkeypatch):
    with_params(monkeypatch, top_p=0.7)
    code, stderr = run()
    assert code == 1
    assert "Likely cause: top-p, top-k or min-p: " in stderr


def test_rounded_logits_in_the_engine(run, monkeypatch):
    right = hf.sample_tokens

    def rounded(logits, *args, **options):
        return right(logits.bfloat16().float(), *args, **options)

    monkeypatch.setattr(hf, "sample_tokens", rounded)
    code, stderr = run(max_steps=1)
    assert code == 0, stderr
    assert "Likely cause: precision or kernels" in stderr


def test_prompts_with_other_tokens_in_the_trainer(run, monkeypatch):
    right = single_turn.join_turn

    def other(prompt, *args):
        return right(replace(prompt, input_ids=(prompt.input_ids[0], *prompt.input_ids)), *args)

    monkeypatch.setattr(single_turn, "join_turn", other)
    code, stderr = run()
    assert code == 1
    assert "Likely cause: tokenisation: the engine received different tokens for the same prompt texts" in stderr


def test_a_leak_in_packed_rows(run, monkeypatch):
    """The bounds of a packed row are those of a single sequence."""
    right = forward.packed_call

    def one_sequence(batch, gap):
        call = right(batch, gap)
        total = call.arguments["input_ids"].shape[1]
        bounds = torch.tensor([0, total], dtype=torch.int32)
        return inputs.DecoderCall(call.arguments | {"cu_seq_lens_q": bounds, "max_length_q": total}, call.batch_places)

    monkeypatch.setattr(forward, "packed_call", one_sequence)
    for command in ("train_sft", "train_ppo"):
        code, stderr = run(command, packing_samples=True)
        assert code == 0, stderr
        assert "leaks between sequences" in stderr


def test_a_reward_that_is_constant(run):
    code, stderr = run(reward="def reward_func(queries, prompts, labels): return [0.5 for query in queries]")
    assert code == 0, stderr
    assert (
        "step 3: for 3 steps in a row, every sample got the reward 0.5, so there is nothing to learn from them. Try: "
        in stderr
    )
    assert "gradients of exactly zero" not in stderr  # the consequence, which explains nothing


def test_a_reward_that_is_constant_within_each_prompt(run):
    code, stderr = run(reward="def reward_func(queries, prompts, labels): return [float(len(p)) for p in prompts]")
    assert code == 0, stderr
    assert "step 3: for 3 steps in a row, all samples of each prompt got the same reward" in stderr
    assert "gradients of exactly zero" not in stderr


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_a_loss_that_grows_with_the_number_of_micro_batches(run, monkeypatch, command):
    """Each micro-batch is divided by its own totals instead of the step's."""
    objective = objectives.SFT if command == "train_sft" else rl_objectives.PolicyObjective
    right = objective.loss
    monkeypatch.setattr(
        objective, "loss", lambda self, run, batch, totals: right(self, run, batch, backend.StepTotals(*own(batch)))
    )
    own = backend.counts
    flags = {"micro_train_batch_size": 4}
    code, stderr = run(
        command, **flags | ({"init_kl_coef": 0.1, "use_kl_loss": True} if command == "train_ppo" else {})
    )
    assert code == 1
    assert "gradients would depend on the number of micro-batches" in stderr


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_frozen_parameters(run, monkeypatch, command):
    right = build.make_network

    def freeze(*args, **options):
        network = right(*args, **options)
        network.decoder.model.layers[0].mlp.requires_grad_(False)
        return network

    for module in (build, rl_build):
        monkeypatch.setattr(module, "make_network", freeze)
    code, stderr = run(command)
    assert code == 0, stderr
    assert "3 of 21 parameters (" in stderr
    assert "layers.0.mlp.gate_proj.weight" in stderr
    assert "are frozen and will not be trained" in stderr


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_weights_that_the_optimizer_does_not_change(run, monkeypatch, command):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    _, stderr = run(command)
    assert "had gradients, but their fp32 weights did not change in 3 steps" in stderr


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_optimizer_state_that_is_lost_on_resume(run, monkeypatch, command):
    assert run(command, save_steps=2)[0] == 0
    right = MasterOptimizer.load_state

    def only_weights(self, tensors):
        right(self, tensors)
        for optimizer in self.optimizers:
            optimizer.state.clear()

    monkeypatch.setattr(MasterOptimizer, "load_state", only_weights)
    code, stderr = run(command, save_steps=2, load_checkpoint=True)
    assert code == 1
    assert "saved tensors, such as exp_avg/" in stderr


def test_rows_that_are_repeated_after_resume(run, monkeypatch):
    assert run("train_sft", save_steps=2)[0] == 0
    right = Fit.resume
    monkeypatch.setattr(Fit, "resume", lambda self, folder: right(self, folder) and 0)
    code, stderr = run("train_sft", save_steps=2, load_checkpoint=True)
    assert code == 1
    assert "the optimizer is at step 4, but training would continue after step 0" in stderr


@pytest.mark.parametrize("lost", ["place", "made"])
def test_prompts_that_are_repeated_after_resume(run, monkeypatch, lost):
    assert run(save_steps=2)[0] == 0
    right = checkpoint.read_state
    monkeypatch.setattr(
        checkpoint, "read_state", lambda folder: {name: value for name, value in right(folder).items() if name != lost}
    )
    code, stderr = run(save_steps=2, load_checkpoint=True)
    assert code == 1
    assert "is inconsistent" in stderr
    assert "prompts would be repeated or skipped" in stderr
