"""Files written for upstream's versions since 0.8.0 run unchanged."""

import asyncio
import math
from pathlib import Path

import pytest
from sessions import WATCHDOG, Lockstep, Scripted, decode, params, prompt, run

from openrlhf.agents.multi_turn import read_step
from openrlhf.agents.trajectory import read_reward
from openrlhf.errors import ConfigError, RewardError, RolloutError

TUPLES = """
    async def step(state, action, label):
        done = action == "b"
        return float(done), state + action + ";", done, {}
"""
NEXT_STATE = """
    turn = 0
    async def step(state, action, label, **kwargs):
        global turn
        turn += 1
        return {"rewards": turn, "scores": 0.5, "next_state": state + action + ";", "done": turn == 2,
                "sampling_params": kwargs.get("sampling_params"), "extra_logs": {"turns": turn}}
"""
OLDER = """
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

    class AgentInstance(AgentInstanceBase):
        async def __init__(self, *args, **kwargs):
            self.turns = 0

        async def reset(self, states, **kwargs):
            return {"observation": states["observation"] + states["label"]}

        async def step(self, states, **kwargs):
            self.turns += 1
            return {"rewards": 1.0, "scores": 0.25, "environment_feedback": ";", "done": self.turns == 2,
                    "sampling_params": states.get("sampling_params"), "extra_logs": {"turns": self.turns}}

    class AgentExecutor(AgentExecutorBase):
        def __init__(self, max_steps, max_length, llm_engine, %s):
            super().__init__(AgentInstance, max_steps, max_length, llm_engine, %s)
"""
QUEUE = """
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

    class AgentInstance(AgentInstanceBase):
        async def step(self, states, **kwargs):
            return states

    class AgentExecutor(AgentExecutorBase):
        def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
            assert (max_steps, max_length) == (10000, 64)
            super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

        async def execute(self, prompt, label, sampling_params):
            async with self.semaphore:
                ids = self.hf_tokenizer.encode(prompt, add_special_tokens=False)
                sampling_params.max_tokens = self.max_length - len(ids)
                drawn = (await self.generate(ids, sampling_params)).outputs[0]
                await self.result_queue.put({
                    "prompt": prompt, "label": label, "reward": float(len(drawn.text)), "scores": 0.5, "extra_logs": {},
                    "observation_tokens": ids + drawn.token_ids,
                    "action_ranges": [(len(ids), len(ids) + len(drawn.token_ids))],
                })
"""
ONCE = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images):
            assert images is None
            ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
            drawn = (await llm_engine.generate(ids, sampling_params)).outputs[0]
            return {"observation_tokens": ids + drawn.token_ids, "action_ranges": [(len(ids), len(ids) + 1)],
                    "reward": %s, "scores": %s}
