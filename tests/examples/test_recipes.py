"""Every recipe parses, passes the checks, says what it needs, and runs at tiny scale with smaller sizes.

Two of them run in `make test`; the others are marked `nightly`.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from openrlhf.cli.main import main
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse_given
from tests.commands import ROOT, as_argv
from tests.rl.toy_task import REWARD
from tests.toy_data import write_rows

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
QUICK = ("sft_16gb_qlora", "grpo_24gb_lora")  # the others take the same paths, or longer
TRIED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES]
TINY = {"train_batch_size": 4, "micro_train_batch_size": 2, "max_samples": 8, "max_epochs": 1, "max_len": 128}
TINY_RL = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "max_new_tokens": 4,
    "max_steps": 1,
    "runtime": "local",
    "vllm_tensor_parallel_size": 1,
    "actor_num_gpus_per_node": 1,
    "vllm_num_engines": 0,
    **dict.fromkeys(("colocate_all_models", "vllm_enable_sleep", "deepspeed_enable_sleep", "enforce_eager"), "false"),
}
USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", "ab"), ("assistant", "cd")))
OTHER = {"role": "assistant", "content": "zz"}


def command_of(name):
    """Return the words of the command in a recipe's header, without the program's name."""
    (line,) = re.findall(r"^# Command:  openrlhf (.*)$", (ROOT / "recipes" / f"{name}.yaml").read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Change to a folder with the files that recipes name, as in the root of the repository."""
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_page_run_recipes():
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "recipes" / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines():
        program, command, flag, file, *_ = shlex.split(line, comments=True)
        assert (program, flag) == ("openrlhf", "--config")
        assert command_of(Path(file).stem)[0] == command


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_checks(name, repository, capsys):
    (repository / "runs" / "rm").mkdir(parents=True)
    (repository / "runs" / "rm" / "config.json").write_text("{}")  # what rm_80gb_full saves
    command, *argv = command_of(name)
    assert argv == ["--config", f"recipes/{name}.yaml"]
    parsed, given = parse_given(COMMANDS[command], argv, environ={})
    check(parsed, given=given)
    assert "has no effect" not in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_a_header_says_what_the_recipe_needs_and_the_index_agrees(name):
    header = (ROOT / "recipes" / f"{name}.yaml").read_text().partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") and len(line) <= 120 for line in header)
    memory = next(line for line in header if line.startswith("# Memory:"))
    assert "estimated" in memory or "measured" in memory
    (row,) = [line for line in (ROOT / "recipes" / "README.md").read_text().splitlines() if f"({name}.yaml)" in line]
    assert f"`{command_of(name)[0]}`" in row
    assert re.search(r"\d+ Gi?B", row.split("|")[5])[0].split()[0] in memory


def test_the_index_names_every_recipe():
    listed = re.findall(r"\((\w+)\.yaml\)", (ROOT / "recipes" / "README.md").read_text())
    assert sorted(listed) == RECIPES


def toy_rows(values):
    """Return rows with the fields that a recipe names."""
    if "prompt_data" in values:
        prompts = [[USER], "ab"][values["input_key"] == "question"]
        return [{values["input_key"]: prompts, values.get("label_key", "label"): "x"}] * 8
    if "input_key" in values:
        return [{values["input_key"]: [USER, ASSISTANT]}] * 8
    return [{"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}] * 8


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", TRIED)
def test_a_recipe_runs_at_tiny_scale(name, repository, models):
    command, *argv = command_of(name)
    values = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    data = "prompt_data" if "prompt_data" in values else "dataset"
    rows = write_rows(repository / "rows.jsonl", toy_rows(values))
    smaller = {**TINY, "pretrain": models(), data: rows, "save_path": "./out", "ckpt_path": "./ckpt"}
    if data == "prompt_data":
        smaller |= TINY_RL | {"max_len": 256}
    if "remote_rm_url" in values:
        (repository / "reward.py").write_text(REWARD)
        smaller["remote_rm_url"] = "./reward.py"
    if "reward_pretrain" in values:
        pairs = write_rows(repository / "pairs.jsonl", toy_rows({}))
        shape = as_argv({**TINY, "pretrain": models(), "dataset": pairs, "save_path": "./rm", "ckpt_path": "./rm_ckpt"})
        main([*command_of("rm_80gb_full"), *shape])
        smaller["reward_pretrain"] = "./rm"
    main([command, *argv, *as_argv(smaller)])
    saved = {path.name for path in Path("out").iterdir()}
    assert saved & {"model.safetensors", "adapter_model.safetensors"}
