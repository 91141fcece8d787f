"""Lines, metrics and progress bar of a run, and which process prints them."""

import json

import pytest

from openrlhf.monitor import MetricsFile, Monitor, is_main_process, say


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_only_the_first_process_prints(monkeypatch, capsys):
    assert is_main_process()
    say("hello")
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()
    say("hello from behind")
    assert capsys.readouterr() == ("", "openrlhf: hello\n")


def test_control_characters_are_shown_and_not_obeyed(capsys):
    say("answered \x1b]0;title\x07\x1b[2J\r\x9b\tand\nmore")
    assert capsys.readouterr().err == "openrlhf: answered \\x1b]0;title\\x07\\x1b[2J\\x0d\\x9b\tand\nmore\n"


def test_metrics_are_one_json_object_per_line_and_written_immediately(tmp_path):
    file = MetricsFile(tmp_path / "run")
    file.log("train", 1, {"loss": 0.5})
    assert read_metrics(tmp_path / "run") == [{"kind": "train", "step": 1, "loss": 0.5}]
    file.close()


def test_metrics_are_added_to_those_in_the_file(tmp_path):
    for step in (1, 2):
        file = MetricsFile(tmp_path)
        file.log("train", step, {"loss": 0.5})
        file.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_delays_lines_and_ends_nothing(tmp_path, file_size_limit, capsys):
    file = MetricsFile(tmp_path)
    file.log("train", 1, {"loss": 0.5})
    with file_size_limit(60):  # room for one line and a part of the next
        for step in (2, 3):
            file.log("train", step, {"loss": 0.5})
            assert [line["step"] for line in read_metrics(tmp_path)] == [1]  # never a part of a line
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written") == 1
    file.log("train", 4, {"loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    with file_size_limit(1):
        file.log("train", 5, {"loss": 0.5})
        file.close()
    assert "metrics.jsonl lacks its last " in capsys.readouterr().err


def test_a_sink_that_fails_is_dropped_with_a_line(capsys):
    class FullSink:
        def log(self, kind, step, values):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    other = RecordingSink()
    with Monitor([FullSink(), other]) as monitor:
        for step in (1, 2):
            monitor.log("train", step, {})
    Monitor([FullSink()]).close()
    assert [step for _, step, _ in other.lines] == [1, 2]
    line = "no more metrics are sent to FullSink: [Errno 28] No space left on device. Training continues\n"
    assert capsys.readouterr().err.count(line) == 2


class RecordingSink:
    def __init__(self):
        self.lines, self.closed = [], False

    def log(self, kind, step, values):
        self.lines.append((kind, step, values))

    def close(self):
        self.closed = True


def test_a_monitor_writes_to_its_sinks_and_closes_them_when_the_run_fails():
    notes = RecordingSink()

    def fail():
        with Monitor([notes]) as monitor:
            monitor.log("eval", 3, {"loss": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (notes.lines, notes.closed) == ([("eval", 3, {"loss": 1.0})], True)


def test_the_progress_bar_shows_the_step_and_lines_are_printed_above_it(capsys):
    with Monitor(total_steps=4, first_step=2) as monitor:
        monitor.advance({"loss": 0.123456, "tok/s": 1000.0})
        monitor.tell("a line")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/4" in captured.err
    assert "loss=0.1235, tok/s=1000" in captured.err
    assert "openrlhf: a line\n" in captured.err


def test_time_outside_steps_is_excluded_from_the_rate():
    with Monitor(total_steps=4) as monitor:
        monitor.bar.start_t -= 100  # as if an evaluation had taken that long
        monitor.bar.last_print_t -= 100
        monitor.leave_out(100.0)
        monitor.advance({})
        assert monitor.bar.format_dict["elapsed"] < 50


def test_a_monitor_without_steps_or_on_another_rank_is_silent(monkeypatch, capsys):
    Monitor().leave_out(1.0)
    monkeypatch.setenv("RANK", "3")
    with Monitor(total_steps=2) as monitor:
        monitor.advance({"loss": 1.0})
        monitor.tell("a line")
    assert capsys.readouterr() == ("", "")
