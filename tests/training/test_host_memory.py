"""Weights of frozen models in host memory: when they are copied, and which stay on the device."""

import pytest
import torch

from openrlhf.models.forward import LogProbs
from openrlhf.rl.models import Models
from openrlhf.training.host_memory import OffloadedWeights
from openrlhf.training.local import LocalFrozen
from openrlhf.types import RolloutBatch
from tests.tiny import make_model
from tests.training.deepspeed_cases import load_network, make_batch

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path, "llama")
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """The copies to the device so far."""
    counted, load = [], OffloadedWeights.load
    monkeypatch.setattr(OffloadedWeights, "load", lambda self: (counted.append(1), load(self)))
    return counted


def test_offloaded_weights_move_once_for_all_micro_batches(folder, loads):
    plain, offloaded = (LocalFrozen(load_network(folder), CPU, offload=offload) for offload in (False, True))
    batches = [RolloutBatch(**vars(make_batch((5, 3), seed, packed=False))) for seed in range(3)]
    models = Models(reference=offloaded)
    for found, batch in zip(models.log_probs(batches, of_reference=True), batches, strict=True):
        torch.testing.assert_close(found, plain.forward(batch, LogProbs).log_probs, rtol=0, atol=0)
    assert loads == [1]
    assert not offloaded.offloaded.loaded


def test_an_error_releases_the_device(folder):
    frozen = LocalFrozen(load_network(folder), CPU, offload=True)
    with pytest.raises(ZeroDivisionError), frozen.on_device():
        raise ZeroDivisionError
    assert not frozen.offloaded.loaded


def test_all_that_the_head_reads_stays_on_the_device(folder):
    """Distillation applies the head of an offloaded teacher outside a forward pass."""
    network = load_network(folder)
    frozen = LocalFrozen(network, CPU, offload=True)
    moved = {id(tensor) for tensor, _ in frozen.offloaded.host}
    outside = [name for name, tensor in network.decoder.named_parameters() if id(tensor) not in moved]
    assert outside == ["lm_head.weight"]
