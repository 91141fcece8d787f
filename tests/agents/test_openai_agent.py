"""Agents that use the real OpenAI client: the responses they get, and the tokens that are trained on."""

import textwrap

import pytest
import torch
from sessions import TOOL_TEMPLATE, Lockstep, Scripted, decode, encode, prompt, run, run_all

from openrlhf.agents.chat.episode import ChatEpisode
from openrlhf.agents.chat.wire import find_calls
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.model import ModelFlags
from openrlhf.data.templates import Chat
from openrlhf.errors import ConfigError, RewardError, RolloutError
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm
from openrlhf.rollout.hf import HFEngine
from tests.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.slow(seconds=2)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call></s>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL_AGENT = f"""
    import json
    from openai import OpenAI

    def run_agent(base_url, api_key, prompt, label):
        client = OpenAI(base_url=base_url, api_key=api_key)
        messages = [{{"role": "user", "content": prompt}}]
        calls = 0
        while True:
            reply = client.chat.completions.create(model="any", messages=messages, tools={TOOLS!r}).choices[0]
            messages.append(reply.message)
            if reply.finish_reason != "tool_calls":
                break
            for call in reply.message.tool_calls:
                calls += 1
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"])
                messages.append({{"role": "tool", "tool_call_id": call.id, "content": result}})
        return {{"reward": float(reply.message.content == label), "scores": 0.5, "extra_logs": {{"calls": calls}}}}
"""


@pytest.fixture
def tokenizer():
    made = make_tokenizer()
    made.chat_template = TOOL_TEMPLATE
    return made


def agents(**bodies):
    """Return a file whose run_agent runs the body that the label names; `ask` returns the policy's message."""
    source = """
        import httpx
        from openai import APIStatusError, AsyncOpenAI, BadRequestError

        async def run_agent(base_url, api_key, prompt, label):
            async def ask(*messages, **more):
                got = await c.chat.completions.create(model="policy", messages=list(messages), **more)
                return got.choices[0].message
            u = {"role": "user", "content": prompt}
            async with AsyncOpenAI(base_url=base_url, api_key=api_key) as c:
                return await globals()[label](c, ask, u, base_url, api_key)
    """
    functions = [
        f"async def {name}(c, ask, u, base_url, api_key):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        for name, body in bodies.items()
    ]
    return "\n".join([textwrap.dedent(source), *functions])


def play(executor, said, **options):
    """Run one episode per label with its scripted session."""
    return run_all(executor, [(prompt(label=label), [session]) for label, session in said.items()], **options)


def test_client_with_tools_matches_hand_computed_tokens(build, write):
    session = Scripted(CALL, "3</s>")
    got = run(
        build(agent_func_path=write(TOOL_AGENT), context_length=200),
        [session],
        asked=prompt("1+2?", label="3"),
        max_tokens=100,
    ).trajectories[0]
    assert decode(got.input_ids) == f"[add]<u>1+2?<a>{CALL}<t>3<a>3</s>"
    start, between, end = len(encode("[add]<u>1+2?<a>")), len(encode("<t>3<a>")), len(encode("3</s>"))
    actions = [False] * start + [True] * len(encode(CALL)) + [False] * between + [True] * end
    assert list(got.action_mask) == actions
    assert list(got.rollout_log_probs) == [0.0] * start + [-1.0] * len(encode(CALL)) + [0.0] * between + [-2.0] * end
    assert (got.reward, got.score, got.extra_logs, got.truncated) == (1.0, 0.5, {"calls": 1.0}, False)
    assert [decode(request.prompt_token_ids) for request in session.requests] == [
        "[add]<u>1+2?<a>",
        f"[add]<u>1+2?<a>{CALL}<t>3<a>",
    ]


HOSTILE = {  # arguments of a tool call that json.loads accepts only in part, or not with a JSONDecodeError
    "thousands of digits": "7" * 5000,
    "deep nesting": "[" * 2000 + "]" * 2000,
    "nesting that only later steps reject": "[" * 900 + "]" * 900,
    "not a number": "NaN",  # differs from itself when the client sends the call back
    "infinite": "1e999",
}


def test_hostile_tool_calls_stay_text_and_do_not_end_the_run(build, write):
    calls = [
        f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call></s>' for value in HOSTILE.values()
    ]
    executor = build(agent_func_path=write(TOOL_AGENT), context_length=10_000)
    samples = run(executor, [Scripted(call, "3</s>") for call in calls], max_tokens=8000).trajectories
    for sample, call in zip(samples, calls, strict=True):
        assert (sample.reward, sample.extra_logs) == (0.0, {"calls": 0.0})
        assert decode(sample.input_ids).endswith(call)


