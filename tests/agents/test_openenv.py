"""An environment server of the real package openenv, in a separate process: exact tokens, rewards and training."""

import asyncio
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from sessions import Scripted, decode, encode, prompt, run, served

from openrlhf.agents.chat.openenv import read_arguments
from openrlhf.errors import ConfigError, RolloutError
from tests.command_fixtures import own_folder  # noqa: F401
from tests.commands import FinishedRun, run_command
from tests.rl.toy_task import SMALL, read_rollouts
from tests.tiny import make_model
from tests.toy_data import write_rows

AGENTS = Path(__file__).parents[2] / "examples/agents"
AGENT, SERVER = AGENTS / "openenv_game.py", AGENTS / "openenv_server.py"
NUMBERS = """
    from openrlhf.utils.agent import OpenEnvAgentExecutor

    class AgentExecutor(OpenEnvAgentExecutor):
        def __init__(self):
            super().__init__({url!r})

        def {method}(self, text):
            return {{"number": int(text)}}

        def show_observation(self, observation):
            return observation["text"].upper()
"""
FIRST = "<u>go\nGuess a number from 1 to 9.<a>"
SEED, NUMBER = 3, 4  # random.Random(3).randint(1, 9)


class Slow(Scripted):
    """Session that takes two seconds for each turn."""

    async def generate(self, request):
        await asyncio.sleep(2)
        return await super().generate(request)


