import os
import subprocess
import sys
from pathlib import Path

import pytest
from peers import ours, upstream
from peers.measurement import Measurement, Task, find_measurement, highest, report, typical
from w import Absent, last_error, render, run
from workload_files import read_prompts, write_files
from workloads import WORKLOADS, find_workload

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse

ROOT = Path(__file__).parents[2]
OURS = Measurement("openrlhf 1.0", "W1", [20.0, 10.0, 12.0, 11.0], [9.0, 5.0], [8.0, 4.0], 1000.0, 99.25)


def measured(who, **changes):
    return Measurement(**{**vars(OURS), "who": who, **changes})


def task_in(folder, name, *, tiny=False, extra=()):
    return Task(find_workload(name, tiny=tiny), folder, 4, tiny, 0.35, list(extra), upstream=folder)


def test_a_measurement_is_found_in_the_output_of_a_driver(capsys):
    report(OURS)
    before, after = 'INFO loading\n{not json\n{"steps": [1]}', "[rank0]: process group not destroyed\n{}"
    assert find_measurement(f"{before}{capsys.readouterr().out}{after}") == OURS
    assert find_measurement(before + after) is None


def test_the_first_step_does_not_count():
    assert OURS.step == 11
    assert typical([7.0]) == 7


def test_tokens_per_second_are_those_of_training(tmp_path):
    task = task_in(tmp_path, "W1")
    assert task.measured("x", [9, 9], [1, 1], [100, 8]).tokens_per_second == 512 * 640 / 8
    assert task.measured("vLLM", [9, 9], [9, 9]).tokens_per_second is None


def test_the_table_compares_each_system_with_ours():
    trl = measured("TRL 1.16", steps=[40.0, 33.0], peak_gib=None)
    vllm = measured("vLLM 0.26", steps=[6.0, 4.0], generation=[6.0, 4.0], training=[], tokens_per_second=None)
    absent = Absent("upstream", "W1", "not installed")
    assert render([OURS, trl, vllm, absent]).splitlines() == [
        "| workload | who | step, s | generation, s | training, s | training tokens/s | peak GiB | step / ours |",
        "|---|---|---|---|---|---|---|---|",
        "| W1 | openrlhf 1.0 | 11.00 | 5.00 | 4.00 | 1,000 | 99.2 | 1.00 |",
        "| W1 | TRL 1.16 | 33.00 | 5.00 | 4.00 | 1,000 |  | 3.00 |",
        "| W1 | vLLM 0.26 |  | 4.00 |  |  | 99.2 | 0.80 (generation) |",
        "",
        "W1, upstream: not installed",
    ]


def test_peers_have_rows_if_ours_failed():
    lines = render([Absent("ours", "W1", "out of memory"), measured("TRL 1.16")]).splitlines()
    assert lines[2] == "| W1 | TRL 1.16 | 11.00 | 5.00 | 4.00 | 1,000 | 99.2 |  |"


def test_a_failing_driver_gives_its_error_and_a_hanging_one_is_killed(tmp_path):
    code = "import sys; sys.stderr.write('a warning\\n'); import no_such_package"
    failed = run([sys.executable, "-c", code], 600, "W1", "trl", tmp_path)
    assert failed == Absent("trl", "W1", "ModuleNotFoundError: No module named 'no_such_package'")
    assert "a warning" in (tmp_path / "W1_trl.log").read_text()
    hanging = run(["sleep", "600"], 0.1, "W1", "trl", tmp_path)
    assert hanging == Absent("trl", "W1", "not finished after 0.1 s (--timeout)")


def test_the_error_of_a_driver_is_found_before_later_output():
    assert (
        last_error("Traceback\ntorch.OutOfMemoryError: CUDA\n[W] resource tracker\n") == "torch.OutOfMemoryError: CUDA"
    )
    assert last_error("warning\nTRL has no such trainer\n") == "TRL has no such trainer"
    assert last_error("") == ""


def test_the_peak_is_the_highest_reading_of_nvidia_smi():
    assert highest("512\n142848\n1024\n[N/A]\n") == 139.5
    assert highest("") is None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workload")
    write_files(folder, find_workload("W3", tiny=True), steps=2)
    return folder


def test_prompts_have_the_length_of_the_workload(files):
    assert [len(text) for text in read_prompts(files)] == [16] * 8


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("tiny", [False, True])
def test_our_flags_pass_the_checks_of_the_command(files, name, tiny):
    task = task_in(files, name, tiny=tiny, extra=["--seed", "7"])
    config = check(parse(COMMANDS["train_ppo_ray"], ours.flags(task)))
    assert config.rollout.samples_per_rollout == task.workload.num_samples == config.batches.train_batch_size
    assert config.batches.seed == 7


def test_a_driver_rejects_responses_of_other_lengths(tmp_path):
    task = task_in(tmp_path, "W1")
    task.check_responses(512 * 512)
    with pytest.raises(SystemExit, match="the responses have 9 tokens: expected 262144"):
        task.check_responses(9)


def test_timings_of_openrlhf_are_read_from_its_log():
    lines = [
        "(PPOTrainer pid=7) INFO ... Global step 1: {'reward': 0.5, 'kl': nan, 'timing/ppo_train': 13.5}\n",
        "Generate samples: 100%\n",
        "Global step 2: {'timing/generation': 7e+01, 'timing/step_total': 90.4}",
    ]
    assert list(upstream.read_timings(lines)) == [{"ppo_train": 13.5}, {"generation": 70.0, "step_total": 90.4}]


@pytest.mark.parametrize("name", WORKLOADS)
def test_flags_of_openrlhf_are_those_of_its_releases(tmp_path, name):
    known = (ROOT / "tests" / "config" / "upstream_flags.txt").read_text().split()
    given = [word.removeprefix("--") for word in upstream.flags(task_in(tmp_path, name)) if word.startswith("--")]
    assert set(given) <= set(known)


def test_openrlhf_does_not_see_our_package(tmp_path):
    path = upstream.clean_path(tmp_path, os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), "/site"]))
    assert path == os.pathsep.join([str(tmp_path), str(ROOT / "benchmarks"), "/site"])


@pytest.mark.slow(seconds=15)
def test_w1_runs_at_tiny_scale(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "w.py"), "W1", "--tiny", "--steps", "2"]
    ran = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    row = ran.stdout.splitlines()[2]
    assert row.startswith("| W1 | openrlhf ")
    assert row.endswith("| 1.00 |")
