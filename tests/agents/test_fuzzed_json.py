"""Any JSON from rewards, agents and policies gives a result or one of our own errors."""

import asyncio
import json

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st
from sessions import TOOL_TEMPLATE, decode, encode, prompt

from openrlhf.agents.chat.episode import ChatEpisode, comparable
from openrlhf.agents.chat.nemo_gym import convert_tool, read_row
from openrlhf.agents.chat.server import ChatServer
from openrlhf.agents.chat.wire import find_calls, format_message, read_chat
from openrlhf.agents.interface import AgentSamplingParams, EpisodeTask, RequestOutput
from openrlhf.agents.scores import Samples, Scored, read_scores
from openrlhf.data.templates import Chat
from openrlhf.errors import RewardError, RolloutError
from openrlhf.types import Completion
from tests.json_strategies import FUZZING, arguments, conversations, mostly, numbers, some_of, texts, tools, values
from tests.tiny import make_tokenizer

TWO = Samples((prompt(), prompt()), ("1+1=2", "1+1=3"), ("2", "3"))
per_sample = st.one_of(values, st.lists(mostly(numbers), min_size=2, max_size=2))
returns = st.one_of(
    values,
    per_sample,
    some_of(rewards=per_sample, scores=per_sample, extra_logs=mostly(st.dictionaries(texts, per_sample, max_size=2))),
)


@FUZZING
@given(returned=returns)
def test_any_reward_is_a_finite_number_or_an_error(returned):
    try:
        results = read_scores(json.loads(json.dumps(returned)), TWO, "it")
    except RewardError as error:
        results = [error, error]
    assert len(results) == 2
    for result in results:
        if isinstance(result, Scored):
            assert abs(result.reward) < float("inf")
            assert abs(result.score) < float("inf")
        else:
            assert isinstance(result, RewardError)
            assert len(str(result)) < 1000


calls = st.one_of(
    st.fixed_dictionaries({"name": mostly(texts), "arguments": mostly(st.dictionaries(texts, values, max_size=3))}).map(
        json.dumps
    ),
    values.map(json.dumps),
    arguments.map(str),
    st.sampled_from(["[" * 5000, "1" * 5000, "NaN", '{"name": "f", "arguments": {"a": "\\ud800"}}']),
)
turns = st.lists(
    st.one_of(texts, calls.map("<tool_call>{}</tool_call>".format), st.sampled_from(["<tool_call>", "</tool_call>"])),
    max_size=4,
).map("".join)


@FUZZING
@given(turn=turns)
def test_any_turn_of_the_policy_is_text_or_calls_that_clients_can_send_back(turn):
    content, found = find_calls(turn, 1)
    assert found or content == turn
    message = {"role": "assistant", "content": content, "tool_calls": found}
    (returned,) = read_chat(json.loads(json.dumps([format_message(message)], allow_nan=False)))
    assert comparable(returned) == comparable(message)


gym_rows = some_of(
    responses_create_params=mostly(some_of(input=mostly(st.one_of(texts, conversations)), tools=mostly(tools)))
)


@FUZZING
@given(label=st.one_of(values, gym_rows, gym_rows.map(json.dumps)))
def test_any_label_is_a_row_of_nemo_gym_or_rejected(label):
    try:
        row = read_row(label)
        tools = [convert_tool(tool) for tool in row.tools]
    except RolloutError as error:
        assert len(str(error)) < 1000  # noqa: PT017
    else:
        assert all(isinstance(tool["function"]["name"], str) for tool in tools)


class OneTurn:
    """Engine that always samples the same turn."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        ids = tuple(encode("1</s>"))
        return RequestOutput.from_completion(
            list(prompt_token_ids), Completion.of(ids, (-1.0,) * len(ids), decode(ids), "stop", 0)
        )


requests = st.fixed_dictionaries(
    {"messages": mostly(conversations)},
    optional={
        "tools": mostly(tools),
        "stop": values,
        "stream": st.booleans(),
        "logprobs": values,
        **{name: mostly(st.none()) for name in ("n", "tool_choice", "logit_bias", "response_format", "stream_options")},
        **{name: mostly(st.integers(1, 20)) for name in ("max_tokens", "max_completion_tokens")},
        **{name: values for name in ("temperature", "top_p", "seed", "model", "prompt")},
    },
)
bodies = st.one_of(
    requests.map(json.dumps).map(str.encode), values.map(json.dumps).map(str.encode), st.binary(max_size=30)
)


@pytest.fixture
def ask_server():
    """Start a real server; return a function that sends a body to a new episode and returns the status of each path."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    server, chat = ChatServer(), Chat(tokenizer, None, {}, None)
    task = EpisodeTask("1+1=", "2", AgentSamplingParams(16), 200, tokenizer, OneTurn())
    with asyncio.Runner() as runner:
        runner.run(server.start())
        http = runner.run(open_session())

        async def ask(body):
            episode = ChatEpisode(chat, task, None, find_calls)
            address = server.open(episode).removesuffix("/v1")
            key = {"Authorization": f"Bearer {episode.key}"}
            found = []
            for path in ("/v1/chat/completions", "/tokenize"):
                async with http.post(address + path, data=body, headers=key) as response:
                    found.append(response.status)
            return found, episode.error

        yield lambda body: runner.run(ask(body))
        runner.run(http.close())


async def open_session():
    return ClientSession()


@FUZZING
@given(body=bodies)
def test_any_body_gets_an_answer_or_an_explanation_from_the_chat_server(ask_server, body):
    statuses, error = ask_server(body)
    assert set(statuses) <= {200, 400}
    assert (statuses[0] == 400) == isinstance(error, RolloutError)