@contextmanager
def serve(file):
    """Run a server; yield its address."""
    command = [sys.executable, str(file), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield next(found[1] for line in server.stderr if (found := re.search(r"running on (http://[\d.:]+)", line)))
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url():
    with serve(SERVER) as address:
        yield address


@pytest.fixture(scope="module")
def url_for_numbers(tmp_path_factory):
    """The same game with an action of two fields."""
    file = tmp_path_factory.mktemp("server") / "server.py"
    changed = SERVER.read_text().replace("text: str = Field(max_length=40)", 'text: str = ""\n    number: int')
    file.write_text(changed.replace("action.text.strip()", "str(action.number)"))
    with serve(file) as address:
        yield address


@pytest.mark.slow(seconds=4)
def test_game_matches_hand_computed_tokens_and_rewards(build, url, monkeypatch):
    monkeypatch.setenv("OPENENV_URL", url)
    long = "9" * 41  # not a valid action
    won, lost, cut = Scripted("3</s>", f"{NUMBER}</s>"), Scripted("a</s>", "9</s>", "1</s>"), Scripted(f"{long}</s>")
    executor = build(agent_func_path=str(AGENT), step_rewards=True, context_length=400, max_turns=4)
    asked = prompt("go", label=SEED)
    first, second, third = run(executor, [won, lost, cut], asked=asked, max_tokens=60).trajectories
    assert decode(first.input_ids) == f"{FIRST}3</s><u>Higher.<a>{NUMBER}</s>"
    assert decode(second.input_ids) == f"{FIRST}a</s><u>That is no number.<a>9</s><u>Lower.<a>1</s>"
    rejected = "<u>invalid action: String should have at most 40 characters<a>"
    assert decode(third.input_ids) == f"{FIRST}{rejected.join([f'{long}</s>'] * 4)}"
    assert (first.reward, first.extra_logs, first.truncated) == (0.9, {"turn_count": 2.0}, False)
    assert (second.reward, second.truncated) == (pytest.approx(-0.3), False)
    assert (third.reward, third.truncated) == (0.0, True)
    assert [reward for _, reward in first.step_rewards] == [-0.1, 1.0]
    assert first.input_ids[first.action_mask].tolist() == encode(f"3</s>{NUMBER}</s>")
    assert first.rollout_log_probs[first.action_mask].tolist() == [-1.0, -1.0, -2.0, -2.0]


@pytest.mark.slow(seconds=6)
def test_a_slow_policy_keeps_its_connection(build, tmp_path, monkeypatch):
    """The server closes a connection that leaves a ping unanswered for half a second."""
    file = tmp_path / "server.py"
    pings = "port=args.port, ws_ping_interval=0.5, ws_ping_timeout=0.5)"
    file.write_text(SERVER.read_text().replace("port=args.port)", pings))
    with serve(file) as address:
        monkeypatch.setenv("OPENENV_URL", address)
        executor = build(agent_func_path=str(AGENT), context_length=400)
        (got,) = run(executor, [Slow("3</s>", f"{NUMBER}</s>")], asked=prompt("go", label=SEED)).trajectories
    assert (got.reward, got.extra_logs) == (0.9, {"turn_count": 2.0})


@pytest.mark.slow(seconds=3)
def test_an_episode_that_reset_ends_is_an_error(build, tmp_path, monkeypatch):
    file = tmp_path / "server.py"
    file.write_text(SERVER.read_text().replace('1 to 9.")', '1 to 9.", done=True)'))
    with serve(file) as address:
        monkeypatch.setenv("OPENENV_URL", address)
        executor = build(agent_func_path=str(AGENT), context_length=400)
        with pytest.raises(RolloutError, match="reset returned done"):
            run(executor, [Scripted("3</s>")], asked=prompt("go", label=SEED))
        monkeypatch.setenv("OPENENV_URL", f"{address}/other")
        with pytest.raises(ConfigError, match="/other/schema cannot be read: 404"):
            build(agent_func_path=str(AGENT))


@pytest.mark.slow(seconds=4)
def test_a_tiny_policy_trains_on_an_environment(url, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENENV_URL", url)
    rows = write_rows(tmp_path / "prompts.jsonl", [{"input": "go", "label": str(seed)} for seed in range(4)])
    flags = {
        "pretrain": make_model(tmp_path / "model", "llama"),
        "save_path": "./out",
        "ckpt_path": "./out_ckpt",
        "prompt_data": rows,
        "agent_func_path": str(AGENT),
        "rollout_batch_size": 2,
        "train_batch_size": 8,
        "max_len": 160,
        "max_new_tokens": 6,
    }
    run_command("train_ppo", SMALL | flags)
    ran = FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")
    assert len(ran.train("turn_count")) == 2
    for row in read_rollouts(ran, 1):
        assert decode(row["input_ids"]).startswith(FIRST)
        assert row["extra_logs"]["turn_count"] == decode(row["input_ids"]).count("<a>")


@pytest.mark.slow(seconds=3)
def test_actions_of_several_fields_need_a_method(build, write, url_for_numbers):
    agent = write(NUMBERS.format(url=url_for_numbers, method="make_action"))
    session = Scripted("x</s>", f"{NUMBER}</s>")
    executor = build(agent_func_path=agent, context_length=400)
    (got,) = run(executor, [session], asked=prompt("go", label=SEED)).trajectories
    problem = "invalid action: invalid literal for int() with base 10: 'x'"
    assert decode(got.input_ids) == f"<u>go\nGUESS A NUMBER FROM 1 TO 9.<a>x</s><u>{problem}<a>{NUMBER}</s>"
    assert got.reward == 1.0
    with pytest.raises(ConfigError, match="has the fields text, number: expected one text field"):
        build(agent_func_path=write(NUMBERS.format(url=url_for_numbers, method="other")))


@pytest.mark.slow(seconds=1)
def test_a_missing_server_is_reported_before_training(build, monkeypatch):
    monkeypatch.setenv("OPENENV_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/schema cannot be read: .*Try: start the server first"):
        build(agent_func_path=str(AGENT))


@pytest.mark.parametrize(
    ("label", "arguments"),
    [
        ("", {}),
        (None, {}),
        (7, {"seed": 7}),
        ("7", {"seed": 7}),
        ({"a": "a"}, {"a": "a"}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_labels_are_the_arguments_of_reset(label, arguments):
    assert read_arguments(label) == arguments


@pytest.mark.parametrize("label", ["seven", True, [1], 1.5])
def test_other_labels_are_rejected(label):
    with pytest.raises(RolloutError, match="the label of a prompt for OpenEnv is"):
        read_arguments(label)


TEXT_ACTION = {"action": {"properties": {"text": {"type": "string"}}}}
START = {"data": {"observation": {"text": "go"}, "reward": 0.0, "done": False}}
OWN_AGENT = """
    from openrlhf.utils.agent import OpenEnvAgentExecutor

    class AgentExecutor(OpenEnvAgentExecutor):
        def __init__(self):
            super().__init__({url!r})
"""


def hostile(*, schema=None, play=None):
    """Return the application of a server that misbehaves, and the list of requests that reached `/internal`."""
    reached = []

    async def describe(request):
        return web.json_response(TEXT_ACTION)

    async def internal(request):
        reached.append(request.path)
        return web.json_response(TEXT_ACTION)

    app = web.Application()
    app.router.add_get("/schema", schema or describe)
    app.router.add_get("/internal", internal)
    if play:
        app.router.add_get("/ws", play)
    return app, reached


async def redirect(request):
    raise web.HTTPTemporaryRedirect("/internal")


@pytest.mark.slow(seconds=3)
def test_redirects_are_not_followed(build, write):
    """Otherwise a server could make this machine request an address that only it can reach."""
    app, reached = hostile(schema=redirect)
    with served(app) as url, pytest.raises(ConfigError, match="schema cannot be read: it answers with a redirect"):
        build(agent_func_path=write(OWN_AGENT.format(url=url)))
    assert not reached
    app, reached = hostile(play=redirect)
    with served(app) as url:
        executor = build(agent_func_path=write(OWN_AGENT.format(url=url)), context_length=300, on_reward_error="skip")
        (failure,) = run(executor, [Scripted("7</s>")], asked=prompt("go", label=SEED)).failures
    assert "/ws cannot be reached: it answers with a redirect" in str(failure)
    assert not reached


@pytest.mark.slow(seconds=3)
def test_an_endless_schema_is_rejected(build, write, monkeypatch):
    sent = []

    async def drip(request):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(b" " * 100_000)
            sent.append(100_000)
        return response

    app, _ = hostile(schema=drip)
    with served(app) as url, pytest.raises(ConfigError, match="schema cannot be read: more than 16 MiB"):
        build(agent_func_path=write(OWN_AGENT.format(url=url)))
    assert sum(sent) < 100_000_000


@pytest.mark.slow(seconds=4)
def test_unrequested_frames_stay_with_the_server(build, write):
    """While the policy generates, a server may send without end."""
    sent, seen = [], []

    class Watching(Slow):
        async def generate(self, request):
            completion = await super().generate(request)
            seen.append(sum(sent))
            return completion

    async def play(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json(START)
        with suppress(ConnectionError):
            for _ in range(300):
                await socket.send_str(" " * 1_000_000)
                sent.append(1_000_000)
        return socket

    app, _ = hostile(play=play)
    with served(app) as url:
        executor = build(agent_func_path=write(OWN_AGENT.format(url=url)), context_length=300, on_reward_error="skip")
        run(executor, [Watching("7</s>")], asked=prompt("go", label=SEED))
    assert 0 < seen[0] < 50_000_000


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no", "errors": 5}}', None),
        ('{"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no", "errors": ["msg", 5, {}]}}', None),
        (
            '{"data": {"observation": {"text": ""}, "reward": ' + "9" * 400 + ', "done": true}}',
            "expected a finite number",
        ),
        ('{"data": {"observation": {"text": ""}, "reward": NaN, "done": true}}', "expected a finite number"),
        ('{"data": ' + "[" * 200 + "]" * 200 + "}", "expected JSON"),
        ("\\ud800", "expected JSON"),
    ],
)
def test_malformed_answers_are_explained(build, write, answer, message):
    async def play(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json(START)
        async for _ in socket:
            await socket.send_str(answer)
        return socket

    app, _ = hostile(play=play)
    with served(app) as url:
        executor = build(agent_func_path=write(OWN_AGENT.format(url=url)), context_length=300, on_reward_error="skip")
        got = run(executor, [Scripted("7</s>")], asked=prompt("go", label=SEED))
    if message is None:
        assert "invalid action: no" in decode(got.trajectories[0].input_ids)
    else:
        assert message in str(got.failures[0])
        assert "Traceback" not in str(got.failures[0])
