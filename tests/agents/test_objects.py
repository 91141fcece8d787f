"""Reward functions and agents that are Python objects: they run in a thread of this process."""

import asyncio
import random
import threading

import pytest
import torch
from sessions import Scripted, decode, numbered, prompt, run, run_all

from openrlhf.agents.agent_files import agent_of_object
from openrlhf.config.in_memory import held
from openrlhf.errors import ConfigError, RewardError
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


@pytest.fixture
def build_with(build):
    """Build the executor for an object: `build_with(reward=function)` or `build_with(agent=kind)`."""

    def make(reward=None, agent=None, **flags):
        flag = "remote_rm_url" if agent is None else "agent_func_path"
        code = reward if agent is None else agent
        with held(getattr(code, "__name__", "it"), code) as name:  # looked up while the executor is built
            return build(**{flag: name}, **flags)

    return make


def test_a_function_scores_a_group_in_a_thread(build_with):
    threads = set()

    def score(queries, prompts, labels):
        threads.add(threading.current_thread().name)
        return [float(query[-1]) for query in queries]

    got = run(build_with(reward=score), numbered(3)).trajectories
    assert [item.reward for item in got] == [0.0, 1.0, 2.0]
    assert threads == {"openrlhf-user-code"}
    assert "openrlhf-user-code" not in {thread.name for thread in threading.enumerate()}  # it ended


def test_async_calls_overlap(build_with):
    """Every call waits until all have started, so calls one after another would never end."""
    started = []

    async def score(queries, prompts, labels):
        started.append(queries)
        while len(started) < 3:
            await asyncio.sleep(0)
        return [1.0] * len(queries)

    results = run_all(build_with(reward=score), [(prompt(index=number), numbered(2)) for number in range(3)])
    assert [item.reward for result in results for item in result.trajectories] == [1.0] * 6


def test_the_sample_that_fails_is_named_with_the_function_and_the_line(build_with):
    def picky(queries, prompts, labels):
        if any(query.endswith("1") for query in queries):
            raise ValueError("no ones")
        return [1.0] * len(queries)

    line = picky.__code__.co_firstlineno + 2
    result = run(build_with(reward=picky, on_reward_error="skip"), numbered(3))
    (failure,) = result.failures
    assert "reward=picky raised ValueError: no ones at " in str(failure)
    assert f"test_objects.py:{line}, for prompt 7 '1+1=', response '1'" in str(failure)
    assert len(result.trajectories) == 2


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("is_async", [True, False], ids=["waits", "blocks"])
def test_a_function_that_hangs_is_abandoned_and_others_continue(build_with, is_async):
    release = threading.Event()

    async def wait(queries, prompts, labels):
        if any(query.endswith("1") for query in queries):
            await asyncio.Event().wait()
        return [1.0] * len(queries)

    def block(queries, prompts, labels):
        if any(query.endswith("1") for query in queries):
            release.wait()
        return [1.0] * len(queries)

    executor = build_with(reward=wait if is_async else block, reward_timeout=0.3, on_reward_error="skip")
    result = run(executor, numbered(3))
    release.set()
    assert [str(item).split(",")[0] for item in result.failures] == [
        f"reward={'wait' if is_async else 'block'} did not return within 0.3 s (--reward_timeout)"
    ]
    assert len(result.trajectories) == 2


def test_even_an_exit_is_an_error_of_the_sample(build_with):
    def leave(queries, prompts, labels):
        raise SystemExit(3)

    with pytest.raises(RewardError, match=r"reward=leave called sys\.exit\(3\)"):
        run(build_with(reward=leave), numbered(2))


def test_user_code_is_seeded_by_its_sample_and_leaves_pytorchs_generator_alone(build_with):
    def draw(queries, prompts, labels):
        return [random.random() for _ in queries]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    once, again = (run(build_with(reward=draw), numbered(2)).trajectories for _ in range(2))
    assert [item.reward for item in once] == [item.reward for item in again]
    assert torch.equal(torch.get_rng_state(), before)


class Again(AgentInstanceBase):
    async def step(self, states, **kwargs):
        right = states["action_text"] == states["label"]
        return {"rewards": float(right), "environment_feedback": "" if right else "\nNo. Again: ", "done": right}


class Executor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Again)


@pytest.mark.parametrize("agent", [Again, Executor, Executor()], ids=["environment", "executor", "instance"])
def test_an_agent_plays_its_episodes(build_with, agent):
    got = run(build_with(agent=agent, max_turns=2), [Scripted("1", "2"), Scripted("4")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]
    assert decode(got[0].input_ids) == "1+1=1\nNo. Again: 2"


def test_an_agent_function_talks_to_the_policy_through_http(build_with):
    async def ask(base_url, api_key, prompt, label):
        import aiohttp

        body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as answer:
            text = (await answer.json())["choices"][0]["message"]["content"]
        return float(text == label)

    got = run(build_with(agent=ask, context_length=99), [Scripted("2</s>"), Scripted("4</s>")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        (Again(), r"agent=Again is one environment, but each sample needs its own\. Try: pass its class"),
        (type("Empty", (AgentInstanceBase,), {}), "agent=Empty has no method step. Try: async def step"),
        (int, "agent=int does not extend AgentExecutorBase"),
        (3, "agent=int is a int: expected a subclass of AgentInstanceBase"),
    ],
)
def test_unusable_agents_are_explained(agent, complaint):
    with pytest.raises(ConfigError, match=complaint):
        agent_of_object(agent)
