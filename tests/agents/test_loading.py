import asyncio

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
def test_every_generation_of_the_contract_is_called_as_it_is_written(signature, seen):
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
def test_a_function_that_cannot_take_the_arguments_is_refused(signature):
    space = {}
    exec(f"def reward_func({signature}): return 1", space)
    with pytest.raises(ConfigError, match=r"cannot be called with \(queries, prompts, labels\)"):
        adapt_reward(space["reward_func"], "x.py")


def test_a_file_without_what_is_wanted_says_what_it_has(write):
    file = write("import os\ndef score(): ...\nclass Agent: ...")
    with pytest.raises(ConfigError, match=r"no function reward_func; it defines score, Agent\. Try: def reward_func"):
        find_reward(load_module(file), file)
    with pytest.raises(ConfigError, match="nor function run_agent or step; it defines score, Agent"):
        find_agent(load_module(file), file)


def test_an_executor_of_another_family_is_refused(write):
    file = write("class AgentExecutor: ...")
    with pytest.raises(ConfigError, match="does not extend AgentExecutorBase"):
        find_agent(load_module(file), file)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("OpenAIAgentExecutor", "no method run_agent. Try: def run_agent(self, base_url, api_key, prompt, label): ..."),
        ("AgentExecutorBase", "no method execute. Try: async def execute(self, prompt, label, sampling_params"),
    ],
)
def test_an_executor_without_its_method_is_told_what_to_write(write, base, said):
    file = write(f"from openrlhf.utils.agent import {base}\nclass AgentExecutor({base}): ...")
    with pytest.raises(ConfigError) as error:
        find_agent(load_module(file), file)
    assert said in str(error.value)


def test_a_file_is_run_anew_each_time_and_sees_its_neighbours(write):
    write("VALUE = 5", "neighbour_of_user.py")
    file = write("import neighbour_of_user\nseen = [neighbour_of_user.VALUE]")
    first = load_module(file)
    first.seen.append(6)
    assert load_module(file).seen == [5]


def test_an_async_init_is_awaited():
    class Slow:
        async def __init__(self):
            await asyncio.sleep(0)
            self.made = True

    class Plain:
        def __init__(self):
            self.made = True

    assert asyncio.run(create_instance(Slow)).made
    assert asyncio.run(create_instance(Plain)).made
