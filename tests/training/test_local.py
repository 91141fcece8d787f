"""The backend of one process: micro-batches, resuming, evaluation, sleep and export."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from openrlhf import monitor
from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.config.sections.objectives import DirectPreferenceFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import collate
from openrlhf.errors import BackendError
from openrlhf.models.forward import HiddenStates, LogProbs, Network
from openrlhf.models.load import add_adapters, load_causal_lm
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.backend import values_of
from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.objectives import SFT, DirectPreference, Step
from openrlhf.training.order import micro_batches
from openrlhf.types import PairRow, Request, SamplingParams, TokenRow
from tests.tiny import make_model, make_tokenizer

CPU = torch.device("cpu")
VOCAB = len(make_tokenizer())
SETTINGS = OptimizerFlags(l2=0.01)
RATE = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


def make_backend(folder, *, packing=False, lora=0):
    torch.manual_seed(0)
    model = load_causal_lm(folder, ModelFlags(), device=CPU, packing=packing)
    return LocalBackend(
        Network(add_adapters(model, LoraFlags(lora_rank=lora), scalar=False)), SETTINGS, CPU, learning_rate=RATE
    )


def test_a_slower_layout_names_the_error_of_the_model(tmp_path, capsys):
    model = load_causal_lm(make_model(tmp_path, "gpt_oss"), ModelFlags(), device=CPU, packing=True)
    LocalBackend(Network(model), SETTINGS, CPU, learning_rate=RATE)
    assert "packed with the packed kernel fails with " in (line := capsys.readouterr().err)
    assert "Backend" not in line


def token_rows(number, seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 12, number)
    return [
        TokenRow(random.integers(2, VOCAB, length).astype(np.int32), np.arange(length) >= random.integers(1, 3))
        for length in lengths
    ]


def pair_rows(number):
    chosen, rejected = token_rows(number, 1), token_rows(number, 2)
    return [PairRow(*pair) for pair in zip(chosen, rejected, strict=True)]


def batches(rows, size, *, packing=False):
    return [collate(part, packing=packing, pad_id=1) for part in micro_batches(rows, size)]


def frozen(folder, packing=False):
    """Return a reference that differs from the policy, so that log-ratios are not zero."""
    network = Network(load_causal_lm(folder, ModelFlags(), device=CPU, packing=packing))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    return LocalFrozen(network, CPU)


CASES = {
    "sft": (None, token_rows(7)),
    "dpo": (DirectPreferenceFlags(), pair_rows(7)),
    "dpo_nll": (DirectPreferenceFlags(nll_loss_coef=0.2, label_smoothing=0.1), pair_rows(7)),
}


def prepare(case, folder, backend, size, packing):
    flags, rows = CASES[case]
    objective = SFT() if flags is None else DirectPreference(flags, frozen(folder, packing))
    micro_batches = batches(rows, size, packing=packing)
    return objective, objective.prepare(micro_batches, Step(rows, range(len(rows)), size), backend)


def gradients_of(backend):
    return {name: p.grad.clone() for name, p in backend.network.named_parameters() if p.grad is not None}


def weights_of(backend):
    return {name: tensor.clone() for name, tensor in backend.network.state_dict().items()}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_splitting_a_step_changes_nothing(folder, case, packing):
    results = []
    for size in (7, 1, 2, 4):
        backend = make_backend(folder, packing=packing)
        objective, micro_batches = prepare(case, folder, backend, size, packing)
        step = backend.forward_backward(micro_batches, objective)
        assert len(step.losses) == len(micro_batches)
        gradients = gradients_of(backend)
        norm = backend.optim_step(0.1)
        metrics = values_of(step.metrics)
        results.append((step.losses.sum(), gradients, torch.tensor(norm), metrics, weights_of(backend)))
    for other in results[1:]:
        assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_a_long_step_shows_its_progress(folder, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "PAUSE", 0.0)  # every micro-batch gets a line
    backend = make_backend(folder)
    objective, batches = prepare("sft", folder, backend, 2, packing=False)
    capsys.readouterr()
    backend.forward_backward(batches, objective)
    lines = capsys.readouterr().err.splitlines()
    expected = [f"openrlhf: update: micro-batch {number + 1} of {len(batches)}" for number in range(len(batches))]
    assert [line.split(",")[0] for line in lines] == expected


def test_sft_is_the_mean_over_all_target_tokens(folder):
    backend = make_backend(folder)
    rows = token_rows(5)
    step = backend.forward_backward(batches(rows, 2), SFT())
    sums, count = 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row.input_ids).long()[None]
        log_probs = backend.network.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        taken = log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1)[torch.from_numpy(row.target_mask[1:])]
        sums, count = sums - taken.sum().item(), count + len(taken)
    assert step.losses.sum().item() == pytest.approx(sums / count, rel=1e-5)
    assert values_of(step.metrics)["gpt_loss"] == pytest.approx(sums / count, rel=1e-5)


def train(backend, steps):
    for step in steps:
        backend.forward_backward(batches(token_rows(4, seed=step), 2), SFT())
        backend.optim_step(1 / (step + 1))


@pytest.mark.parametrize("lora", [0, 2])
def test_a_saved_run_resumes_bit_for_bit(folder, tmp_path, lora):
    whole = make_backend(folder, lora=lora)
    train(whole, range(3))
    whole.save(tmp_path)
    train(whole, range(3, 6))
    resumed = make_backend(folder, lora=lora)
    resumed.load(tmp_path)
    train(resumed, range(3, 6))
    assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)
    assert_close(resumed.optimizer.state(), whole.optimizer.state(), rtol=0, atol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer.safetensors"]


def test_a_checkpoint_that_does_not_fit_gives_one_line(folder, tmp_path):
    backend = make_backend(folder)
    with pytest.raises(BackendError, match="does not fit this model: No such file"):
        backend.load(tmp_path)
    make_backend(folder, lora=2).save(tmp_path)
    before = weights_of(backend)
    with pytest.raises(
        BackendError,
        match=r"does not fit this model: model.model.embed_tokens.weight: expected a tensor of .*, got nothing",
    ):
        backend.load(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(BackendError, match="does not fit this model") as caught:
        backend.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert_close(weights_of(backend), before, rtol=0, atol=0)


def test_loss_falls_and_the_export_loads_in_plain_transformers(folder, tmp_path):
    backend = make_backend(folder)
    micro_batches = batches(token_rows(4), 2)
    losses = []
    for _ in range(15):
        losses.append(backend.forward_backward(micro_batches, SFT()).losses.sum().item())
        backend.optim_step(1.0)
    assert losses[-1] < 0.5 * losses[0]
    backend.export(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(2, 20)[None]
    assert_close(plain(ids).logits, backend.network.model(ids).logits)
    named = dict(backend.weights())
    assert_close(named, dict(plain.state_dict()), rtol=0, atol=0)


def test_evaluating_changes_nothing(folder):
    backend = make_backend(folder, lora=2)
    micro_batches = batches(token_rows(4), 2)
    train(backend, range(2))
    before, state = weights_of(backend), copy.deepcopy(backend.optimizer.state())
    random = torch.get_rng_state()
    metrics = backend.evaluate(micro_batches, SFT())
    outputs = backend.forward(micro_batches[0], LogProbs)
    assert not outputs.log_probs.requires_grad
    assert backend.network.training
    assert all(parameter.grad is None for parameter in backend.network.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert_close(weights_of(backend), before, rtol=0, atol=0)
    assert_close(backend.optimizer.state(), state, rtol=0, atol=0)
    step = backend.forward_backward(micro_batches, SFT())
    assert values_of(metrics) == pytest.approx(values_of(step.metrics))
    smaller = backend.evaluate(batches(token_rows(4), 1), SFT())
    assert values_of(smaller) == pytest.approx(values_of(metrics), rel=1e-6)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A model as wide as a block of 4-bit weights, so that bitsandbytes has a kernel for it."""
    return make_model(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128)


