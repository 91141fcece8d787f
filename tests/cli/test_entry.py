"""Commands as a user starts them, as processes: help, errors, exit codes and signals. Most start cold on purpose."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf
from openrlhf.api.start import prepare, run
from openrlhf.cli.main import GROUPS, SUMMARIES, main
from openrlhf.config.commands import COMMANDS
from tests.warm import warm_python

ROOT = Path(openrlhf.__file__).parents[1]
WATCHDOG = 300  # seconds
SFT = ["train_sft", "--pretrain", "org/model", "--dataset", "org/data"]
RL = ["train_ppo", "--pretrain", "org/model", "--prompt_data", "org/data", "--remote_rm_url", "http://127.0.0.1:5000"]


SIGNAL_IN_CALLBACK = """
import os

class Dying:
    def __del__(self):
        os.kill(os.getpid(), {number})

Dying()
raise AssertionError("the import continued")
"""
INTERRUPT_IN_EXEC = """
from openrlhf.cli.entry import command

@command
def main(argv):
    exec("raise KeyboardInterrupt")

if __name__ == "__main__":
    main()
"""
ABORT_AT_EXIT = """
import atexit, os, sys
from openrlhf.cli.entry import command

@command
def main(argv):
    atexit.register(os.abort)
    print("done", file=sys.stderr)

main()
"""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "OPENRLHF_ASYNC_QUEUE_SIZE", "OPENRLHF_ASYNC_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def run_python(*words, cwd=ROOT, interpreter=(sys.executable,)):
    """Run Python in a folder; modules in that folder take precedence in imports."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*interpreter, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=WATCHDOG, check=False
    )


