"""The moving average of a model in one process; test_fsdp.py and test_deepspeed.py have those of several."""

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from openrlhf.errors import BackendError
from openrlhf.training.local import LocalBackend
from openrlhf.training.moving_average import MovingAverage
from tests.tiny import make_model
from tests.training.deepspeed_cases import RATE, SETTINGS, load_network, step_batches, train_average

CPU = torch.device("cpu")


def test_an_average_follows_the_weights_and_is_resumed(tmp_path):
    make_model(tmp_path / "model")
    steps = [step_batches(step, packed=False) for step in range(2)]
    backend = LocalBackend(load_network(tmp_path / "model"), SETTINGS, CPU, learning_rate=RATE)
    first = {name: tensor.clone() for name, tensor in backend.exported()}
    average = train_average(backend, steps[:1], write=tmp_path / "checkpoint")
    second = dict(backend.exported())
    assert max(float((second[name] - first[name]).abs().max()) for name in first) > 1e-3
    for name, tensor in average.tensors.items():
        assert_close(tensor, 0.75 * first[name] + 0.25 * second[name])

    again = LocalBackend(load_network(tmp_path / "model"), SETTINGS, CPU, learning_rate=RATE)
    resumed = train_average(again, steps[1:], resume=tmp_path / "checkpoint").tensors
    whole = LocalBackend(load_network(tmp_path / "model"), SETTINGS, CPU, learning_rate=RATE)
    assert_close(resumed, train_average(whole, steps).tensors, rtol=0.0, atol=0.0)


def test_averages_of_version_1_0_are_resumed(tmp_path):
    make_model(tmp_path / "model")
    backend = LocalBackend(load_network(tmp_path / "model"), SETTINGS, CPU, learning_rate=RATE)
    saved = {name: torch.full_like(tensor, 3.0) for name, tensor in backend.exported()}
    save_file(saved, tmp_path / "ema.safetensors")
    average = MovingAverage(backend, 0.5)
    average.load(tmp_path)
    assert_close(average.tensors, saved)


def test_a_checkpoint_without_an_average_is_rejected(tmp_path):
    make_model(tmp_path / "model")
    backend = LocalBackend(load_network(tmp_path / "model"), SETTINGS, CPU, learning_rate=RATE)
    with pytest.raises(BackendError, match=r"has no moving average: .* Try: without --enable_ema"):
        MovingAverage(backend, 0.5).load(tmp_path)
