"""Warnings of supervised training: a spike of the gradient norm, and a loss that does not fall."""

import math

import pytest

from openrlhf.training.health import FEWEST, WINDOW, NormWatch, SupervisedHealth
from tests.toy_data import ANSWERS, answers, dataset_flags


def watch(losses, norms=None, **options):
    health = SupervisedHealth(clipped=True, **options)
    norms = norms or [1.0] * len(losses)
    pairs = enumerate(zip(losses, norms, strict=True), start=1)
    return [line for step, (loss, norm) in pairs for line in health.check(step, loss=loss, norm=norm)]


def noise(step):
    return 0.2 * math.sin(7.0 * step)


def test_a_loss_that_does_not_fall_is_reported_once():
    (line,) = watch([2.0 + noise(step) + step / 1000 for step in range(6 * WINDOW)])
    assert line.startswith(f"step {2 * WINDOW}: the loss does not fall: 2.1")
    assert "Try: another --learning_rate" in line


@pytest.mark.parametrize("shape", ["falls", "levels off", "is noisy"])
def test_a_loss_that_fell_is_not_reported(shape):
    curves = {
        "falls": lambda step: 2.0 - step / 1000,
        "levels off": lambda step: 1.0 + math.exp(-step / 30),
        "is noisy": lambda step: 2.0 - step / 2000 + 5 * noise(step),
    }
    assert watch([curves[shape](step) for step in range(6 * WINDOW)]) == []


def test_a_resumed_run_need_not_learn_more():
    assert watch([1.0] * 6 * WINDOW, watches_loss=False) == []


def test_a_gradient_norm_is_compared_with_the_median_of_recent_ones():
    watch_ = NormWatch(clipped=False)
    for step in range(FEWEST):
        assert watch_.check(step, 0.5 + step % 2) == []
    (line,) = watch_.check(99, 40.0)
    assert "step 99: the gradient norm is 40, 40 times the usual 1; nothing limits the update (--max_norm 0)" in line
    assert "try: --max_norm 1, a smaller --learning_rate" in line
    assert watch_.check(100, 4000.0) == []  # once per run


def test_norms_of_the_first_steps_and_of_skipped_steps_are_not_judged():
    watch_ = NormWatch(clipped=True)
    for norm in (None, *[0.001] * (FEWEST - 1), 10.0):
        assert watch_.check(1, norm) == []


def test_norms_that_grow_when_learning_begins_are_not_a_spike():
    """A reward model's first steps: the norm grows from 0.1 to 15 within ten steps."""
    watch_ = NormWatch(clipped=True)
    for norm in [*[0.1] * 20, 0.25, 0.6, 2.1, 5.8, 6.0, 15.7]:
        assert watch_.check(1, norm) == []


def test_a_healthy_run_gives_no_warning_and_logs_its_speed(tmp_path, train, capsys):
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(64), answers(4)), train_batch_size=2)
    stderr = capsys.readouterr().err
    assert "times the usual" not in stderr
    assert "does not fall" not in stderr
    text = (ran.save_path / "run" / "metrics.jsonl").read_text()
    assert text.count('"timing/tokens_per_second"') == text.count('"timing/step_total"') == 32


def test_a_run_that_does_not_learn_is_reported(tmp_path, train, capsys, monkeypatch):
    monkeypatch.setattr("openrlhf.training.health.WINDOW", 8)
    files = dataset_flags(tmp_path, answers(4), answers(4))  # every step trains on the same rows
    train("train_sft", **ANSWERS, **files, max_epochs=16, train_batch_size=4, learning_rate=0.0)
    assert "step 16: the loss does not fall: " in capsys.readouterr().err
