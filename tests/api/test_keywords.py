"""The keywords of the Python functions are the flags of their commands, and mistakes get the commands' answers."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest

import openrlhf
from openrlhf.api import keywords
from openrlhf.api.arguments import as_arguments
from openrlhf.config.checks.paths import DATA_FLAGS
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError, OpenRLHFError

KEYWORDS = {
    "train_sft": keywords.SFTKeywords,
    "train_rm": keywords.RMKeywords,
    "train_dpo": keywords.DPOKeywords,
    "train_kto": keywords.KTOKeywords,
    "train_kd": keywords.KDKeywords,
    "train_prm": keywords.PRMKeywords,
    "train_ppo": keywords.RLKeywords,
}


@pytest.mark.parametrize("command", KEYWORDS)
def test_keywords_are_the_flags_and_a_few_of_their_own(command):
    flags = flags_of(COMMANDS[command]).keys()
    own = {"config", "on_step"} | ({"reward", "agent"} if command == "train_ppo" else set())
    assert {item.name for item in fields(KEYWORDS[command])} == flags | own
    shown = inspect.signature(getattr(openrlhf, command)).parameters
    assert shown.keys() == flags | own
    assert all(shown[name].default == flags_of(COMMANDS[command])[name].default for name in flags)


def test_every_export_can_be_imported_and_is_listed():
    assert {"train_ppo", "generate", "StopTraining"} <= set(openrlhf.__all__) <= set(dir(openrlhf))
    assert all(getattr(openrlhf, name).__doc__ for name in openrlhf.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'train_gpt'"):
        _ = openrlhf.train_gpt


def test_importing_the_package_imports_nothing_else():
    program = "import sys, openrlhf; print([name for name in sys.modules if name.startswith('openrlhf.')])"
    root = Path(openrlhf.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", program], cwd=root, text=True) == "[]\n"


def parsed(**given):
    with as_arguments("train_ppo", given) as argv:
        return parse(COMMANDS["train_ppo"], argv, environ={})


def test_values_of_all_kinds_arrive_as_on_a_command_line(tmp_path):
    (tmp_path / "flags.yaml").write_text("seed: 7\nmax_epochs: 3\n")
    config = parsed(
        pretrain=Path("a/b"),
        prompt_data=["x.jsonl", Path("y.jsonl")],
        adam_betas=(0.5, 0.6),
        actor_learning_rate=1e-7,
        packing_samples=True,
        muon_nesterov=False,
        max_steps=None,
        chat_template_kwargs={"thinking": False},
        config=tmp_path / "flags.yaml",
        max_epochs=2,
    )
    assert (config.model.pretrain, config.prompts.prompt_data) == ("a/b", "x.jsonl,y.jsonl")
    assert (config.optimizer.adam_betas, config.optimizer.actor_learning_rate) == ((0.5, 0.6), 1e-7)
    assert (config.batches.packing_samples, config.optimizer.muon_nesterov) == (True, False)
    assert config.template.template_kwargs == {"thinking": False}
    assert (config.batches.seed, config.batches.max_epochs, config.batches.max_steps) == (7, 2, None)


@pytest.mark.parametrize("flag", DATA_FLAGS)
def test_rows_are_named_by_their_number_and_content(flag):
    command = "train_ppo" if flag == "prompt_data" else "train_sft"

    def name(rows):
        with as_arguments(command, {flag: rows}) as (word,):
            return word.partition("=")[2]

    rows = [{"input": "a"}, {"input": "b"}]
    assert name(rows) == name(list(rows)) != name(rows[::-1])
    assert name(rows).startswith("in memory (2 rows; ")
    assert name(datasets.Dataset.from_list(rows)).startswith("in memory (2 rows; ")
    assert name({"train": datasets.Dataset.from_list(rows[:1])}).startswith("in memory (train: 1 row; ")


def test_functions_are_named_and_two_of_the_same_name_stay_apart():
    def score(queries, prompts, labels): ...

    other = type("score", (), {})
    with as_arguments("train_ppo", {"reward": score, "agent": other}) as argv:
        assert argv == ["--remote_rm_url=in memory (score)", "--agent_func_path=in memory (score #2)"]
    with as_arguments("train_ppo", {"reward": "http://host/r"}) as argv:
        assert argv == ["--remote_rm_url=http://host/r"]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"learning_rat": 1.0}, r"--learning_rat is not a flag of this command\. Try: --learning_rate"),
        ({"zero_stage": 9}, "--zero_stage is 9, but must be 0, 1, 2 or 3"),
        ({"zero_stage": "two"}, "--zero_stage: invalid int value: 'two'"),
        ({}, "--pretrain is not given"),
        (
            {"dataset": {"input": ["a"], "output": ["b"]}},
            r"is a dict: expected .*Try: dataset=datasets.Dataset.from_dict",
        ),
        ({"dataset": {"a": 1}}, "dataset= is a dict: expected"),
        ({"dataset": {}}, "dataset= is a dict: expected"),
        ({"dataset": iter([])}, r"dataset= is a list_iterator: expected .* Try: dataset=list\(rows\)"),
        ({"reward": len}, "--reward is not a flag of this command"),
        ({"dataset": "in memory (3 rows; abc)"}, "exists only in the Python program that passed it"),
    ],
)
def test_mistakes_raise_the_errors_of_the_command(given, complaint, models):
    model = {} if not given else {"pretrain": models()}
    with pytest.raises(ConfigError, match=complaint) as raised:
        openrlhf.train_sft(**model | {"dataset": [{"input": "a", "output": "b"}], "output_key": "output"} | given)
    assert isinstance(raised.value, OpenRLHFError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"reward": 3}, "reward= is a int: expected a function"),
        ({"reward": lambda queries: 1}, r"reward=<lambda> takes \(queries\), so it cannot be called"),
        ({"reward": len, "remote_rm_url": "r.py"}, "reward= and remote_rm_url= are two values for the same flag"),
        ({"agent": object}, "agent=object does not extend AgentExecutorBase"),
        ({"agent": object()}, "agent=object is a object: expected a subclass of AgentInstanceBase"),
    ],
)
def test_code_that_cannot_be_used_is_rejected_before_models_load(given, complaint, models):
    with pytest.raises(ConfigError, match=complaint):
        openrlhf.train_ppo(
            pretrain=models(), prompt_data=[{"input": "a"}], prompt_max_len=8, generate_max_len=4, **given
        )
