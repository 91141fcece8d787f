"""Compiled layers: chosen when the rest of the run pays for them, and given up if they are slower or fail."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from openrlhf.config.sections.model import ModelFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import collate
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm
from openrlhf.training import compilation
from openrlhf.training.local import CompilingBackend
from openrlhf.training.objectives import SFT
from openrlhf.types import TokenRow
from tests.tiny import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture
def start(folder, monkeypatch):
    """Return a function that makes a backend as on a GPU, whose steps take given numbers of seconds."""
    monkeypatch.setattr(compilation, "COMPILER", "eager")

    def make(seconds):
        network = Network(load_causal_lm(folder, ModelFlags(), device=CPU, packing=False))
        backend = CompilingBackend(network, OptimizerFlags(), CPU, learning_rate=1e-2)
        readings = iter([reading for duration in seconds for reading in (0.0, duration)])
        monkeypatch.setattr(backend.compilation, "clock", lambda: next(readings))
        return backend

    return make


def is_compiled(backend):
    return all(layer._compiled_call_impl is not None for layer in compilation.decoder_layers(backend.network))


def take(backend, steps, left):
    """Train for some steps, with `left` more to come after the last; return the losses."""
    row = TokenRow(np.arange(2, 10, dtype=np.int32), np.ones(8, dtype=bool))
    losses = []
    for step in range(steps):
        losses.append(float(backend.forward_backward([collate([row], packing=False, pad_id=0)], SFT()).losses.sum()))
        backend.steps_left = left + steps - 1 - step
        backend.optim_step(1.0)
    return losses


def test_layers_are_compiled_if_the_rest_of_the_run_pays_for_it(start, capsys):
    backend = start([9.0, 1.0, 1.0, 12.0, 0.5, 0.5])
    take(backend, 3, left=201)  # 201 steps of 1 s save 30.15 s, and compilation takes 30 s
    assert is_compiled(backend)
    take(backend, 3, left=198)
    assert is_compiled(backend)
    lines = capsys.readouterr().err
    assert "compiling the decoder layers, because 201 steps of 1 s remain" in lines
    assert "compiled the decoder layers in 11 s" in lines
    assert "compiled layers train 16 tokens/s, 8 without" in lines


def test_a_short_run_is_not_compiled(start, capsys):
    backend = start([9.0, 1.0, 1.0, 1.0])
    take(backend, 4, left=199)
    assert not is_compiled(backend)
    assert "compil" not in capsys.readouterr().err


def test_layers_that_are_slower_when_compiled_run_as_before(start, capsys):
    backend = start([9.0, 1.0, 1.0, 12.0, 1.5, 1.25])
    take(backend, 6, left=1000)
    assert not is_compiled(backend)
    assert "no longer compiled: they train 6 tokens/s, 8 without" in capsys.readouterr().err


def test_a_step_on_which_the_compiler_fails_is_repeated_without_it(start, monkeypatch, capsys):
    plain, failing = start([1.0] * 5), start([1.0] * 5)
    plain.compilation.finished = True  # it never compiles

    def fail(*_):
        raise RuntimeError("cannot compile this")

    monkeypatch.setattr(compilation, "COMPILER", fail)
    losses = take(failing, 5, left=1000)
    assert "no longer compiled: " in capsys.readouterr().err
    assert_close(losses, take(plain, 5, left=1000), rtol=0.0, atol=0.0)


def test_scoring_and_evaluation_survive_the_compiler_too(start, monkeypatch, capsys):
    backend = start([1.0] * 3)
    take(backend, 3, left=1000)
    assert is_compiled(backend)

    def fail(*_, **__):
        raise RuntimeError("cannot compile this")

    for layer in compilation.decoder_layers(backend.network):
        monkeypatch.setattr(layer, "_compiled_call_impl", fail)
    batch = collate([TokenRow(np.arange(2, 10, dtype=np.int32), np.ones(8, dtype=bool))], packing=False, pad_id=0)
    backend.evaluate([batch], SFT())
    assert not is_compiled(backend)
    assert backend.module.training
    assert "no longer compiled: cannot compile this" in capsys.readouterr().err


def test_compilation_is_automatic_only_on_a_gpu(folder):
    network = Network(load_causal_lm(folder, ModelFlags(), device=CPU, packing=False))
    assert not compilation.pays_off_on(network, CPU)
    assert not compilation.pays_off_on(network, torch.device("cuda"))  # in fp32
    assert compilation.pays_off_on(network.to(torch.bfloat16), torch.device("cuda"))
