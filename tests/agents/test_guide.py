"""The files in docs/agents.md, each used as in a run."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sessions import Scripted, decode, prompt, run

from openrlhf.errors import ConfigError

pytestmark = pytest.mark.slow(seconds=2)
ROOT = Path(__file__).parents[2]
GAME = "game:GuessTheNumber-v0-easy"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL))


@pytest.fixture
def file(write):
    return lambda name: write(FILES[name], name)


def test_guide_has_a_file_for_every_kind():
    assert set(FILES) == {
        *("reward.py", "server.py", "environment.py", "steps.py", "client.py", "game.py", "gym.py"),
        *("program_reward.py", "judge.py", "compaction.py", "openenv_agent.py"),
    }


def test_reward_function(build, file):
    got = run(build(remote_rm_url=file("reward.py")), [Scripted("it is 2"), Scripted("3")]).trajectories
    assert [(item.reward, item.extra_logs) for item in got] == [(1.0, {"length": 7.0}), (0.0, {"length": 1.0})]


class YesToTwo(BaseHTTPRequestHandler):
    """A judge with OpenAI's protocol who says yes if the answer is 2."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        verdict = "Yes." if "Answer: 2" in asked else "No."
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": verdict}}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        """Print nothing."""


def test_judge(build, file, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), YesToTwo) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        got = run(build(remote_rm_url=file("judge.py"), reward_timeout=200.0), [Scripted("2"), Scripted("3")])
        server.shutdown()
    assert [item.reward for item in got.trajectories] == [1.0, 0.0]


def test_text_of_a_finished_response_ends_with_eos(build, write):
    """The guide says so, and that a response that was cut off does not."""
    judge = "def reward_func(queries, prompts, labels):\n    return [query.endswith('</s>') for query in queries]"
    got = run(build(remote_rm_url=write(judge)), [Scripted("2</s>"), Scripted("2")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]


def test_states_of_an_environment(build, write):
    """`reset` and `step` receive the keys in the guide's table."""
    agent = """
from openrlhf.errors import ConfigError
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Checks(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        assert set(states) == {"observation", "label"}
        return {"observation": states["observation"] + "?"}

    async def step(self, states, **kwargs):
        assert set(states) == {"observation_text", "action_text", "label", "sampling_params"}
        assert states["observation_text"] == "1+1=?"
        return {"rewards": float(states["action_text"].endswith("</s>")), "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Checks)
"""
    got = run(build(agent_func_path=write(agent)), [Scripted("2</s>"), Scripted("2")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]


def test_program_reward(build, file, monkeypatch):
    """The opt-in only matters on machines that cannot isolate programs."""
    monkeypatch.setenv("OPENRLHF_UNISOLATED_PROGRAMS", "1")
    answers = ["print(sum(map(int, input().split())))", "print(8)", "exit("]
    executor = build(remote_rm_url=file("program_reward.py"), context_length=99)
    got = run(executor, [Scripted(answer) for answer in answers], asked=prompt(label="7"), max_tokens=60).trajectories
    assert [item.reward for item in got] == [1.0, 0.0, 0.0]


def test_reward_server(build, file):
    from fastapi.testclient import TestClient

    space = {}
    exec(FILES["server.py"], space)
    body = {"query": ["1+1=2", "1+1=3"], "prompts": ["1+1="] * 2, "labels": ["2"] * 2}
    assert TestClient(space["app"]).post("/get_reward", json=body).json() == {"rewards": [1.0, 0.0]}


@pytest.mark.parametrize("name", ["environment.py", "steps.py"])
def test_environment(build, file, name):
    got = run(build(agent_func_path=file(name)), [Scripted("1", "2"), Scripted("4")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]
    assert decode(got[0].input_ids) == "1+1=1\nNo. Again: 2"


def test_episode_with_several_trajectories(build, file):
    sessions = [Scripted("one plus one", "2"), Scripted("?", "3")]
    got = run(build(agent_func_path=file("compaction.py"), context_length=99), sessions).trajectories
    assert [decode(item.input_ids) for item in got] == [
        *("1+1= Take notes: one plus one", "1+1= Your notes: one plus one The answer: 2"),
        *("1+1= Take notes: ?", "1+1= Your notes: ? The answer: 3"),
    ]
    assert [(item.episode, item.reward) for item in got] == [(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0)]


def test_openai_client(build, file):
    got = run(build(agent_func_path=file("client.py"), context_length=99), [Scripted("1</s>", "2</s>"), Scripted("4")])
    assert [item.reward for item in got.trajectories] == [1.0, 0.0]
    assert decode(got.trajectories[0].input_ids) == "<u>1+1=<a>1</s><u>No. Again.<a>2</s>"


def test_openai_tools_example(build):
    call = '<tool_call>{"name": "calculate", "arguments": {"left": 6, "sign": "*", "right": 7}}</tool_call>'
    executor = build(agent_func_path=str(ROOT / "examples/agents/openai_tools.py"), context_length=400)
    asked = prompt("6*7?", label="so #### 42")
    used, silent = run(executor, [Scripted(call, "42"), Scripted("41")], asked=asked, max_tokens=100).trajectories
    assert [(item.reward, item.extra_logs) for item in (used, silent)] == [
        (1.0, {"tool_calls": 1.0}),
        (0.0, {"tool_calls": 0.0}),
    ]
    assert "<t>42<a>42" in decode(used.input_ids)


def test_gem_game(build, file):
    got = run(build(agent_func_path=file("game.py"), context_length=2000), [Scripted("x")], asked=prompt(GAME, label=3))
    assert got.trajectories[0].reward == pytest.approx(-0.1)  # no guess in a box


def test_unreachable_openenv_server_is_reported(build, write):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/schema cannot be read"):
        build(agent_func_path=write(FILES["openenv_agent.py"].replace("8000", "9")))


def test_unreachable_nemo_gym_server_is_reported(build, write):
    row = '{"responses_create_params": {"input": "hi"}}'
    away = FILES["gym.py"].replace("8000", "9")
    executor = build(agent_func_path=write(away), on_reward_error="skip")
    assert "/seed_session" in str(run(executor, [Scripted("x")], asked=prompt("0", label=row)).failures[0])
