"""The YAML files of `openrlhf init` parse, pass the checks, and fit the rows that they describe."""

import json
import shlex
from typing import get_args

import pytest
import yaml

from openrlhf.cli.main import main
from openrlhf.cli.starter.files import scalar
from openrlhf.cli.starter.tasks import TASKS
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS, InitConfig
from openrlhf.config.flags import flag_values, flags_of, typical_use
from openrlhf.config.parser import parse_given
from openrlhf.config.sections.setup import Task
from tests.commands import as_argv

RESULTS = ("./runs/rm",)  # models that another task trains


def fails(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code, capsys.readouterr().err


def make_inputs(folder, starter):
    """Write the files that a task reads: its dataset, with the row of its header, and its reward model."""
    for name in ("dataset", "prompt_data"):
        if name in starter.values:
            (folder / starter.values[name]).write_text(f"{starter.rows}\n" * 8)
    for result in RESULTS:
        (folder / result).mkdir(parents=True, exist_ok=True)
        (folder / result / "config.json").write_text("{}")


def run_starter(task, folder, models, **flags):
    """Run the command of a task with its files, on the tiny model."""
    main(["init", task, "--output", "run.yaml"])
    starter = TASKS[task]
    make_inputs(folder, starter)
    named = {name: models() for name in ("pretrain", "teacher_model", "reward_pretrain") if name in starter.values}
    main([starter.command, "--config", "run.yaml", *as_argv(named | flags)])


@pytest.mark.parametrize("task", get_args(Task))
def test_the_file_of_a_task_passes_the_checks_and_sets_its_values(task, tmp_path, capsys):
    main(["init", task, "--output", "run.yaml"])
    starter = TASKS[task]
    make_inputs(tmp_path, starter)
    text = (tmp_path / "run.yaml").read_text()
    config = COMMANDS[starter.command]
    capsys.readouterr()
    parsed, given = parse_given(config, ["--config", "run.yaml"], environ={})
    values = flag_values(check(parsed, given=given))
    assert "has no effect" not in capsys.readouterr().err
    assert {name: values[name] for name in starter.values} == dict(starter.values)
    assert given == starter.values.keys()
    assert f"openrlhf {starter.command} --config run.yaml" in text
    assert json.loads(starter.rows)
    assert starter.rows in text
    for name, item in flags_of(config).items():
        if (item.essential or item.required) and name != "dry_run":
            assert f"\n{name}: " in text or f"\n#{name}:" in text, name
            assert item.help.split()[0] in text


@pytest.mark.parametrize("task", get_args(Task))
def test_uncommenting_the_defaults_changes_nothing(task, tmp_path):
    main(["init", task, "--output", "run.yaml"])
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    active = [line.removeprefix("#") if line.startswith("#") and line[1:2].isalpha() else line for line in lines]
    (tmp_path / "all.yaml").write_text("\n".join(active))
    config = COMMANDS[TASKS[task].command]
    short, whole = (parse_given(config, ["--config", name], environ={})[0] for name in ("run.yaml", "all.yaml"))
    assert short == whole


@pytest.mark.parametrize("task", get_args(Task))
def test_the_row_in_the_header_fits_the_flags(task, tmp_path, models, capsys):
    run_starter(task, tmp_path, models, dry_run=True)
    assert "dry run: nothing was trained or written" in capsys.readouterr().err


def test_a_starter_trains_with_smaller_sizes(tmp_path, models):
    sizes = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8, "max_new_tokens": 4}
    run_starter("grpo", tmp_path, models, **sizes, max_steps=1)
    assert (tmp_path / "runs" / "grpo" / "model.safetensors").exists()


def test_every_task_is_a_choice():
    assert tuple(TASKS) == get_args(Task)


def test_without_an_output_the_file_goes_to_stdout_and_the_rest_to_stderr(capsys):
    main(["init", "grpo"])
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["advantage_estimator"] == "group_norm"
    assert printed.err == (
        "openrlhf: you write ./reward.py; openrlhf init grpo --output run.yaml writes one to start from\n"
    )


@pytest.mark.parametrize(
    ("task", "file", "flag"), [("grpo", "reward.py", "remote_rm_url"), ("agent", "agent.py", "agent_func_path")]
)
def test_a_code_file_is_written_next_to_the_yaml_file(task, file, flag, tmp_path, capsys):
    main(["init", task, "--output", "settings/run.yaml"])
    assert yaml.safe_load((tmp_path / "settings" / "run.yaml").read_text())[flag] == f"./settings/{file}"
    compile((tmp_path / "settings" / file).read_text(), file, "exec")
    assert f"wrote settings/{file}\n" in capsys.readouterr().err


def test_files_are_replaced_only_on_request(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("mine")
    code, said = fails(["init", "grpo", "--output", "run.yaml"], capsys)
    assert (code, (tmp_path / "reward.py").read_text()) == (2, "mine")
    assert "reward.py would be overwritten. Try: --overwrite, or --output in another folder" in said
    assert not (tmp_path / "run.yaml").exists()
    main(["init", "grpo", "--output", "run.yaml", "--overwrite"])
    assert "wrote run.yaml\nopenrlhf: replaced reward.py" in capsys.readouterr().err


def test_a_task_is_needed_and_a_wrong_one_lists_the_choices(capsys):
    assert fails(["init"], capsys) == (
        2,
        "openrlhf: error: --task is not given, but this command needs it: one of sft, rm, dpo, kto, kd, prm, ppo, grpo,"
        " reinforce, rloo, agent. Try: --task grpo\n",
    )
    code, said = fails(["init", "gpro"], capsys)
    assert code == 2
    assert all(task in said for task in get_args(Task))


def test_the_task_may_come_last(tmp_path, capsys):
    main(["init", "--output", str(tmp_path / "a.yaml"), "sft"])
    assert "train_sft" in (tmp_path / "a.yaml").read_text()


@pytest.mark.parametrize("output", [".", "reward.py", "/proc/no/run.yaml"])
def test_an_output_that_cannot_be_a_file_is_rejected(output, capsys):
    code, said = fails(["init", "grpo", "--output", output, "--overwrite"], capsys)
    assert code == 2
    assert "Try: " in said


def test_the_typical_command_line_of_init_runs(tmp_path, capsys):
    main(shlex.split(typical_use(InitConfig, "openrlhf init"))[1:])
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "reward.py"}


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "./a/b.jsonl",
        "org/model@v1",
        "User: {}\nAssistant: ",
        "",
        "1e5",
        "yes",
        "null",
        "#",
        "ки",
        "a: b",
        1e-6,
        0.5,
        3,
        True,
        ("+", "-"),
    ],
)
def test_values_survive_yaml(value):
    read = yaml.safe_load(f"name: {scalar(value)}")["name"]
    assert read == (list(value) if isinstance(value, tuple) else value) or float(read) == value
