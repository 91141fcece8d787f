"""`openrlhf plan COMMAND`: the flags of the command, a plan on stdout, and only config.json is read."""

import json
import re

import pytest
from transformers import LlamaConfig

from openrlhf.cli.main import main
from openrlhf.config.flags import flags_of
from openrlhf.config.plan import PLANNED, PlanFlags
from openrlhf.config.wrapper import with_section
from tests.commands import as_argv
from tools.write_reference import DOCS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model folder with a config and nothing else."""
    path = tmp_path_factory.mktemp("hollow")
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    LlamaConfig(**shape).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("command", PLANNED)
def test_each_command_has_a_plan(command, folder, tmp_path, capsys):
    more = {"teacher_model": folder} if command == "train_kd" else {}
    more |= {"vllm_num_engines": 8, "critic_pretrain": folder} if command == "train_ppo_ray" else {}
    main(["plan", command, *as_argv({"pretrain": folder, "gpus": "8xH100", "nodes": 8} | more)])
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{command} on 8 nodes of 8 x H100, 79.1 GiB each\n")
    models = ": policy" if command == "train_ppo_ray" else " "
    gpus = "GiB on the GPU " if command == "train_ppo" else f"GPUs{models}"
    for text in (gpus, f"GiB of host memory on a node{models}", "seconds of a step", "The run fits: "):
        assert text in captured.out
    assert list(tmp_path.iterdir()) == []


def test_programs_can_read_a_plan_as_json(folder, capsys):
    main(["plan", "train_sft", "--pretrain", folder, "--gpus", "H200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] == "fits"
    phases = {phase["phase"]: phase for phase in found["groups"][0]["phases"]}
    assert {term["kind"] for term in phases["training"]["device"]} >= {"weights", "optimizer states", "activations"}


def test_a_run_that_does_not_fit_fails_with_flags(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "train_sft", "--pretrain", folder, "--gpus", "T4", "--max_len", "32768"])
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert "what to change, by effect" in captured.out
    assert re.search("error: the run (does not|cannot) fit on 1 x T4. Try: --", captured.err)


def test_without_gpus_the_plan_is_for_this_machine(folder, capsys):
    main(["plan", "train_sft", "--pretrain", folder, "--max_len", "128", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("train_sft on the CPU\n")


def test_flags_can_come_from_a_file(folder, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(f"pretrain: {folder}\ndataset: ./missing.jsonl\ngpus: 2xL40S\n")
    main(["plan", "train_sft", "--config", str(tmp_path / "run.yaml")])
    assert capsys.readouterr().out.startswith("train_sft on 2 x L40S")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["serve_rm"], "plan: expected a training command, got serve_rm. Try: train_sft or"),
        (["sft"], "plan: expected a training command, got sft. Try: openrlhf plan train_sft"),
        (["train_sft", "--gpus", "H100"], "--pretrain is not given"),
        (
            ["train_sft", "--pretrain", "org/model", "--gpsu", "H100"],
            "--gpsu is not a flag of this command. Try: --gpus",
        ),
        (["train_sft", "--pretrain", "org/model", "--nodes", "0"], "--nodes is 0, but must be above 0"),
    ],
)
def test_mistakes_are_reported_in_one_line(argv, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *argv])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_lists_the_commands_and_the_flags_of_both(capsys):
    main(["plan", "--help"])
    usage = capsys.readouterr().out
    assert all(command in usage for command in PLANNED)
    with pytest.raises(SystemExit):
        main(["plan", "train_sft", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: openrlhf plan train_sft ")
    assert "--gpus" in text
    main(["--help"])
    assert "  plan  " in capsys.readouterr().out


@pytest.mark.parametrize("command", PLANNED)
def test_a_plan_has_all_flags_of_the_command(command):
    assert flags_of(PLANNED[command]).keys() < flags_of(with_section(PLANNED[command], PlanFlags, "")).keys()


def test_the_guide_shows_what_its_command_prints(tmp_path, monkeypatch, capsys):
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    settings = re.search(r"<< 'JSON'\n(.*?)\nJSON\n", page, re.DOTALL)[1]
    (tmp_path / "config.json").write_text(settings)
    monkeypatch.chdir(tmp_path)
    words = re.search(r"^openrlhf (plan train_sft .*)$", page, re.MULTILINE)[1].split()
    main(words)
    assert re.search(r"```text\n(.*?)```", page, re.DOTALL)[1] in capsys.readouterr().out