def test_a_tool_that_repeats_the_policys_words_changes_no_tokens(build, write):
    """The place after the policy's turn is found by a mark, which the policy must not be able to produce."""
    body = """
        said = await ask(u)
        echo = {"role": "user", "content": "openrlhf-said-this"}
        await ask(u, said, echo)
        return 1.0
    """
    said = {"repeats": Scripted("openrlhf-said-this</s>", "b</s>")}
    (result,) = play(build(agent_func_path=write(agents(repeats=body)), context_length=100), said, max_tokens=30)
    assert decode(result.trajectories[0].input_ids).endswith("<a>openrlhf-said-this</s><u>openrlhf-said-this<a>b</s>")


def test_tokens_of_a_real_engine_are_kept_as_sampled(build, write, tmp_path, tokenizer):
    folder = make_model(tmp_path / "model")
    model = load_causal_lm(folder, ModelFlags(pretrain=folder), device=torch.device("cpu"), packing=False)
    engine = HFEngine(Network(model), tokenizer)

    class Session(Scripted):
        async def generate(self, request):
            (completion,) = await engine.generate([request])
            self.requests.append((request, completion))
            return completion

    body = """
        first = await ask(u, max_tokens=5)
        second = await ask(u, first, {"role": "user", "content": "more"})
        return float(len(second.content))
    """
    sessions = [Session() for _ in range(3)]
    got = run(
        build(agent_func_path=write(agents(twice=body))), sessions, asked=prompt(label="twice"), max_tokens=9
    ).trajectories
    assert len({tuple(item.input_ids) for item in got}) == 3
    for item, session in zip(got, sessions, strict=True):
        (first, drawn), (second, last) = session.requests
        begun = (*first.prompt_token_ids, *drawn.token_ids)
        assert second.prompt_token_ids[: len(first.prompt_token_ids) + 5] == begun
        assert item.input_ids.tolist() == [*second.prompt_token_ids, *last.token_ids]
        acted = [value for value, mask in zip(item.rollout_log_probs, item.action_mask, strict=True) if mask]
        assert acted == [*drawn.log_probs, *last.log_probs]
        assert [token for token, mask in zip(item.input_ids, item.action_mask, strict=True) if mask] == [
            *drawn.token_ids,
            *last.token_ids,
        ]
        assert decode(second.prompt_token_ids[len(first.prompt_token_ids) + 5 :]) in ("</s><u>more<a>", "<u>more<a>")


def test_blocking_clients_run_concurrently(build, write):
    """The engine answers only when all episodes wait, as in a run."""
    source = """
        from openai import OpenAI
        async def run_agent(base_url, api_key, prompt):
            client = OpenAI(base_url=base_url, api_key=api_key)
            said = client.chat.completions.create(model="", messages=[{"role": "user", "content": prompt}])
            return float(said.choices[0].message.content)
    """
    sessions = Lockstep.group(*([str(number)] for number in range(40)))
    got = run(build(agent_func_path=write(source)), sessions)
    assert [item.reward for item in got.trajectories] == [float(number) for number in range(40)]


SERVED = {
    "streamed": f"""
        parts = [part async for part in await c.chat.completions.create(
            model="policy", messages=[u], stream=True, tools={TOOLS!r}, stream_options={{"include_usage": True}})]
        delta = parts[0].choices[0].delta
        assert (delta.role, delta.content, delta.tool_calls[0].function.name) == ("assistant", "so", "add")
        assert parts[1].choices[0].finish_reason == "tool_calls"
        assert (parts[2].usage.prompt_tokens, parts[2].usage.completion_tokens) == (15, {len(encode(CALL)) + 2})
        return len(parts)
    """,
    "everything": """
        models = await c.models.list()
        assert [item.id for item in models.data] == ["policy"]
        at = base_url.removesuffix("/v1") + "/tokenize"
        head = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=head) as http:
            assert (await http.post(at, json={"prompt": "ab"})).json()["count"] == 2
            assert (await http.post(at, json={"messages": [u]})).json()["count"] == 10
            assert (await http.post(at, json={"prompt": "ab"}, headers={"Authorization": "no"})).status_code == 401
            assert (await http.post(base_url + "/responses", json={})).status_code == 404
            assert (await http.post(at, content=bytes([255, 254]))).status_code == 400
            assert (await http.get(base_url.split("/s/")[0] + "/health")).status_code == 200
        got = await c.chat.completions.create(model="policy", messages=[u], logprobs=True)
        assert [item.logprob for item in got.choices[0].logprobs.content] == [-1.0, -1.0]
        assert got.token_ids["completion_token_ids"][-1] == 0
        return got.usage.completion_tokens
    """,
    "lost": """
        first = await ask(u)
        again = await ask(u, extra_headers={"x-stainless-retry-count": "1"})
        await ask(u, again, u)
        return float(first == again)
    """,
    "shorter": """
        await ask(u, max_tokens=3, temperature=0.1, top_p=1.0, stop="x", seed=3)
        return 4.0
    """,
    "raises": "await ask(u); raise KeyError('lost')",
}


