"""The scripts of examples/scripts: their shell, the commands they call, and a few runs at tiny scale."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values
from openrlhf.config.parser import parse
from openrlhf.config.sections.cluster import ROLES
from tests.config.test_snapshots import PRINTED, read
from tests.warm import warm_children

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "examples" / "scripts").glob("*.sh") if path.name != "common.sh")
NOT_TRAINING = ("build_openrlhf", "ckpt_ds_zero_to_universal", "docker_run", "nvidia_docker_install")
PIPELINES = ("train_conditional", "train_iterative_dpo", "train_prm_best_of_n", "train_rejection_sampling")
FAST = ("train_sft", "train_dpo_llama", "train_llama_slurm", "train_ppo_llama")
WATCHDOG = 900  # seconds; they take a tenth of it on two idle cores
RECORDER = '#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" > "$RECORDED"\n'


@pytest.fixture
def called_words(tmp_path):
    """Return a function that runs a script with stand-ins for python3, ray, ... and returns the words of the call."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "deepspeed", "ray", "docker"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)

    def run(script, *flags, **variables):
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "RECORDED": str(tmp_path / "words")}
        command = ["bash", str(ROOT / "examples" / "scripts" / f"{script}.sh"), *flags]
        subprocess.run(command, env=environment | variables, cwd=tmp_path, check=True)
        return (tmp_path / "words").read_text().split("\0")[:-1]

    return run