"""


def test_step_function_may_return_a_tuple(build, write):
    got = run(build(agent_func_path=write(TUPLES)), [Scripted("a", "b")]).trajectories[0]
    assert (decode(got.input_ids), got.reward) == ("1+1=a;b", 1.0)


def test_step_function_may_return_next_state(build, write):
    got = run(build(agent_func_path=write(NEXT_STATE)), [Scripted("a", "b")]).trajectories[0]
    assert (decode(got.input_ids), got.reward, got.score) == ("1+1=a;b", 3.0, 0.5)
    assert got.extra_logs == {"turns": 2.0}


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("arguments", ["hf_tokenizer, result_queue", "result_queue"])
def test_legacy_executor_plays_its_agent(build, write, arguments):
    file = write(OLDER % (arguments, arguments))
    got = run(build(agent_func_path=file), [Scripted("a", "b"), Scripted("c", "d")]).trajectories
    assert [decode(item.input_ids) for item in got] == ["1+1=2a;b", "1+1=2c;d"]
    assert [(item.reward, item.score) for item in got] == [(2.0, 0.25)] * 2


@pytest.mark.slow(seconds=2)
def test_legacy_executor_ends_at_max_turns(build, write):
    file = write((OLDER % (("hf_tokenizer, result_queue",) * 2)).replace("self.turns == 2", "False"))
    got = run(build(agent_func_path=file, max_turns=3), [Scripted("a")]).trajectories[0]
    assert decode(got.input_ids) == "1+1=2a;a;a"


@pytest.mark.slow(seconds=2)
def test_results_in_the_queue_are_assigned_to_their_episodes(build, write):
    sessions = [Scripted("a"), Scripted("bcd"), Scripted("ef")]
    got = run(build(agent_func_path=write(QUEUE)), sessions).trajectories
    assert [(decode(item.input_ids), item.reward) for item in got] == [("1+1=a", 1), ("1+1=bcd", 3), ("1+1=ef", 2)]
    assert got[1].rollout_log_probs.tolist() == [0.0] * 4 + [-1.0] * 3


@pytest.mark.slow(seconds=2)
def test_missing_result_in_the_queue_is_reported(build, write):
    file = write(QUEUE.replace("await self.result_queue.put(", "dict("))
    with pytest.raises(RolloutError, match="neither put a result into"):
        run(build(agent_func_path=file), [Scripted("a")])


def test_unknown_constructor_argument_is_rejected_before_training(build, write):
    file = write(QUEUE.replace("hf_tokenizer, result_queue):", "hf_tokenizer, result_queue, actor):"))
    with pytest.raises(ConfigError, match="created without arguments, but its constructor requires actor"):
        build(agent_func_path=file)


def test_missing_reward_is_left_to_a_reward_model(build, write):
    executor = build(agent_func_path=write(ONCE % (None, 0.5)), reward_pretrain="./model")
    got = run(executor, [Scripted("a")]).trajectories[0]
    assert math.isnan(got.reward)
    assert got.score == 0.5


def test_missing_reward_without_a_reward_model_names_the_flag():
    with pytest.raises(RewardError, match=r"'reward' of the episode is None.*Try: --reward_pretrain"):
        read_reward(None, scored_later=False)


def test_single_turn_agent_without_a_reward_leaves_it_to_models(build, write):
    file = write("""
        from openrlhf.utils.agent import SingleTurnAgentExecutor

        class AgentExecutor(SingleTurnAgentExecutor):
            pass
    """)
    got = run(build(agent_func_path=file, reward_pretrain="./model"), [Scripted("a")]).trajectories[0]
    assert decode(got.input_ids) == "1+1=a"
    assert math.isnan(got.reward)
    assert math.isnan(got.score)


def test_images_are_rejected():
    step = {"rewards": 1.0, "environment_feedback": "", "done": False}
    assert read_step(step | {"environment_images": []}).reward == 1.0
    with pytest.raises(RolloutError, match="'environment_images', but models are trained on text"):
        read_step(step | {"environment_images": ["screen.png"]})


def test_reward_file_can_grade_answers(build, write):
    file = write(r"""
        from openrlhf.utils import extract_boxed_answer, grade_answer

        def reward_func(queries, prompts, labels, **kwargs):
            answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
            right = [float(grade_answer(answer, extract_boxed_answer(label))) for answer, label in zip(answers, labels)]
            return {"rewards": right, "scores": right, "extra_logs": {"math_accuracy": sum(right) / len(right)}}
    """)
    asked = prompt(label=r"so it is \boxed{\frac{1}{2}}")
    got = run(build(remote_rm_url=file), [Scripted("0.5"), Scripted("2")], asked=asked).trajectories
    assert [item.reward for item in got] == [1.0, 0.0]


PYTHON = Path(__file__).parents[2] / "examples/python"  # files that upstream's scripts name


@pytest.mark.slow(seconds=2)
def test_agent_func_gives_second_chances(build):
    executor = build(agent_func_path=str(PYTHON / "agent_func.py"), context_length=256)
    got = run(executor, [Scripted("2"), Scripted("3", "2.0"), Scripted("4")]).trajectories
    assert [(item.reward, item.score) for item in got] == [(1.0, 1.0), (0.5, 1.0), (0.0, 0.0)]
    assert [item.extra_logs["tries"] for item in got] == [1.0, 2.0, 3.0]


def test_math_reward_func_grades_answers(build):
    executor = build(remote_rm_url=str(PYTHON / "math_reward_func.py"))
    got = run(executor, [Scripted("so Answer: 2.0"), Scripted("Answer: 3"), Scripted("2")]).trajectories
    assert [item.reward for item in got] == [1.0, 0.0, 0.0]
    assert [item.extra_logs["answered"] for item in got] == [1.0, 1.0, 0.0]


def test_other_files_named_by_scripts_exist():
    names = (
        "reward_func",
        "agent_func_gem_multiturn",
        "agent_func_openai_server_executor",
        "agent_func_nemogym_executor",
    )
    assert [name for name in names if not (PYTHON / f"{name}.py").is_file()] == []


# Keep the engine of the first episode for all: in an attribute, or in a server with its own thread and event loop.
KEPT = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        engine = None

        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
            self.engine = self.engine or llm_engine
            ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
            ranges = []
            for turn in range(2):
                drawn = (await self.ask(ids, sampling_params)).outputs[0]
                ranges.append((len(ids), len(ids) + len(drawn.token_ids)))
                ids = ids + drawn.token_ids
            return {"observation_tokens": ids, "action_ranges": ranges, "rollout_log_probs": [0.0] * len(ids),
                    "reward": 1.0}

        async def ask(self, ids, params):
            return await self.engine.generate(ids, params)
"""
SERVED = (
    KEPT.replace("from openrlhf", "import asyncio, json, threading, types\n\n    from openrlhf", 1)
    + """
    class Asked(AgentExecutor):
        port = None

        async def ask(self, ids, params):
            if self.port is None:
                self.params, ready = params, threading.Event()
                threading.Thread(target=lambda: asyncio.run(self.serve(ready)), daemon=True).start()
                ready.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(json.dumps(ids).encode() + b"\\n")
            answer = json.loads(await reader.readline())
            writer.close()
            return types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=answer)])

        async def serve(self, ready):
            async def handle(reader, writer):
                output = await self.engine.generate(json.loads(await reader.readline()), self.params)
                writer.write(json.dumps(output.outputs[0].token_ids).encode() + b"\\n")
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await server.serve_forever()

    AgentExecutor = Asked
"""
)


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("source", [KEPT, SERVED], ids=["attribute", "server"])
def test_engine_of_the_first_episode_serves_later_ones(build, write, source):
    """Run two prompts in lockstep, in which a request assigned to the wrong episode would hang; then two more."""

    async def go(executor):
        made = []
        try:
            for _ in range(2):
                groups = [prompt("1+1="), prompt("2+2=", index=8)]
                sessions = Lockstep.group(("a", "b"), ("a", "b"), ("c", "d"), ("c", "d"))
                jobs = [
                    executor.run_group(item, params(2), sessions[2 * place : 2 * place + 2])
                    for place, item in enumerate(groups)
                ]
                made += [
                    item
                    for result in await asyncio.wait_for(asyncio.gather(*jobs), WATCHDOG)
                    for item in result.trajectories
                ]
        finally:
            await asyncio.wait_for(executor.close(), WATCHDOG)
        return made

    made = asyncio.run(go(build(agent_func_path=write(source))))
    assert [decode(item.input_ids) for item in made] == ["1+1=ab", "1+1=ab", "2+2=cd", "2+2=cd"] * 2
    assert [item.version for item in made] == [3] * 8
