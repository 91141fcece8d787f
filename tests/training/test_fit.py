"""The supervised loop on a tiny model: steps, evaluation, signals, checkpoints and errors."""

import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from openrlhf.config.sections.training import (
    BatchFlags,
    CheckpointFlags,
    LogFlags,
    OptimizerFlags,
    SupervisedOptimizerFlags,
)
from openrlhf.data.collate import collate
from openrlhf.errors import BackendError
from openrlhf.models.forward import Network
from openrlhf.monitor import Monitor
from openrlhf.training.fit import Fit, Interrupted
from openrlhf.training.local import LocalBackend
from openrlhf.training.objectives import SFT
from openrlhf.training.order import Order
from openrlhf.training.utilization import MatrixSizes
from openrlhf.types import TokenRow
from tests.tiny import make_model

CPU = torch.device("cpu")
NAN_TOKEN = 79  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def rows(count, seed=0, length=6):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, NAN_TOKEN, length).astype(np.int32) for _ in range(count)]
    return [TokenRow(row, np.arange(length) >= 2) for row in ids]


class RecordingSink:
    """A sink that records metrics, and can call a function at a step."""

    def __init__(self, at=None, do=None):
        self.lines, self.at, self.do = [], at, do

    def log(self, kind, step, values):
        self.lines.append((kind, step, dict(values)))
        if (kind, step) == self.at:
            self.do()

    def close(self):
        pass


@pytest.fixture
def fit(folder, tmp_path):
    """A run over some rows in batches of 4 and micro-batches of 3; `sink` receives its metrics."""

    def make(train, sink=None, *, held_out=(), epochs=1, eval_every=-1, every=-1):
        backend = LocalBackend(
            Network(AutoModelForCausalLM.from_pretrained(folder)), OptimizerFlags(), CPU, learning_rate=1e-2
        )
        return Fit(
            backend=backend,
            objective=SFT(),
            collate=partial(collate, packing=False, pad_id=1),
            rows=train,
            eval_rows=held_out,
            order=Order(num_rows=len(train), batch_size=4, epochs=epochs, seed=0),
            schedule=lambda step: 1.0,
            batches=BatchFlags(train_batch_size=4, micro_train_batch_size=3, max_epochs=epochs),
            optimizer=SupervisedOptimizerFlags(learning_rate=1e-2),
            checkpoints=CheckpointFlags(ckpt_path=str(tmp_path / "ckpt"), save_steps=every),
            logs=LogFlags(eval_steps=eval_every),
            monitor=Monitor([sink] if sink else []),
        )

    return make


def weights(fit):
    return {name: tensor.clone() for name, tensor in fit.backend.network.state_dict().items()}


def steps(sink, kind):
    return [step for seen, step, _ in sink.lines if seen == kind]


def test_the_incomplete_batch_of_an_epoch_is_its_own_step(fit):
    sink = RecordingSink()
    run = fit(rows(10), sink, epochs=2)
    last = run.run()
    assert steps(sink, "train") == [1, 2, 3, 4, 5, 6]
    assert last == sink.lines[-1][2]
    assert set(last) == {"gpt_loss", "loss_mean", "lr", "grad_norm", "timing/step_total", "timing/tokens_per_second"}


def test_utilization_is_logged_if_the_peak_is_known(fit):
    run = fit(rows(4), sink := RecordingSink())
    meter = run.backend.meter
    meter.peak, meter.sizes = 1e15, MatrixSizes.of(run.backend.network)
    run.run()
    assert 0 < sink.lines[-1][2]["mfu"] < 1


def test_a_dataset_smaller_than_a_batch_is_trained(fit):
    sink = RecordingSink()
    fit(rows(2), sink).run()
    assert steps(sink, "train") == [1]