def test_endpoints_streaming_retries_and_ignored_parameters(build, write, capfd):
    executor = build(agent_func_path=write(agents(**SERVED)), context_length=200, on_reward_error="skip")
    texts = {"streamed": ["so" + CALL], "everything": ["x</s>"], "lost": "ab", "shorter": ["abcdef"], "raises": "a"}
    said = {label: Scripted(*text) for label, text in texts.items()}
    *results, raised = play(executor, said, max_tokens=99, stop=("y",))
    (failure,) = raised.failures
    assert isinstance(failure, RewardError)
    assert "raised KeyError: 'lost' at" in str(failure)
    assert [failure for result in results for failure in result.failures] == []
    assert [result.trajectories[0].reward for result in results] == [3.0, 2.0, 1.0, 4.0]
    assert len(said["lost"].requests) == 2
    asked = said["shorter"].requests[0].params
    assert (asked.max_tokens, asked.temperature, asked.stop, asked.seed) == (3, 1.0, ("y", "x"), 0)
    assert results[3].trajectories[0].truncated
    assert "temperature=0.1 (the run has 1.0): sampling follows the run's flags" in capfd.readouterr().err


REFUSED = [
    ("await ask(u); await ask(u)", "it ends after 1 message, but the episode has 2"),
    (
        'said = await ask(u); await ask(u, {"role": "assistant", "content": "other"}, u)',
        'message 1 is \'{"role": "assistant", "content": "other"}\', but the episode has',
    ),
    ('said = await ask(u); await ask({"role": "user", "content": "!"}, said, u)', "message 0 is"),
    (f"said = await ask(u, tools={TOOLS!r}); await ask(u, said, u)", "the request's tools differ"),
    ("await ask(u, n=2)", "asks for n=2"),
    ("await ask(u, tool_choice='required')", "asks for tool_choice='required'"),
    ("await ask(u, response_format={'type': 'json_object'})", "asks for response_format"),
    ("await ask(u, extra_body={'max_tokens': 0})", "'max_tokens' of a request is [0]"),
    ("await ask(u, stop=[1])", "'stop' of a request is [1]"),
    ("await ask(u, extra_body={'tools': {'a': 1}})", "'tools' of a request is {'a': 1}"),
    ("await ask(u, {'role': 'assistant', 'tool_calls': [{}]})", "a tool call with function.name"),
    ("await ask()", "expected a list of messages"),
    ("await ask(u, extra_body={'stream_options': [1]})", "'stream_options' of a request is [1]"),
    ("await ask({'role': 'user', 'content': [{'type': 'image_url'}]})", "text in every part"),
    ("await ask({'role': 'user', 'content': 'long' * 99})", "the first request of an episode has 402 tokens"),
    ("pass", "returned without sending a request to base_url"),
    ("return await ask(u) and None", "run_agent returned None: expected a number"),
    ("return await ask(u) and {'score': 1}", "run_agent returned {'score': 1}"),
]


def test_unusable_request_fails_the_episode_even_if_the_agent_ignores_the_error(build, write):
    bodies, wanted = {}, []
    for number, (body, message) in enumerate(REFUSED):
        bodies[f"loud{number}"] = f"{body}\nreturn 1.0"
        bodies[f"quiet{number}"] = f"try:\n    {body}\nexcept APIStatusError:\n    pass\nreturn 1.0"
        wanted += [message] * 2
    executor = build(agent_func_path=write(agents(**bodies)), on_reward_error="skip")
    failures = [result.failures for result in play(executor, {label: Scripted("a") for label in bodies})]
    assert all(len(found) == 1 and isinstance(found[0], RolloutError) for found in failures)
    assert [message for message, (found,) in zip(wanted, failures, strict=True) if message not in str(found)] == []


@pytest.mark.parametrize("flags", [{"max_turns": 2}, {"context_length": 25}])
def test_full_episode_rejects_further_requests(build, write, flags):
    body = """
        heard = [u]
        while True:
            try:
                heard += [await ask(*heard), u]
            except BadRequestError as error:
                assert error.code == "context_length_exceeded"
                {ending}
    """
    said = {"judged": Scripted("abc</s>"), "gave_up": Scripted("abc</s>")}
    source = agents(judged=body.format(ending="return 2.0"), gave_up=body.format(ending="raise"))
    results = play(build(agent_func_path=write(source), **flags), said)
    assert [len(session.requests) for session in said.values()] == [2, 2]
    ended = [result.trajectories[0] for result in results]
    assert [(item.reward, item.truncated) for item in ended] == [(2.0, True), (0.0, True)]


