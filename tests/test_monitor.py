"""Lines, metrics and progress bar of a run, and which process prints them."""

import io
import json
import sys

import ipykernel.iostream  # noqa: F401 - libraries import it outside a notebook, and stderr is a log file all the same
import nbformat
import pytest
from nbclient import NotebookClient

from openrlhf import monitor as module
from openrlhf.monitor import Monitor, Progress, is_main_process, say, shown_count, shown_number, shown_time
from openrlhf.training.metric_sinks import MetricsFile


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


def test_control_characters_are_shown_and_have_no_effect(capsys):
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


def test_a_failing_sink_is_dropped_with_a_message(capsys):
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """Make standard error a terminal whose text can be read."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_on_a_terminal_a_bar_shows_the_step_and_lines_are_printed_above_it(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Monitor(total_steps=4, first_step=2) as monitor:
        monitor.advance({"loss": 0.123456, "tok/s": 10040.4})
        monitor.progress.bar.refresh()
        monitor.tell("a line")
        say("from elsewhere")
    say("below")
    text = terminal.getvalue()
    assert "3/4" in text
    assert "loss=0.1235, tok/s=10,040" in text
    for line in ("a line", "from elsewhere"):  # on its own line: the bar was erased first
        assert f" \ropenrlhf: {line}\n" in text
    assert text.endswith("\nopenrlhf: below\n")
    assert Progress.open_bars == 0


def test_a_brief_bar_appears_if_it_takes_long_and_disappears(monkeypatch):
    terminal = open_terminal(monkeypatch)
    for seconds in (0, 100):
        with Progress("evaluate", total=2, unit="batch", brief=True) as progress:
            progress.bar.start_t -= seconds
            progress.bar.last_print_t -= seconds
            progress.show({"tokens": 8})
            assert ("evaluate:   0%" in terminal.getvalue()) == (seconds > 0)
            assert ("<?, ?batch/s, tokens=8]" in terminal.getvalue()) == (seconds > 0)
    assert terminal.getvalue().endswith("\r")


def test_a_notebook_gets_a_bar():
    code = """
from openrlhf.monitor import Progress
with Progress("train", total=2, unit="step") as progress:
    progress.advance()
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook).execute()
    assert "| 1/2 [" in "".join(output.text for output in notebook.cells[0].outputs)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_file_gets_whole_lines_at_a_limited_rate(clock, capsys):
    with Monitor(total_steps=100) as monitor:
        for step in range(6):
            clock[0] += 4.0
            monitor.advance({"loss": step / 10, "lr": 1e-05})
    assert capsys.readouterr().err.splitlines() == [
        "openrlhf: train: step 3 of 100, 4 s/step, 6 min left, loss 0.2, lr 1e-05",
        "openrlhf: train: step 6 of 100, 4 s/step, 6 min left, loss 0.5, lr 1e-05",
    ]


def test_a_short_run_and_a_resumed_one_get_one_line_at_their_end(clock, capsys):
    with Monitor(total_steps=4, first_step=2) as monitor:
        for _ in range(2):
            clock[0] += 0.5
            monitor.advance({})
    with Monitor(total_steps=4, first_step=4):
        pass
    with Progress("evaluate", total=1, unit="prompt", brief=True) as progress:
        progress.advance()
    assert capsys.readouterr().err == "openrlhf: train: step 4 of 4, 0.5 s/step\n"


def test_time_outside_steps_is_excluded_from_the_rate_and_expected_again(clock, capsys):
    """One evaluation of an hour before the first step, and one of a minute after every second step."""
    with Monitor(total_steps=6) as monitor:
        for step, outside in enumerate((3600.0, 0.0, 60.0, 0.0)):
            if step > 0:
                clock[0] += 10.0
                monitor.advance({})
            clock[0] += outside
            monitor.leave_out(outside)
    assert capsys.readouterr().err.splitlines() == [
        "openrlhf: train: step 1 of 6, 10 s/step, 50 s left",
        "openrlhf: train: step 2 of 6, 10 s/step, 40 s left",
        "openrlhf: train: step 3 of 6, 10 s/step, 90 s left",  # a third of 30 + 60 seconds for each step
    ]


def test_the_bar_shows_the_same_time_left_as_the_lines(monkeypatch, clock):
    terminal = open_terminal(monkeypatch)
    with Monitor(total_steps=4) as monitor:
        for outside in (60.0, 0.0):
            clock[0] += 10.0
            monitor.advance({})
            clock[0] += outside
            monitor.leave_out(outside)
        monitor.progress.bar.refresh()
    assert "<01:20, " in terminal.getvalue()


def test_a_bar_shows_new_values_between_counted_units(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with Progress("generate", total=64, unit="response") as progress:
        for count, tokens in ((0, 1), (32, 60), (0, 61)):
            progress.bar.last_print_t -= 100  # as if the last update were that old
            progress.show({"tokens": tokens}, count=count)
            assert f"tokens={tokens}]" in terminal.getvalue()


def test_without_a_counted_unit_a_line_shows_no_rate(clock, capsys):
    with Progress("generate", total=8, unit="response", brief=True) as progress:
        clock[0] += 20.0
        progress.show({"tokens": 512})
    assert capsys.readouterr().err == "openrlhf: generate: response 0 of 8, tokens 512\n"


def test_time_outside_steps_is_excluded_from_the_rate_of_a_bar(monkeypatch):
    open_terminal(monkeypatch)
    with Monitor(total_steps=4) as monitor:
        bar = monitor.progress.bar
        bar.start_t -= 100  # as if an evaluation had taken that long
        bar.last_print_t -= 100
        monitor.leave_out(100.0)
        monitor.advance({})
        assert bar.format_dict["elapsed"] < 50


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10040.4, "10,040"),
        (1e-5, "1e-05"),
        (0.123456, "0.1235"),
        (999.96, "1000"),
        (-2500.0, "-2,500"),
        (1e15, "1e+15"),
    ],
)
def test_numbers_are_written_for_people(value, text):
    assert shown_number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (545_920, "546k"), (1_240_000, "1.24M"), (999_900_000, "1B"), (7_615_000_000, "7.62B")],
)
def test_counts_are_written_in_three_digits(count, text):
    assert shown_count(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5 s"), (99.0, "99 s"), (720.0, "12 min"), (12000, "3 h 20 min")])
def test_durations_are_written_for_people(seconds, text):
    assert shown_time(seconds) == text


def test_a_monitor_without_steps_or_on_another_rank_is_silent(monkeypatch, capsys):
    Monitor().leave_out(1.0)
    monkeypatch.setenv("RANK", "3")
    with Monitor(total_steps=2) as monitor:
        monitor.advance({"loss": 1.0})
        monitor.tell("a line")
    assert capsys.readouterr() == ("", "")