@pytest.mark.parametrize(
    ("eval_every", "expected"), [(-1, [3, 6]), (2, [2, 4, 6]), (4, [4, 6])], ids=["epochs", "even", "uneven"]
)
def test_evaluation_follows_its_interval_and_the_last_step(eval_every, expected, fit):
    sink = RecordingSink()
    fit(rows(10), sink, held_out=rows(5, seed=1), epochs=2, eval_every=eval_every).run()
    assert steps(sink, "eval") == expected


def test_evaluation_covers_all_rows_and_does_not_change_training(fit):
    """Nine rows in chunks of four: the result is the mean over all tokens, regardless of the chunks."""
    held_out = rows(9, seed=1)
    run = fit(rows(4), held_out=held_out)
    before = weights(run)
    got = run.evaluate(0)["gpt_loss"]
    with torch.no_grad():
        losses = []
        for row in held_out:
            ids = torch.from_numpy(row.input_ids).long()[None]
            scores = run.backend.network.decoder(ids).logits[0, 1:-1].log_softmax(-1)
            losses.append(-scores.gather(-1, ids[0, 2:, None]))
    assert got == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(run).items())
    assert run.backend.network.training


def test_the_last_evaluation_is_reported_again_on_resume(fit, tmp_path):
    reported = []
    run = fit(rows(8), held_out=rows(3, seed=1), every=1)
    run.on_evaluated = reported.append
    run.run()
    again = fit(rows(8), held_out=rows(3, seed=1))
    again.on_evaluated = reported.append
    assert again.resume(tmp_path / "ckpt" / "global_step2") == 2
    assert reported[0] == reported[1] == again.last_evaluation == run.last_evaluation


def with_nan_embedding(fit, train, sink):
    run = fit(train, sink)
    with torch.no_grad():
        run.backend.network.decoder.get_input_embeddings().weight[NAN_TOKEN] = float("nan")
    return run


def test_a_loss_of_nan_stops_the_run_before_the_weights_change(fit):
    train = rows(12)
    order = Order(num_rows=12, batch_size=4, epochs=1, seed=0)
    bad_row = order.rows(1)[3]  # the last row of the second step, alone in micro-batch 2
    train[bad_row].input_ids[3] = NAN_TOKEN
    sink = RecordingSink()
    run = with_nan_embedding(fit, train, sink)
    reached = {}
    sink.at, sink.do = ("train", 1), lambda: reached.update(weights(run))
    with pytest.raises(BackendError) as caught:
        run.run()
    assert str(caught.value) == (
        f"the loss of step 2 is not finite in micro-batch 2 of 2 (training rows {bad_row + 1}); no weight was changed. "
        "Try: a smaller --learning_rate, or check those rows"
    )
    assert steps(sink, "train") == [1]
    for name, tensor in weights(run).items():
        assert_close(tensor, reached[name], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(number, fit, tmp_path):
    untouched = fit(rows(10), epochs=2)
    untouched.run()
    before = signal.getsignal(number)
    sink = RecordingSink(at=("train", 2), do=lambda: signal.raise_signal(number))
    with pytest.raises(Interrupted) as stopped:
        fit(rows(10), sink, epochs=2).run()
    assert steps(sink, "train") == [1, 2]
    assert stopped.value.folder == tmp_path / "ckpt" / "global_step2"
    assert signal.getsignal(number) is before

    again = fit(rows(10), epochs=2)
    again.run(again.resume(stopped.value.folder))
    assert all(torch.equal(tensor, weights(untouched)[name]) for name, tensor in weights(again).items())


def test_a_second_signal_stops_immediately(fit, tmp_path):
    def signal_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(rows(10), RecordingSink(at=("train", 2), do=signal_twice)).run()
    assert not isinstance(stopped.value, Interrupted)
    assert not (tmp_path / "ckpt").exists()


def test_a_run_in_another_thread_trains_without_signals(fit):
    sink = RecordingSink()
    thread = threading.Thread(target=fit(rows(4), sink).run)
    thread.start()
    thread.join()
    assert steps(sink, "train") == [1]