@pytest.fixture
def parsed_call(called_words, monkeypatch):
    """Return a function that gives the command a script calls and its checked flags, on one node with eight devices."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")

    def run(script, *flags):
        words = called_words(script, *flags)
        place = next(number for number, word in enumerate(words) if word.startswith("openrlhf.cli."))
        command = words[place].removeprefix("openrlhf.cli.")
        return command, flag_values(check(parse(COMMANDS[command], words[place + 1 :], environ={}), lambda line: None))

    return run


def script_names(*, without=()):
    return [path.stem for path in SCRIPTS if not path.stem.startswith(without)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_executable_and_documented(script):
    lines = script.read_text().splitlines()
    assert os.access(script, os.X_OK)
    assert lines[0].startswith("#!")
    assert any(line.startswith("# ") for line in lines)
    assert any(line.startswith(("set -euo pipefail", "source ")) for line in lines)


@pytest.mark.parametrize(
    "script", [name for name in script_names(without=(*NOT_TRAINING, *PIPELINES)) if "slurm" not in name]
)
def test_the_defaults_of_a_script_pass_every_check(script, parsed_call):
    command, flags = parsed_call(script)
    assert command in COMMANDS
    assert flags["param_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("script", "place"),
    [("train_sft", "004 sft"), ("train_rm", "004 rm"), ("train_ppo_ray_hybrid_engine", "004 ppo")],
)
def test_a_script_uses_the_flags_of_the_printed_command(script, place, parsed_call):
    command, flags = parsed_call(script)
    printed_command, printed, _ = PRINTED[place]
    documented = flag_values(check(read(printed_command, printed), lambda line: None))
    own = {"use_wandb", "save_path", "ckpt_path", "run_dir"}
    assert command == printed_command
    assert {name: value for name, value in flags.items() if name not in own} == {
        name: value for name, value in documented.items() if name not in own
    }


@pytest.mark.parametrize("script", ["train_sft_llama", "train_dpo_ring_llama", "train_dapo_ray_hybrid_engine"])
def test_flags_after_the_script_name_override_its_defaults(script, parsed_call):
    assert parsed_call(script, "--train_batch_size", "72")[1]["train_batch_size"] == 72


def test_a_template_may_contain_quotes(called_words):
    words = called_words("train_prm_best_of_n", TEMPLATE="What's {}?\n")
    flags = shlex.split(words[words.index("--generate") + 1])
    assert flags[flags.index("--input_template") + 1] == "What's {}?\n"


def test_the_container_has_no_privileges_and_no_login(called_words, tmp_path):
    """Its Hugging Face cache is that of the account, without the token, unless HF_LOGIN=1 asks for it."""
    cache = tmp_path / ".cache/huggingface"
    words = called_words("docker_run", "nvidia-smi")
    options = words[: words.index("nvcr.io/nvidia/pytorch:25.11-py3")]
    assert not any(word.startswith(("--cap-add", "--privileged", "--ipc", "--pid", "--network")) for word in options)
    assert f"seccomp={ROOT}/dockerfile/seccomp.json" in options
    shared = [words[place + 1].split(":")[0] for place, word in enumerate(options) if word == "--volume"]
    assert shared == [str(ROOT), str(cache / "hub"), str(cache / "datasets")]
    assert words[-1] == "nvidia-smi"
    assert f"{cache}/token:/root/.cache/huggingface/token:ro" in called_words("docker_run", HF_LOGIN="1")


def test_the_image_is_built_on_a_base_that_cannot_move():
    recipe = (ROOT / "dockerfile/Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}\nFROM \$\{BASE\}$", recipe, re.MULTILINE)


def test_the_seccomp_profile_allows_user_namespaces_and_little_else():
    profile = json.loads((ROOT / "dockerfile/seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert allowed >= {
        "unshare",
        "setns",
        "mount",
        "umount2",
        "pivot_root",
        "mount_setattr",
        "clone",
        "seccomp",
        "prctl",
    }
    dangerous = (
        "bpf init_module finit_module kexec_load perf_event_open keyctl add_key userfaultfd io_uring_setup reboot"
    )
    assert not allowed & {*dangerous.split(), "open_by_handle_at", "swapon", "settimeofday", "clock_settime", "iopl"}


def test_with_a_dashboard_address_the_run_is_submitted_as_a_job(called_words, tmp_path):
    words = called_words("train_ppo_ray_hybrid_engine", RAY_ADDRESS="http://127.0.0.1:8265")
    job = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--working-dir", str(tmp_path), "--"]
    assert words[: len(job) + 2] == [*job, "python3", "-m"]


def test_other_ray_addresses_are_passed_to_the_command(called_words):
    assert called_words("train_ppo_ray_hybrid_engine", RAY_ADDRESS="head:6379")[:2] == ["python3", "-m"]


@pytest.mark.parametrize(("script", "shared"), [("train_ppo_llama", True), ("train_ppo_llama_ray", False)])
def test_under_slurm_rl_runs_on_ray(script, shared, called_words, parsed_call, tmp_path):
    """On two nodes, the Ray script receives the flags that use the devices of both."""
    (tmp_path / "train_ppo_ray_slurm.sh").write_text(RECORDER + 'echo "$TRAINING_SCRIPT $LAUNCHER" > called')
    slurm = {"SLURM_NNODES": "2", "TRAINING_SCRIPT": f"{script}.sh", "SCRIPTS": str(tmp_path)}
    words = called_words("train_llama_slurm", "--train_batch_size", "64", **slurm)
    assert (tmp_path / "called").read_text() == f"{script}.sh python3 -m\n"
    assert words[0] == "train_ppo_ray_slurm.sh"
    flags = parsed_call(script, *words[1:])[1]
    assert (flags["train_batch_size"], flags["colocate_all_models"]) == (64, shared)
    if shared:
        assert flags["runtime"] == "ray"
        assert {flags[f"{role}_num_nodes"] for role in ROLES} == {2}
        assert {flags[f"{role}_num_gpus_per_node"] for role in ROLES} == {8}


@pytest.mark.slow(seconds=100)
def test_some_scripts_run_at_tiny_scale(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_examples.py"), "--folder", str(tmp_path), *FAST],
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
        env=os.environ | warm_children(),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_listed_in_run_examples(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from run_examples import EXAMPLES, ONLY_READ

    jobs = {
        example.name for example in EXAMPLES if example.name.startswith("ray_job_submit")
    }  # these run other scripts
    assert {example.name for example in EXAMPLES} - jobs | set(ONLY_READ) == set(script_names())
