"""A resources server of NeMo Gym's protocol: seeding, tool calls and verification over real HTTP.

The server here parses requests with OpenAI's types, as NeMo Gym's servers do.
"""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from openai.types.responses import Response
from sessions import TOOL_TEMPLATE, Scripted, decode, encode, prompt, run, served

from openrlhf.agents.chat import nemo_gym
from openrlhf.agents.chat.nemo_gym import NemoGymAgentExecutor
from openrlhf.errors import RewardError, RolloutError
from tests.tiny import make_tokenizer

ROOT = Path(__file__).parents[2]
TOOL = {"type": "function", "name": "weigh", "parameters": {"type": "object", "properties": {}}, "strict": True}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "how heavy?"}], "tools": [TOOL]},
    "answer": "7",
}
CALL = '<tool_call>{"name": "weigh", "arguments": {"what": "it"}}</tool_call></s>'
AGENT = """
    from openrlhf.utils.agent import NemoGymAgentExecutor

    class AgentExecutor(NemoGymAgentExecutor):
        def __init__(self):
            super().__init__({url!r})
"""


@pytest.fixture
def tokenizer():
    made = make_tokenizer()
    made.chat_template = TOOL_TEMPLATE
    return made


class Scales:
    """Environment with state: the reward depends on what was seeded and called in the same session."""

    def __init__(self):
        self.sessions = {}
        self.verified = []

    async def seed(self, request):
        body = await request.json()
        name = f"s{len(self.sessions)}"
        self.sessions[name] = {"answer": body["answer"], "calls": 0}
        response = web.json_response({})
        response.set_cookie("session", name)
        return response

    async def weigh(self, request):
        assert await request.json() == {"what": "it"}
        session = self.sessions[request.cookies["session"]]
        session["calls"] += 1
        return web.json_response({"kg": session["answer"]})

    async def verify(self, request):
        body = await request.json()
        response = Response.model_validate(body["response"])
        self.verified.append(response)
        session = self.sessions[request.cookies["session"]]
        said = response.output_text.split("</s>")[0]
        return web.json_response(body | {"reward": session["calls"] + float(said == body["answer"])})

    async def broken(self, request):
        return web.json_response({"detail": "no such row"}, status=422)

    def app(self, **instead):
        app = web.Application()
        routes = {"/seed_session": self.seed, "/weigh": self.weigh, "/verify": self.verify} | instead
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        return app


@pytest.fixture(params=["a class of one's own", "the example"])
def agent_at(request, write, monkeypatch):
    """Return a function from a server's address to an agent file; the example's path is relative to the root."""

    def make(url):
        if request.param != "the example":
            return write(AGENT.format(url=url))
        monkeypatch.setenv("NEMO_GYM_URL", url)
        monkeypatch.chdir(ROOT)
        return "examples/python/agent_func_nemogym_executor.py"

    return make


@pytest.mark.slow(seconds=3)
def test_episode_with_a_tool(build, agent_at):
    scales = Scales()
    with served(scales.app()) as url:
        executor = build(agent_func_path=agent_at(url), context_length=300)
        sessions = [Scripted(CALL, "7</s>"), Scripted("hm " + CALL, "8</s>"), Scripted("7</s>")]
        asked = prompt("how heavy?", label=json.dumps(ROW))
        got = run(executor, sessions, asked=asked, max_tokens=120).trajectories
    assert [item.reward for item in got] == [2.0, 1.0, 1.0]
    assert [item.extra_logs for item in got] == [{"tool_calls": 1.0}, {"tool_calls": 1.0}, {"tool_calls": 0.0}]
    assert decode(got[0].input_ids) == f'[weigh]<u>how heavy?<a>{CALL}<t>{{"kg": "7"}}<a>7</s>'
    acted = [token for token, mask in zip(got[0].input_ids, got[0].action_mask, strict=True) if mask]
    assert acted == encode(CALL + "7</s>")
    kinds = {tuple(item.type for item in response.output) for response in scales.verified}
    assert kinds == {
        ("function_call", "function_call_output", "message"),
        ("message", "function_call", "function_call_output", "message"),
        ("message",),
    }


def test_only_tools_listed_in_the_row_are_requested(build, write):
    with served(Scales().app()) as url:
        call = '<tool_call>{"name": "verify", "arguments": {}}</tool_call></s>'
        executor = build(agent_func_path=write(AGENT.format(url=url)), context_length=300)
        asked = prompt("how heavy?", label=json.dumps(ROW))
        got = run(executor, [Scripted(call, "7</s>")], asked=asked, max_tokens=120).trajectories[0]
    assert got.reward == 1.0
    assert "<t>there is no tool verify<a>" in decode(got.input_ids)


