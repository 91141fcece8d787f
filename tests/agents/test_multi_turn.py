"""The public executors without worker processes, on a scripted engine."""

import asyncio
import copy

import pytest
import torch
from sessions import TOKENIZER, decode, encode

from openrlhf.agents.interface import params_for_agent, params_for_engine, seed_for
from openrlhf.agents.legacy import StepFunction
from openrlhf.errors import ConfigError, RewardError, RolloutError
from openrlhf.types import SamplingParams
from openrlhf.utils.agent import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)


class ScriptedEngine:
    """An llm_engine that returns these texts in order."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.received = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        from openrlhf.agents.interface import RequestOutput
        from openrlhf.types import Completion

        self.received.append((decode(prompt_token_ids), copy.copy(sampling_params)))
        ids = tuple(encode(self.texts.pop(0)))
        number = len(self.received)
        completion = Completion.of(ids, (-float(number),) * len(ids), decode(ids), "stop", 0)
        return RequestOutput.from_completion(list(prompt_token_ids), completion)


class Echo(AgentInstanceBase):
    """Environment of two turns that records its states."""

    seen: list

    def __init__(self):
        self.states = []
        Echo.seen.append(self.states)

    async def reset(self, states, **kwargs):
        self.states.append(dict(states))
        return {"observation": "Q:" + states["observation"]}

    async def step(self, states, **kwargs):
        self.states.append(dict(states))
        last = len(self.states) == 3
        return {
            "rewards": torch.tensor([0.25]) if last else torch.tensor(1),
            "scores": torch.tensor(0.0) if last else torch.tensor(1.0),
            "environment_feedback": "!" if last else " no;",
            "done": last,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"turn": torch.tensor(len(self.states) - 1.0)},
        }


@pytest.fixture(autouse=True)
def fresh():
    Echo.seen = []


def execute(executor, *texts, max_length=64, max_tokens=8, prompt="hi "):
    engine = ScriptedEngine(*texts)
    answer = asyncio.run(
        executor.execute(
            prompt=prompt,
            label="L",
            sampling_params=params_for_agent(SamplingParams(max_tokens=max_tokens)),
            max_length=max_length,
            hf_tokenizer=TOKENIZER,
            llm_engine=engine,
        )
    )
    return answer, engine


def test_two_turns_by_hand():
    answer, engine = execute(MultiTurnAgentExecutor(Echo), "ab</s>", "c</s>")
    assert decode(answer["observation_tokens"]) == "Q:hi ab</s> no;c</s>!"
    assert answer["action_ranges"] == [(5, 8), (12, 14)]
    assert answer["rollout_log_probs"] == [0.0] * 5 + [-1.0] * 3 + [0.0] * 4 + [-2.0] * 2 + [0.0]
    assert (answer["reward"], answer["scores"], answer["extra_logs"]) == (1.25, 0.0, {"turn": 2.0})
    assert answer["step_rewards"] == [(7, 1.0), (13, 0.25)]
    assert answer["truncated"] is False
    assert [received for received, _ in engine.received] == ["Q:hi ", "Q:hi ab</s> no;"]
    states = [{key: value for key, value in item.items() if key != "sampling_params"} for item in Echo.seen[0]]
    assert states == [
        {"observation": "hi ", "label": "L"},
        {"observation_text": "Q:hi ", "action_text": "ab</s>", "label": "L"},
        {"observation_text": "Q:hi ab</s> no;", "action_text": "c</s>", "label": "L"},
    ]


def test_each_sample_gets_a_new_instance():
    executor = MultiTurnAgentExecutor(Echo)
    for _ in range(2):
        execute(executor, "a", "b")
    assert [len(states) for states in Echo.seen] == [3, 3]


class Endless(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {"rewards": 1, "environment_feedback": ".", "done": False}


def test_agent_that_is_never_done_ends_at_max_length():
    answer, _ = execute(MultiTurnAgentExecutor(Endless), *["ab"] * 9, max_length=16)
    assert decode(answer["observation_tokens"]) == "hi ab.ab.ab.ab.ab."
    assert answer["truncated"]
    assert answer["reward"] == 5.0


def test_agent_that_is_never_done_ends_at_max_turns():
    executor = MultiTurnAgentExecutor(Endless)
    executor.max_turns = 2
    answer, engine = execute(executor, *["ab"] * 9)
    assert len(engine.received) == 2
    assert answer["truncated"]


def test_sampling_params_from_a_step_apply_to_the_next_turn():
    class Colder(Endless):
        async def step(self, states, **kwargs):
            params = copy.copy(states["sampling_params"])
            params.temperature, params.max_tokens, params.stop = 0.5, 3, ["x"]
            return await super().step(states) | {"sampling_params": params}

    executor = MultiTurnAgentExecutor(Colder)
    executor.max_turns = 2
    _, engine = execute(executor, "a", "b")
    assert [(item.temperature, item.max_tokens, item.stop) for _, item in engine.received] == [
        (1.0, 8, []),
        (0.5, 3, ["x"]),
    ]


def test_too_long_observation_is_cut_with_a_warning(capsys):
    executor = MultiTurnAgentExecutor(Endless)
    executor.max_turns = 1
    answer, engine = execute(executor, "ab", prompt="0123456789", max_length=10, max_tokens=4)
    assert engine.received[0][0] == "456789"
    assert decode(answer["observation_tokens"]) == "456789ab."
    assert "an observation of 10 tokens is truncated to its last 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (None, RolloutError, "step returned None"),
        ({"rewards": 1}, RolloutError, "without done; its keys are ['rewards']"),
        ({"done": True}, RolloutError, "without rewards"),
        ({"done": True, "rewards": None}, RewardError, "'rewards' of the agent's step is None"),
        ({"done": True, "rewards": float("nan")}, RewardError, "is nan"),
        ({"done": True, "rewards": 1, "scores": "high"}, RewardError, "'scores' of the agent's step is 'high'"),
        ({"done": True, "rewards": 1, "environment_feedback": 5}, RolloutError, "'environment_feedback'"),
    ],
)
def test_malformed_step_result_is_reported(result, error, message):
    class Wrong(AgentInstanceBase):
        async def step(self, states, **kwargs):
            return result

    with pytest.raises(error) as caught:
        execute(MultiTurnAgentExecutor(Wrong), "a")
    assert message in str(caught.value)


def test_reset_without_an_observation_is_an_error():
    class Wrong(Endless):
        async def reset(self, states, **kwargs):
            return {"observation": None}

    with pytest.raises(RolloutError, match="reset returned"):
        execute(MultiTurnAgentExecutor(Wrong), "a")


def test_base_classes_are_abstract():
    with pytest.raises(TypeError):
        AgentExecutorBase()
    with pytest.raises(TypeError):
        AgentInstanceBase()


def test_single_turn_executor_scores_with_a_function():
    def reward_func(queries, prompts, labels):
        assert (queries, prompts, labels) == (["hi ok</s>"], ["hi "], ["L"])
        return {"rewards": torch.tensor([2.0]), "extra_logs": {"n": 1}}

    answer, _ = execute(SingleTurnAgentExecutor(reward_func), "ok</s>")
    assert answer["action_ranges"] == [(3, 6)]
    assert (answer["reward"], answer["scores"], answer["extra_logs"]) == (2.0, 2.0, {"n": 1.0})
    assert answer["truncated"] is False


def test_single_turn_executor_accepts_a_file_or_nothing(write):
    file = write("def reward_func(queries, prompts): return [float(len(queries[0]))]")
    assert execute(SingleTurnAgentExecutor(file), "ok")[0]["reward"] == 5.0
    with pytest.raises(RewardError, match="created without a reward"):
        execute(SingleTurnAgentExecutor(), "ok")
    with pytest.raises(ConfigError, match="no function reward_func"):
        SingleTurnAgentExecutor(write("x = 1", "empty.py"))


STEP_001 = """
    step_idx = 0
    async def step(observation, action, label, **kwargs):
        global step_idx
        step_idx += 1
        done = step_idx == 2
        return {"rewards": float(done), "scores": 0.5, "next_observation": observation + action + f"[{step_idx}]",
                "done": done, "sampling_params": kwargs.get("sampling_params"), "extra_logs": {"steps": step_idx}}