def quantised_backend(folder):
    torch.manual_seed(0)
    model = load_causal_lm(folder, ModelFlags(load_in_4bit=True), device=CPU, packing=False)
    return LocalBackend(
        Network(add_adapters(model, LoraFlags(lora_rank=2), scalar=False)), SETTINGS, CPU, learning_rate=RATE
    )


def generate(backend, micro_batches):
    engine = HFEngine(backend.network, make_tokenizer())
    asyncio.run(engine.generate([Request((5, 6, 7), SamplingParams(max_tokens=4))]))


@pytest.mark.parametrize("evaluate", [lambda backend, micro_batches: backend.evaluate(micro_batches, SFT()), generate])
def test_evaluating_keeps_the_gradients_of_4_bit_weights(wide_folder, evaluate):
    """On CPUs with AVX512-BF16 bitsandbytes would repack the weights into a layout without a backward pass."""
    micro_batches = batches(token_rows(4), 2)
    fresh, evaluated = quantised_backend(wide_folder), quantised_backend(wide_folder)
    evaluate(evaluated, micro_batches)
    for backend in (fresh, evaluated):
        backend.forward_backward(micro_batches, SFT())
    assert_close(gradients_of(evaluated), gradients_of(fresh), rtol=0, atol=0)
    layers = [module for module in evaluated.network.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_dropout_is_active_only_in_training(tmp_path):
    name = make_model(tmp_path, attention_dropout=0.5)
    backend = LocalBackend(
        Network(load_causal_lm(name, ModelFlags(), device=CPU, packing=False)), SETTINGS, CPU, learning_rate=RATE
    )
    batch = batches(token_rows(3), 3)[0]
    looks = [backend.forward(batch, LogProbs).log_probs for _ in range(2)]
    assert torch.equal(*looks)
    runs = [backend.network(batch, LogProbs).log_probs for _ in range(2)]
    assert not torch.equal(*runs)


def test_a_step_without_targets_changes_nothing(folder):
    backend = make_backend(folder)
    empty = [TokenRow(row.input_ids, np.zeros_like(row.target_mask)) for row in token_rows(2)]
    step = backend.forward_backward(batches(empty, 1), SFT())
    assert step.losses.tolist() == [0.0, 0.0]
    assert all((gradient == 0).all() for gradient in gradients_of(backend).values())


@pytest.mark.parametrize("offload", [False, True])
def test_a_frozen_model_only_evaluates(folder, offload):
    network = Network(load_causal_lm(folder, ModelFlags(), device=CPU, packing=False))
    frozen_model = LocalFrozen(network, CPU, offload=offload)
    batch = batches(token_rows(3), 3)[0]
    log_probs = frozen_model.forward(batch, LogProbs).log_probs
    assert not log_probs.requires_grad
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert_close(log_probs, make_backend(folder).forward(batch, LogProbs).log_probs)
    hidden = frozen_model.forward(batch, HiddenStates).hidden
    assert frozen_model.network.vocabulary_head(hidden).shape == (int(batch.target_mask.sum()), VOCAB)


def test_sleeping_and_waking_changes_nothing(folder):
    rested, steady = make_backend(folder), make_backend(folder)
    for backend in (rested, steady):
        train(backend, range(2))
    rested.sleep()
    rested.wake()
    for backend in (rested, steady):
        train(backend, range(2, 4))
    assert_close(weights_of(rested), weights_of(steady), rtol=0, atol=0)


def test_one_process_counts_as_all_ranks(folder):
    backend = make_backend(folder)
    assert (backend.rank, backend.data_parallel_size) == (0, 1)
    assert_close(backend.sum_over_ranks(torch.ones(2)), torch.ones(2))
    backend.barrier()