def openrlhf_cli(*argv):
    return run_python("-m", "openrlhf.cli.main", *argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_module_is_grouped_and_exits_with_0(command):
    done = run_python("-m", f"openrlhf.cli.{command}", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: openrlhf {command} ")
    headings = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "typical use:"
    assert len(headings) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_and_the_console_entry_run_the_same_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == run_python("-m", f"openrlhf.cli.{command}", "--help").stdout


def test_a_launched_process_that_has_done_its_work_does_not_abort_at_exit(monkeypatch):
    """Threads of the process group may abort the interpreter while it ends."""
    monkeypatch.setenv("RANK", "1")
    done = run_python("-c", ABORT_AT_EXIT)
    assert (done.returncode, done.stderr) == (0, "done\n")


def test_without_a_command_all_commands_are_listed_by_group():
    done = openrlhf_cli()
    assert done.returncode == 0
    assert all(f"  {command} " in done.stdout for command in COMMANDS)
    assert {name for names in GROUPS.values() for name in names} == set(SUMMARIES), "each command needs a group"
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert openrlhf_cli("--help").stdout == openrlhf_cli("help").stdout == done.stdout


def test_help_is_also_a_command(capsys):
    for asked, same in (
        (["help", "train_sft"], ["train_sft", "--help"]),
        (["help", "train-ppo", "lora"], ["train_ppo", "--help=lora"]),
    ):
        texts = []
        for argv in (asked, same):
            with pytest.raises(SystemExit) as ended:
                main(argv)
            assert ended.value.code == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != ""


def test_the_console_entry_prints_help_as_a_process():
    done = openrlhf_cli("train-sft", "--help")
    assert done.returncode == 0
    assert "--packing_samples" in done.stdout
    assert "--lora_dropout" not in done.stdout


@pytest.mark.parametrize(
    ("given", "count"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_spin_briefly_unless_told_otherwise(given, count, monkeypatch, capsys):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # restores the environment after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    run("init", prepare("init", ["--task", "sft"]))
    assert capsys.readouterr().out
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_flags_are_parsed_and_checked_without_heavy_imports():
    program = f"""
import sys
from openrlhf.api.start import prepare
from openrlhf.config.commands import COMMANDS
from openrlhf.config.help import help_text
from openrlhf.config.parser import build_parser
for name, command in COMMANDS.items():
    for topic in ("", "all"):
        help_text(command, build_parser(command, name), topic)
prepare({SFT[0]!r}, {SFT[1:]!r})
prepare({RL[0]!r}, {RL[1:]!r})
prepare("train_ppo_ray", {RL[1:]!r} + ["--vllm_num_engines", "8"])
import openrlhf
openrlhf.generate
try:
    openrlhf.train_sft(datset="misspelled")
except ValueError as error:
    assert "Try: --dataset" in str(error)
heavy = {{"torch", "transformers", "datasets", "ray", "vllm", "deepspeed", "wandb", "numpy"}}
print(sorted(heavy & sys.modules.keys()))
"""
    done = run_python("-c", program)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["train_sft"], "--pretrain is not given"),
        ([*SFT, "--zero_stage", "9"], "--zero_stage is 9, but must be 0, 1, 2 or 3"),
        ([*SFT, "--zero_stag3"], "--zero_stag3 is not a flag of this command. Try: --zero_stage"),
        ([*SFT, "--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["train_stf"], "unknown command train_stf. Try: openrlhf train_sft"),
        (["grpo"], "unknown command grpo. Try: openrlhf train_ppo --advantage_estimator group_norm"),
        (["bake"], "unknown command bake. Try: openrlhf --help"),
    ],
)
def test_a_wrong_flag_gives_one_line_and_exit_code_2(argv, complaint):
    done = openrlhf_cli(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("openrlhf: error: ")
    assert complaint in line


def test_only_the_first_process_of_a_launcher_prints(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = openrlhf_cli("train_sft")
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("argv", [["--help"], ["train_ppo_ray", "--help", "all"]], ids=["short", "long"])
def test_a_closed_output_pipe_is_not_an_error(argv, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "openrlhf.cli.main", *argv]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=WATCHDOG, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["int", "term"])
@pytest.mark.parametrize("module", ["argparse", "torch"], ids=["light", "heavy"])
@pytest.mark.parametrize("entry", ["train_sft", "main"])
def test_a_signal_during_an_import_ends_the_command_with_one_line(entry, module, number, tmp_path):
    (tmp_path / f"{module}.py").write_text(SIGNAL_IN_CALLBACK.format(number=int(number)))
    argv = SFT if entry == "main" else SFT[1:]
    done = run_python("-m", f"openrlhf.cli.{entry}", *argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]  # without the batch table
    assert lines == ["openrlhf: batches", "openrlhf: interrupted"][module == "argparse" :]


def test_an_interrupt_in_generated_code_gives_the_same_exit_code(tmp_path):
    (tmp_path / "cut_short.py").write_text(INTERRUPT_IN_EXEC)
    done = run_python("-m", "cut_short", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "openrlhf: interrupted\n")


IGNORE_SIGINT = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from openrlhf.signals import exit_on_signals, interrupt_on_signals
exit_on_signals()
signal.raise_signal(signal.SIGINT)
with interrupt_on_signals():
    signal.raise_signal(signal.SIGINT)
print("still there")
"""


def test_a_signal_that_the_parent_process_ignores_stays_ignored():
    assert run_python("-c", IGNORE_SIGINT).stdout == "still there\n"


def test_importing_the_package_leaves_signal_handlers_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("from openrlhf.cli.train_sft import main")
    (tmp_path / "mine" / "run.py").write_text("import signal; print(signal.getsignal(signal.SIGTERM).name)")
    assert run_python("-m", "mine.run", cwd=tmp_path).stdout == "SIG_DFL\n"


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize(
    ("argv", "numbers"),
    [
        (SFT, ["samples per step", "128", "micro-batches per step", "16"]),
        (RL, ["prompts per rollout", "1,024", "optimizer steps per rollout", "8"]),
    ],
    ids=["train_sft", "train_ppo"],
)
def test_a_dry_run_prints_the_batch_table_and_stops(argv, numbers):
    done = run_python("-m", "openrlhf.cli.main", *argv, "--dry_run", interpreter=warm_python())
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("openrlhf: batches\n")
    assert all(number in done.stderr for number in numbers)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_file_fits_on_a_screen(command):
    assert len((ROOT / "openrlhf" / "cli" / f"{command}.py").read_text().splitlines()) <= 40