"""


def test_step_function_starts_with_fresh_globals_in_each_episode(write):
    file = write(STEP_001)
    for _ in range(2):
        answer, engine = execute(MultiTurnAgentExecutor(lambda: StepFunction(file)), "ab</s>", "c")
        assert decode(answer["observation_tokens"]) == "hi ab</s>[1]c[2]"
        assert answer["action_ranges"] == [(3, 6), (9, 10)]
        assert (answer["reward"], answer["scores"], answer["extra_logs"]) == (1.0, 0.5, {"steps": 2.0})
        assert [received for received, _ in engine.received] == ["hi ", "hi ab</s>[1]"]


def test_step_function_may_return_the_tuple_of_0_8_0(write):
    file = write("""
        async def step(state, action, label):
            return 0.5, state + action + ";", action == "b", {"extra_logs": {"n": 1}}
    """)
    answer, _ = execute(MultiTurnAgentExecutor(lambda: StepFunction(file)), "a", "b")
    assert decode(answer["observation_tokens"]) == "hi a;b;"
    assert (answer["reward"], answer["extra_logs"]) == (1.0, {"n": 1.0})


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("observation + action.upper()", "at character 3 it has 'hi AB', but observation + action has 'hi ab'"),
        ("observation", "at character 3 it has 'hi '"),
        ("None", "step returned None as 'next_observation'"),
    ],
)
def test_step_function_may_only_append(write, after, message):
    file = write(f"""
        def step(observation, action, label):
            return {{"rewards": 0, "next_observation": {after}, "done": False}}
    """)
    with pytest.raises(RolloutError) as error:
        execute(MultiTurnAgentExecutor(lambda: StepFunction(file)), "ab")
    assert message in str(error.value)


def test_sampling_params_may_be_any_object_with_vllms_names():
    class Foreign:
        temperature = 0.5
        stop = "END"
        max_tokens = None

    got = params_for_engine(Foreign(), limit=7, seed=5)
    assert got == SamplingParams(max_tokens=7, temperature=0.5, seed=5, stop=("END",))


@pytest.mark.parametrize(("name", "value"), [("n", 2), ("temperature", "hot"), ("max_tokens", 0), ("stop", ["a", ""])])
def test_unusable_sampling_params_are_an_error(name, value):
    params = params_for_agent(SamplingParams(max_tokens=4))
    setattr(params, name, value)
    with pytest.raises(RolloutError, match="sampling_params"):
        params_for_engine(params, limit=7, seed=5)


def test_each_request_of_an_episode_has_its_own_seed():
    seeds = [seed_for(3, request) for request in range(20)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 20
    assert seeds == [seed_for(3, request) for request in range(20)]