def test_error_status_of_the_server_is_reported(build, write):
    scales = Scales()
    with served(scales.app(**{"/verify": scales.broken})) as url:
        executor = build(agent_func_path=write(AGENT.format(url=url)), on_reward_error="skip")
        (failure,) = run(executor, [Scripted("7</s>")], asked=prompt("how heavy?", label=json.dumps(ROW))).failures
    assert isinstance(failure, RewardError)
    assert '/verify answered 422: {"detail": "no such row"}' in str(failure)


@pytest.mark.slow(seconds=2)
def test_redirects_are_not_followed(build, write):
    """Otherwise a server could read, through a tool's result, an address that only this machine can reach."""

    async def internal(request):
        return web.Response(text="internal")

    async def redirect(request):
        raise web.HTTPTemporaryRedirect("/internal")

    scales = Scales()
    with served(scales.app(**{"/weigh": redirect, "/internal": internal})) as url:
        executor = build(agent_func_path=write(AGENT.format(url=url)), context_length=300)
        asked = prompt("how heavy?", label=json.dumps(ROW))
        got = run(executor, [Scripted(CALL, "7</s>")], asked=asked, max_tokens=120).trajectories[0]
    assert "internal" not in decode(got.input_ids)
    assert "307" in decode(got.input_ids)


def test_an_endless_answer_is_rejected(monkeypatch):
    sent = []

    async def drip(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(100_000))
            sent.append(100_000)
        return response

    async def ask(url):
        async with ClientSession() as http:
            await NemoGymAgentExecutor(url)._post(http, "/weigh", {})

    monkeypatch.setattr(nemo_gym, "LARGEST_ANSWER", 1 << 20)
    too_large = pytest.raises(RewardError, match="/weigh answered with more than 1 MiB")
    with served(Scales().app(**{"/weigh": drip})) as url, too_large:
        asyncio.run(ask(url))
    assert sum(sent) < 50_000_000


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("\xe4\u20ac".encode(), None, "\xe4\u20ac"),
        (b"\xe4", "latin-1", "\xe4"),
        (b"a\xff", "no-such", "a\ufffd"),
        (b"a", "hex", "a"),
    ],
)
def test_answers_are_decoded(body, charset, text):
    async def answer(request):
        kind = "text/plain" + (f"; charset={charset}" if charset else "")
        return web.Response(body=body, headers={"Content-Type": kind})

    async def ask(url):
        async with ClientSession() as http:
            return await NemoGymAgentExecutor(url)._post(http, "/weigh", {})

    with served(Scales().app(**{"/weigh": answer})) as url:
        assert asyncio.run(ask(url)) == (200, text)


async def disconnect(request):
    request.transport.close()
    return web.Response()


@pytest.mark.slow(seconds=2)
def test_server_that_disconnects_during_an_episode_is_reported(build, write):
    with served(Scales().app(**{"/weigh": disconnect})) as url:
        executor = build(agent_func_path=write(AGENT.format(url=url)), context_length=300, on_reward_error="skip")
        asked = prompt("how heavy?", label=json.dumps(ROW))
        (failure,) = run(executor, [Scripted(CALL, "7</s>")], asked=asked, max_tokens=120).failures
    assert isinstance(failure, RewardError)
    assert "/weigh cannot be reached" in str(failure)


def test_server_timeout_is_reported():
    given_up = threading.Event()

    async def wait(request):
        await asyncio.to_thread(given_up.wait)
        return web.Response()

    async def ask(url):
        async with ClientSession(timeout=ClientTimeout(total=0.1)) as http:
            await NemoGymAgentExecutor(url)._post(http, "/weigh", {})

    with served(Scales().app(**{"/weigh": wait})) as url:
        with pytest.raises(RewardError, match="/weigh did not answer in time"):
            asyncio.run(ask(url))
        given_up.set()


@pytest.mark.slow(seconds=3)
def test_unreachable_server_and_malformed_row_are_reported(build, write):
    file = write(AGENT.format(url="http://127.0.0.1:9"))
    (failure,) = run(
        build(agent_func_path=file, on_reward_error="skip"), [Scripted("7")], asked=prompt("?", label=json.dumps(ROW))
    ).failures
    assert "is the resources server up?" in str(failure)
    (failure,) = run(build(agent_func_path=file, on_reward_error="skip"), [Scripted("7")], asked=prompt("?")).failures
    assert isinstance(failure, RolloutError)
    assert "the label of a prompt for NeMo Gym is not a row" in str(failure)
