import asyncio
import os

import pytest

from openrlhf.agents.agent_files import find_agent
from openrlhf.agents.loading import adapt_reward, create_instance, find_reward, load_module
from openrlhf.errors import ConfigError


@pytest.mark.parametrize(
    ("signature", "seen"),
    [
        ("queries, prompts", ("q", "p")),
        ("queries, prompts, labels", ("q", "p", "l")),
        ("queries, prompts, labels, **kwargs", ("q", "p", "l", "kwargs")),
        ("queries, prompts, labels=None", ("q", "p", "l")),
        ("queries, prompts, *, labels", ("q", "p", "l")),
        ("queries, prompts, **labels", ("q", "p", "kw")),
        ("*queries", ("all",)),
    ],
)
def test_reward_function_gets_the_arguments_it_names(signature, seen):
    space = {}
    exec(f"def reward_func({signature}): return locals()", space)
    got = adapt_reward(space["reward_func"], "x.py")(["q"], ["p"], ["l"])
    expected = {
        "q": {"queries": ["q"]},
        "p": {"prompts": ["p"]},
        "l": {"labels": ["l"]},
        "kwargs": {"kwargs": {}},
        "kw": {"labels": {"labels": ["l"]}},
        "all": {"queries": (["q"], ["p"], ["l"])},
    }
    assert got == {name: value for key in seen for name, value in expected[key].items()}


@pytest.mark.parametrize("signature", ["queries", "a, b, c, d", ""])
def test_reward_function_with_another_signature_is_rejected(signature):
    space = {}
    exec(f"def reward_func({signature}): return 1", space)
    with pytest.raises(ConfigError, match=r"cannot be called with \(queries, prompts, labels\)"):
        adapt_reward(space["reward_func"], "x.py")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "def reward_func(prompts, completions, **kwargs):\n    return [float(len(text)) for text in completions]",
            "reward_func in {file} takes (prompts, completions, **kwargs), like a reward of TRL: expected (queries,",
        ),
        (
            "def long(completions, answer, scale=2.0, **kwargs):\n    return [len(a) * scale - 1 for a in answer]",
            "long in {file} takes (completions, answer, scale=2.0, **kwargs), like a reward of TRL",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth):\n    return len(solution_str)",
            "compute_score in {file} takes (data_source, solution_str, ground_truth), like a reward of verl",
        ),
    ],
    ids=["trl", "trl_column", "verl"],
)
def test_a_reward_of_another_framework_is_explained_with_a_wrapper_that_works(write, source, complaint):
    file = write(source)
    with pytest.raises(ConfigError) as error:
        find_reward(load_module(file), file)
    assert complaint.format(file=file) in str(error.value)
    what, _, wrapper = str(error.value.try_this).partition("\n")
    if what != "add":
        assert what == "call it trl_reward, and add"
        source = source.replace("reward_func", "trl_reward")
    mended = write(f"{source}\n\n\n{wrapper}\n", "mended.py")
    score = find_reward(load_module(mended), mended)
    assert score(["1+1=two"], ["1+1="], ["xx"]) == [3.0]


@pytest.mark.parametrize("signature", ["queries, prompts, labels, completions=None", "completions, prompts, labels"])
def test_a_reward_with_our_arguments_may_call_one_of_them_completions(signature):
    space = {}
    exec(f"def reward_func({signature}): return 1.0", space)
    assert adapt_reward(space["reward_func"], "x.py")(["q"], ["p"], ["l"]) == 1.0


def test_file_without_the_required_function_lists_what_it_defines(write):
    file = write("import os\ndef score(): ...\nclass Agent: ...")
    with pytest.raises(ConfigError, match=r"no function reward_func; it defines score, Agent\. Try: def reward_func"):
        find_reward(load_module(file), file)
    with pytest.raises(ConfigError, match="nor a function run_agent or step; it defines score, Agent"):
        find_agent(load_module(file), file)


def test_executor_with_another_base_class_is_rejected(write):
    file = write("class AgentExecutor: ...")
    with pytest.raises(ConfigError, match="does not extend AgentExecutorBase"):
        find_agent(load_module(file), file)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("OpenAIAgentExecutor", "no method run_agent. Try: def run_agent(self, base_url, api_key, prompt, label): ..."),
        ("AgentExecutorBase", "no method execute. Try: async def execute(self, prompt, label, sampling_params"),
    ],
)
def test_missing_method_is_reported_with_its_signature(write, base, message):
    file = write(f"from openrlhf.utils.agent import {base}\nclass AgentExecutor({base}): ...")
    with pytest.raises(ConfigError) as error:
        find_agent(load_module(file), file)
    assert message in str(error.value)


def test_file_is_executed_at_each_load_and_can_import_from_its_folder(write):
    write("VALUE = 5", "neighbour_of_user.py")
    file = write("import neighbour_of_user\nseen = [neighbour_of_user.VALUE]")
    first = load_module(file)
    first.seen.append(6)
    assert load_module(file).seen == [5]


def test_a_file_that_changes_within_a_second_is_compiled_again(write, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for value in range(3):
        file = write(f"VALUE = {value}")
        os.utime(file, (1, 1))
        assert value == load_module(file).VALUE


def test_async_init_is_awaited():
    class Slow:
        async def __init__(self):
            await asyncio.sleep(0)
            self.made = True

    class Plain:
        def __init__(self):
            self.made = True

    assert asyncio.run(create_instance(Slow)).made
    assert asyncio.run(create_instance(Plain)).made
