"""The battery of benchmarks: every command can run, and nothing that one starts outlives it."""

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import rl_step
from battery import BENCHMARKS, Outcome, render
from peers import ours
from peers.measurement import Task
from workload_files import write_files
from workloads import find_workload

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse

RUNS = [(name, tiny) for name, one in BENCHMARKS.items() for tiny in (False, True) if not tiny or one.tiny is not None]
EXTRA = "--extra"  # flags of train_ppo_ray follow
ROOT = Path(__file__).parents[2]
BATTERY = ROOT / "benchmarks" / "battery.py"
MEASURE = """
import json, re, sys
from dataclasses import asdict
from pathlib import Path
from battery import adopt_orphans, measure
adopt_orphans()
limit, log, *command = sys.argv[1:]
print(json.dumps(asdict(measure("one", command, float(limit), re.compile("figure"), Path(log)))))
"""
# A daemon whose parent has ended, in its own session.
DAEMON = """
import subprocess, sys
code = "import subprocess as s; print('figure', s.Popen(['sleep', '600'], start_new_session=True).pid)"
subprocess.run([sys.executable, "-c", code], check=True)
"""


def measure(tmp_path, *command, limit=600):
    """Measure a command in a process that, unlike pytest, may kill all its descendants."""
    words = [sys.executable, "-c", MEASURE, str(limit), str(tmp_path / "log"), *command]
    ran = subprocess.run(words, cwd=BATTERY.parent, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return Outcome(**json.loads(ran.stdout))


@pytest.mark.parametrize(("name", "tiny"), RUNS)
def test_every_command_parses(tmp_path, monkeypatch, capsys, name, tiny):
    """argparse lists all unknown words: with one added, it must be the only one listed."""
    _, script, *words = BENCHMARKS[name].command(tmp_path, tiny=tiny)
    monkeypatch.setattr(sys, "argv", [script, "--no_such_flag", *words])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --no_such_flag\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workload")
    write_files(folder, find_workload("W3", tiny=True), steps=2)
    return folder


@pytest.mark.parametrize(("name", "tiny"), [run for run in RUNS if BENCHMARKS[run[0]].script == "rl_step.py"])
def test_a_step_gets_flags_that_pass_the_checks_of_the_command(files, name, tiny):
    args, workload = rl_step.parse(BENCHMARKS[name].command(files, tiny=tiny)[2:])
    config = check(parse(COMMANDS["train_ppo_ray"], rl_step.flags(files, args)))
    assert config.rollout.samples_per_rollout == config.batches.train_batch_size == workload.num_samples
    assert workload.num_samples == (8 if tiny else 128 if name.endswith("7b") else 512)


@pytest.mark.parametrize("name", [name for name, one in BENCHMARKS.items() if EXTRA in one.arguments])
def test_extra_flags_pass_the_checks_of_the_command(files, name):
    words = shlex.split(BENCHMARKS[name].arguments)
    extra = words[words.index(EXTRA) + 1 :]
    task = Task(find_workload("W2"), files, 4, tiny=False, memory=0.35, extra=extra)
    assert check(parse(COMMANDS["train_ppo_ray"], ours.flags(task))).rollout.samples_per_rollout == 512


def test_daemons_of_a_benchmark_are_killed(tmp_path):
    outcome = measure(tmp_path, sys.executable, "-c", DAEMON)
    assert outcome.problem == ""
    assert outcome.host_gib > 0
    [line] = outcome.lines
    assert not psutil.pid_exists(int(line.removeprefix("figure ")))


def test_a_benchmark_that_fails_shows_its_last_lines(tmp_path):
    outcome = measure(tmp_path, sys.executable, "-c", "print('a figure'); import no_such_package")
    assert outcome.problem == "exit code 1, ModuleNotFoundError: No module named 'no_such_package'"
    assert outcome.lines[:2] == ["a figure", "last lines:"]
    assert outcome.lines[-1] == "ModuleNotFoundError: No module named 'no_such_package'"


def test_a_benchmark_that_hangs_is_stopped(tmp_path):
    outcome = measure(tmp_path, "sleep", "600", limit=0.2)
    assert outcome.problem == "stopped after 0 s"


def test_the_summary_is_a_table_and_the_lines_of_each():
    done = Outcome("sft", "python sft.py", "", 12.3, 66.05, 7.0, ["45,000 tokens/s"])
    left_out = Outcome("w1", "", "not started: 3 s left", 0.0, None, 0.0, [])
    assert render([done, left_out]).splitlines() == [
        "| benchmark | outcome | seconds | GPU peak, GiB | host peak, GiB |",
        "|---|---|---|---|---|",
        "| sft | ok | 12 | 66.0 | 7.0 |",
        "| w1 | not started: 3 s left | 0 |  |  |",
        "",
        "## sft",
        "",
        "```",
        "python sft.py",
        "",
        "45,000 tokens/s",
        "```",
    ]


@pytest.mark.slow(seconds=6)
def test_a_battery_runs_at_tiny_scale(tmp_path):
    command = [sys.executable, str(BATTERY), "head", "--tiny", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (tmp_path / "summary.md").read_text()
    assert "\n| head | ok | " in ran.stdout
    assert "ours, any head" in (tmp_path / "head.log").read_text()


def test_a_battery_without_time_left_starts_nothing(tmp_path):
    command = [sys.executable, str(BATTERY), "head", "--seconds", "3", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 1
    assert "| head | not started: 3 s left |" in ran.stdout


@pytest.mark.nightly
def test_every_benchmark_runs_at_tiny_scale(tmp_path):
    command = [sys.executable, str(BATTERY), "--tiny", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