def test_custom_executor_parses_another_tool_call_format(build, write):
    source = f"""
        from openai import OpenAI
        from openrlhf.utils.agent import OpenAIAgentExecutor

        class AgentExecutor(OpenAIAgentExecutor):
            def run_agent(self, base_url, api_key, prompt, label, **known):
                client = OpenAI(base_url=base_url, api_key=api_key)
                asked = [{{"role": "user", "content": prompt}}]
                said = client.chat.completions.create(model="", messages=asked, tools={TOOLS!r}).choices[0].message
                assert known["session_id"] in base_url
                return {{"rewards": known["seed"], "extra_logs": {{"named": said.tool_calls[0].function.name == "go"}}}}

            def find_calls(self, text, number):
                return "", [{{"id": "1", "type": "function", "function": {{"name": text, "arguments": {{}}}}}}]
    """
    got = run(build(agent_func_path=write(source)), [Scripted("no"), Scripted("go")]).trajectories
    assert [(item.reward, item.extra_logs) for item in got] == [(0.0, {"named": 0.0}), (1.0, {"named": 1.0})]


def test_error_in_find_calls_fails_the_episode_even_if_the_client_retries(build, write):
    source = f"""
        from openai import OpenAI
        from openrlhf.utils.agent import OpenAIAgentExecutor

        class AgentExecutor(OpenAIAgentExecutor):
            def run_agent(self, base_url, api_key, prompt):
                client = OpenAI(base_url=base_url, api_key=api_key)
                asked = [{{"role": "user", "content": prompt}}]
                client.chat.completions.create(model="", messages=asked, tools={TOOLS!r})
                return 1.0

            def find_calls(self, text, number):
                return text, [][int(text)]
    """
    said = Scripted("7", "x")
    (failure,) = run(build(agent_func_path=write(source), on_reward_error="skip"), [said]).failures
    assert isinstance(failure, RolloutError)
    assert "find_calls raised IndexError: list index out of range, for '7'" in str(failure)
    assert len(said.requests) == 1


def test_hanging_agent_times_out(build, write):
    source = """
        import threading
        def run_agent(base_url, prompt):
            threading.Event().wait()
    """
    executor = build(agent_func_path=write(source), reward_timeout=0.5, on_reward_error="skip")
    results = run_all(executor, [(prompt(), [Scripted("a")])])
    assert "did not return within 0.5 s" in str(results[0].failures[0])


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("def run_agent(base_url, question): ...", {}, "requires question; it may take base_url, api_key, prompt"),
        ("def run_agent(base_url): ...", {"apply_chat_template": True}, "leave the flag out"),
    ],
)
def test_unusable_file_or_flag_is_rejected_before_training(write, tokenizer, source, flags, message):
    from openrlhf.agents.build import build_executor
    from openrlhf.config.sections.rl import RewardFlags

    with pytest.raises(ConfigError) as error:
        build_executor(
            RewardFlags(agent_func_path=write(source), reward_processes=1),
            tokenizer,
            context_length=9,
            template=TemplateFlags(**flags),
        )
    assert message in str(error.value)


def session(template, **options):
    made = make_tokenizer()
    made.chat_template = template
    return ChatEpisode(Chat(made, None, {}, None, **options), task=None, max_turns=None, find_calls=find_calls)


def test_template_that_rewrites_earlier_turns_does_not_change_tokens():
    """Like those of reasoning models, the template shows thoughts only in the last turn."""
    forgets = (
        "{% for m in messages %}{{ '<' + m['role'][0] + '>' }}"
        "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    )
    from openrlhf.agents.interface import CompletionOutput, Logprob

    chat = session(forgets)
    asked = [{"role": "user", "content": "q"}]
    chat.transcript.add_feedback("", chat.tokens_added(asked, None))
    ids = encode("well|yes</s>")
    chat.transcript.add_turn(CompletionOutput(ids, "", [{token: Logprob(-1.0)} for token in ids], "stop"))
    chat.messages = [*asked, {"role": "assistant", "content": "well|yes"}]
    more = [*asked, {"role": "assistant", "content": " well|yes\n"}, {"role": "user", "content": "r"}]
    assert decode(chat.tokens_added(more, None)) == "<u>r<a>"


def test_template_that_hides_the_last_turn_is_rejected():
    chat = session("{{ messages[-1]['content'] }}")
    chat.messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(RolloutError, match="drops the assistant's last message"):
        chat.tokens_added([*chat.messages, {"role": "user", "content": "r"}], None)


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("plain", "plain", []),
        ('hm <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "hm", ["f"]),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}', "", ["f", "g"]),
        ("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ],
)
def test_find_calls(text, content, names):
    got, calls = find_calls(text, 2)
    assert (got, [call["function"]["name"] for call in calls]) == (content, names)
    assert [call["id"] for call in calls] == [f"call_2_{place}" for place in range(len(calls))]
