"""fp16 in one process: small gradients do not underflow, steps that overflow are skipped, and resuming is exact."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import collate
from openrlhf.errors import BackendError
from openrlhf.models.forward import Network
from openrlhf.models.load import add_adapters, load_causal_lm
from openrlhf.training.local import LocalBackend
from openrlhf.training.objectives import SFT
from openrlhf.training.optim import GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from openrlhf.types import TokenRow
from tests.tiny import make_model, make_tokenizer

CPU = torch.device("cpu")
VOCAB = len(make_tokenizer())
MANY_TOKENS = 1_000_000


@dataclass(frozen=True)
class SmallShare(SFT):
    """SFT on rows that are a small share of a step with many tokens."""

    def loss(self, run, batch, totals):
        return super().loss(run, batch, replace(totals, targets=torch.tensor(float(MANY_TOKENS), dtype=torch.float64)))


@dataclass(frozen=True)
class OverflowingLoss(SFT):
    """A loss whose gradients overflow fp16 at the initial scale."""

    factor: float = 1e4

    def loss(self, run, batch, totals):
        loss, metrics = super().loss(run, batch, totals)
        return loss * self.factor, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


def make_backend(folder, dtype=torch.float16, *, lora=0):
    torch.manual_seed(0)
    model = load_causal_lm(folder, ModelFlags(), device=CPU, packing=False).half().to(dtype)
    network = Network(add_adapters(model, LoraFlags(lora_rank=lora), scalar=False))
    return LocalBackend(network, OptimizerFlags(), CPU, learning_rate=1e-2)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    rows = [TokenRow(rng.integers(2, VOCAB, 9).astype(np.int32), np.arange(9) >= 2) for _ in range(4)]
    return collate(rows, packing=False, pad_id=1)


def gradient_of(backend, scale=1.0):
    """Return all gradients of one step in one vector, divided by their loss scale."""
    backend.forward_backward([batch()], SmallShare())
    return torch.cat([master.grad.flatten() for master in backend.optimizer.masters.values()]) / scale


def test_gradients_of_a_mean_over_many_tokens_do_not_underflow(folder):
    exact = gradient_of(make_backend(folder, torch.float32))
    scaled, plain = make_backend(folder), make_backend(folder)
    plain.loss_scale = None
    error = {
        "unscaled": (gradient_of(plain) - exact).norm() / exact.norm(),
        "scaled": (gradient_of(scaled, INITIAL_SCALE) - exact).norm() / exact.norm(),
    }
    assert error["unscaled"] > 0.3
    assert error["scaled"] < 0.01


@pytest.mark.parametrize("lora", [0, 2])
def test_a_step_changes_the_weights_like_fp32(folder, lora):
    exact, scaled = make_backend(folder, torch.float32, lora=lora), make_backend(folder, lora=lora)
    for backend in (exact, scaled):
        backend.forward_backward([batch()], SFT())
    assert scaled.optim_step(1.0) == pytest.approx(exact.optim_step(1.0), rel=0.01)
    assert exact.loss_scaling() == {}
    assert scaled.loss_scaling() == {"loss_scale": INITIAL_SCALE, "skipped_steps": 0}


def test_a_step_that_overflows_is_skipped_and_lowers_the_scale(folder, capsys):
    backend = make_backend(folder)
    before = {name: tensor.clone() for name, tensor in backend.optimizer.state().items()}
    backend.forward_backward([batch()], OverflowingLoss())
    assert backend.optim_step(1.0) is None
    assert "skipped an optimizer step: gradients overflowed with loss scale 65536, now 32768" in capsys.readouterr().err
    assert backend.loss_scaling() == {"loss_scale": INITIAL_SCALE / 2, "skipped_steps": 1}
    assert_close(backend.optimizer.state(), before, rtol=0, atol=0)
    backend.forward_backward([batch()], SFT())
    assert backend.optim_step(1.0) > 0
    assert any(not torch.equal(value, before[name]) for name, value in backend.optimizer.state().items())


def test_a_saved_run_resumes_bit_for_bit(folder, tmp_path):
    def train(backend, steps):
        for step in steps:
            backend.forward_backward([batch(step)], OverflowingLoss() if step in (1, 4) else SFT())
            backend.optim_step(1.0)

    whole, resumed = make_backend(folder), make_backend(folder)
    train(whole, range(3))
    whole.save(tmp_path)
    train(whole, range(3, 6))
    resumed.load(tmp_path)
    assert resumed.loss_scaling() == {"loss_scale": INITIAL_SCALE / 2, "skipped_steps": 1}
    train(resumed, range(3, 6))
    assert resumed.loss_scaling() == whole.loss_scaling() == {"loss_scale": INITIAL_SCALE / 4, "skipped_steps": 2}
    assert_close(resumed.optimizer.state(), whole.optimizer.state(), rtol=0, atol=0)


def test_the_scale_grows_after_many_steps_and_never_falls_below_one():
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL):
        scale.update(overflowed=False)
    assert (scale.value, scale.applied) == (2 * INITIAL_SCALE, 0)
    for _ in range(17):
        scale.update(overflowed=True)
    assert (scale.value, scale.skipped) == (1.0, 17)
    with pytest.raises(BackendError, match="not finite even with loss scale 1"):
        scale.update(overflowed=True)
