"""Runs are found below any folder that a user may name, and their metrics are read as they grow."""

import json
import os

import pytest

from openrlhf.errors import ConfigError
from openrlhf.view.metrics import START, read_metrics
from openrlhf.view.records import SampleRecords
from openrlhf.view.runs import _started, find_runs
from tests.view.made_runs import make_run, write_metrics


def names(*folders):
    return [run.name for run in find_runs(folders)]


def test_a_run_dir_a_save_path_and_a_folder_of_them_find_the_same_run(tmp_path):
    run_dir = make_run(tmp_path / "runs" / "grpo")
    for folder in (run_dir, run_dir.parent, tmp_path / "runs", tmp_path):
        assert [(run.name, run.folder) for run in find_runs([folder])] == [("grpo", run_dir.resolve())]


def test_a_run_counts_once_and_an_earlier_one_only_if_it_is_named(tmp_path):
    run_dir = make_run(tmp_path / "a")
    write_metrics(run_dir / "earlier" / "2026-01-01", [("train", 1, {"loss": 1.0})])
    assert names(tmp_path, run_dir, tmp_path / "a") == ["a"]
    assert names(run_dir / "earlier" / "2026-01-01") == ["2026-01-01"]


def test_names_are_as_long_as_it_takes_to_tell_runs_apart(tmp_path):
    for name in ("x/grpo/run", "y/grpo/run", "y/sft/run"):
        write_metrics(tmp_path / name, [("train", 1, {"loss": 1.0})])
    assert sorted(names(tmp_path)) == ["sft", "x/grpo", "y/grpo"]


def test_a_folder_without_runs_is_an_error(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"contains no run, .*metrics.jsonl. Try: the --save_path"):
        find_runs([tmp_path])


def test_real_runs_have_curves_and_flags(agent_run, supervised_run):
    for folder, curve in ((agent_run, "train/reward"), (supervised_run, "train/gpt_loss")):
        (run,) = find_runs([folder])
        points = read_metrics(run.metrics).curves[curve]
        assert points.steps == [1, 2]
        assert all(isinstance(value, float) for value in points.values)
        assert run.config().flags["save_path"] == str(folder)


DEEP = '{"flags": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"flags": 1}', DEEP], ids=["empty", "list", "cut", "number", "deep"])
def test_a_damaged_config_is_empty(tmp_path, text):
    run_dir = make_run(tmp_path / "a")
    (run_dir / "config.json").write_text(text)
    assert find_runs([tmp_path])[0].config().flags == {}


def test_infinite_flags_are_text(tmp_path):
    run_dir = make_run(tmp_path / "a")
    (run_dir / "config.json").write_text('{"flags": {"a": 1e999, "b": Infinity, "c": 0.5}}')
    assert find_runs([tmp_path])[0].config().flags == {"a": "1e999", "b": "Infinity", "c": 0.5}


def test_pipes_and_links_in_place_of_files_are_skipped(tmp_path):
    """Opening a pipe would wait for someone to write to it."""
    run_dir = make_run(tmp_path / "a")
    first, second, third = sorted((run_dir / "rollouts").iterdir())
    for path in (run_dir / "config.json", run_dir / "metrics.jsonl", first):
        path.unlink()
        os.mkfifo(path)
    second.unlink()
    second.symlink_to(second.name)
    (run,) = find_runs([tmp_path])
    assert run.config().flags == {}
    assert read_metrics(run.metrics).curves == {}
    assert [file.name for file in SampleRecords(run.rollouts).files()] == [third.name]


def test_only_added_lines_are_read(tmp_path):
    write_metrics(tmp_path, [("train", 1, {"loss": 1.0})])
    first = read_metrics(tmp_path / "metrics.jsonl")
    assert first.curves["train/loss"].values == [1.0]
    assert read_metrics(tmp_path / "metrics.jsonl", first.position).curves == {}
    write_metrics(tmp_path, [("train", 2, {"loss": 0.5}), ("eval", 2, {"loss": 0.7})])
    second = read_metrics(tmp_path / "metrics.jsonl", first.position)
    assert {name: (points.steps, points.values) for name, points in second.curves.items()} == {
        "train/loss": ([2], [0.5]),
        "eval/loss": ([2], [0.7]),
    }
    assert not second.restarted


def test_a_line_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"kind": "train", "step": 1, "loss": 1.0})
    path.write_text(line[:20])
    part = read_metrics(path)
    assert (part.curves, part.position.offset, part.more) == ({}, 0, False)
    path.write_text(line + "\n")
    assert read_metrics(path, part.position).curves["train/loss"].steps == [1]


def test_a_replaced_file_is_read_from_its_start(tmp_path):
    write_metrics(tmp_path, [("train", step, {"loss": 1.0}) for step in range(1, 5)])
    position = read_metrics(tmp_path / "metrics.jsonl").position
    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
    assert read_metrics(tmp_path / "metrics.jsonl", position).restarted
    write_metrics(tmp_path, [("train", 1, {"loss": 2.0})])
    part = read_metrics(tmp_path / "metrics.jsonl", position)
    assert (part.restarted, part.curves["train/loss"].values) == (True, [2.0])


def test_a_file_that_cannot_be_read_keeps_its_position(tmp_path):
    write_metrics(tmp_path, [("train", 1, {"loss": 1.0})])
    position = read_metrics(tmp_path / "metrics.jsonl").position
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()  # even root cannot read a folder
    part = read_metrics(tmp_path / "metrics.jsonl", position)
    assert (part.curves, part.position, part.restarted, part.more) == ({}, position, False, False)


def test_a_run_that_disappears_during_the_search_does_not_end_it(tmp_path):
    assert _started(tmp_path / "gone") == (0.0, tmp_path / "gone")


@pytest.mark.parametrize("broken", ["{", "[]", "7", '{"step": 1}', '{"kind": "train", "step": "x"}', "[" * 100_000])
def test_a_broken_line_is_counted_and_the_others_are_read(tmp_path, broken):
    write_metrics(tmp_path, [("train", 1, {"loss": 1.0})])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(broken + "\n")
    write_metrics(tmp_path, [("train", 2, {"loss": float("nan"), "text": "x", "huge": 10**400})])
    part = read_metrics(tmp_path / "metrics.jsonl", START)
    assert part.unreadable == 1
    assert part.curves["train/loss"].values == [1.0, None]
    assert part.curves["train/huge"].values == [None]
    assert "train/text" not in part.curves


def test_a_large_file_comes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.view.metrics.MOST_BYTES", 100)
    write_metrics(tmp_path, [("train", step, {"loss": 1.0}) for step in range(20)])
    steps, position, more = [], START, True
    while more:
        part = read_metrics(tmp_path / "metrics.jsonl", position)
        position, more = part.position, part.more
        steps += part.curves["train/loss"].steps
    assert steps == list(range(20))
