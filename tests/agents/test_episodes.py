"""Agents in real processes: exact tokens, failures that stay with their episode, and no process left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from sessions import WATCHDOG, Lockstep, Scripted, decode, params, prompt, run, run_all

from openrlhf.config.sections.model import ModelFlags
from openrlhf.errors import ConfigError, RewardError, RolloutError
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm
from openrlhf.rl.request_batching import EpisodeScheduler
from openrlhf.rollout.hf import HFEngine
from tests.commands import is_running
from tests.samples import plain
from tests.tiny import make_model

pytestmark = pytest.mark.slow(seconds=1)

AGENT = """
    import asyncio, os, signal, sys, time
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class Agent(AgentInstanceBase):
        async def __init__(self, *args, **kwargs):
            self.turn = 0

        async def step(self, states, **kwargs):
            self.turn += 1
            action = states["action_text"]
            {body}
            return {{"rewards": self.turn, "environment_feedback": ";", "done": self.turn == 2,
                    "sampling_params": states["sampling_params"], "extra_logs": {{"turns": self.turn}}}}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(Agent)
"""


def agent(body="pass"):
    return AGENT.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 12).strip())


def test_two_turns_through_a_process(build, write):
    body = """
        given = states["sampling_params"]
        assert (given.temperature, given.top_p, given.top_k, given.stop) == (0.5, 0.9, 7, ["Q"])
        assert given.seed is None
    """
    session = Scripted("ab</s>", "c")
    drawn = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ("Q",)}
    got = run(build(agent_func_path=write(agent(body)), step_rewards=True), [session], **drawn).trajectories[0]
    assert decode(got.input_ids) == "1+1=ab</s>;c"
    assert got.action_mask.tolist() == [False] * 4 + [True] * 3 + [False] + [True]
    assert got.rollout_log_probs.tolist() == [0.0] * 4 + [-1.0] * 3 + [0.0, -2.0]
    assert (got.reward, got.score, got.extra_logs) == (3.0, 3.0, {"turns": 2.0})
    assert got.step_rewards == ((6, 1.0), (8, 2.0))
    assert (got.truncated, got.version, session.closed) == (False, 3, 1)
    first, second = session.requests
    assert decode(first.prompt_token_ids) == "1+1="
    assert decode(second.prompt_token_ids) == "1+1=ab</s>;"
    assert first.params == params(1, **drawn)[0]
    assert second.params.seed != 0  # each turn has its own seed
    assert (first.params.max_tokens, second.params.max_tokens) == (16, 16)


def test_custom_executor(build, write):
    file = write("""
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
                ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
                params = sampling_params.clone()
                params.stop, params.max_tokens = ["."], 1000
                output = (await llm_engine.generate(prompt_token_ids=ids, sampling_params=params)).outputs[0]
                assert [place[token].logprob for token, place in zip(output.token_ids, output.logprobs)] == [-1.0] * 2
                assert (output.text, output.finish_reason) == ("ab", "stop")
                assert (label, max_length) == ("2", 64)
                return {"observation_tokens": ids + output.token_ids, "action_ranges": [(len(ids), len(ids) + 2)],
                        "rollout_log_probs": None, "reward": 1.0}
    """)
    session = Scripted("ab")
    got = run(build(agent_func_path=file), [session]).trajectories[0]
    assert decode(got.input_ids) == "1+1=ab"
    assert got.rollout_log_probs.tolist() == [0.0] * 4 + [-1.0, -1.0]
    assert session.requests[0].params.stop == (".",)
    assert session.requests[0].params.max_tokens == 60  # the rest of the context


def test_step_function_has_its_own_globals_in_each_episode(build, write):
    file = write("""
        turn = 0
        async def step(observation, action, label, **kwargs):
            global turn
            turn += 1
            return {"rewards": turn, "next_observation": observation + action + ";", "done": turn == 2,
                    "sampling_params": kwargs["sampling_params"]}
    """)
    got = run(build(agent_func_path=file), [Scripted("a", "b"), Scripted("c", "d")])
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b", "1+1=c;d"]
    assert [item.reward for item in got.trajectories] == [3.0, 3.0]


def test_agent_that_is_never_done_ends_at_max_turns(build, write):
    file = write(agent("self.turn = 0"))
    got = run(build(agent_func_path=file, max_turns=3), [Scripted("a")]).trajectories[0]
    assert decode(got.input_ids) == "1+1=a;a;a"
    assert got.truncated


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(q, p): ...", "neither a class AgentExecutor nor a function"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_file_without_an_agent_is_rejected_before_training(build, write, source, message):
    with pytest.raises(ConfigError, match=message):
        build(agent_func_path=write(source))


def test_crash_fails_only_the_episode_that_caused_it(build, write):
    """Run four episodes in one process: one succeeds, one blocks it forever, one is slow, one kills it."""
    body = """
        match action:
            case "v": time.sleep(3600)
            case "w": await asyncio.sleep(0.3)
            case "x": os.kill(os.getpid(), signal.SIGKILL)
    """
    sessions = Lockstep.group(*((text, "b") for text in "avwx"))
    executor = build(agent_func_path=write(agent(body)), reward_timeout=1.0, on_reward_error="skip")
    got = run(executor, sessions)
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b", "1+1=w;b"]
    assert [item.reward for item in got.trajectories] == [3.0, 3.0]
    blocked, killed = got.failures
    assert "did not return within 1 s (--reward_timeout), for sample 1 of prompt 7 '1+1='" in str(blocked)
    assert "ended its process: killed by SIGKILL, for sample 3 of prompt 7" in str(killed)
    assert all(isinstance(failure, RewardError) for failure in got.failures)
    assert [len(session.requests) for session in sessions] == [
        2,
        1,
        2,
        1,
    ]  # completions are replayed, not sampled again
    assert [session.closed for session in sessions] == [1] * 4


def test_episodes_are_restarted_if_their_process_is_killed_while_they_wait(build, write, tmp_path):
    class Killer(Lockstep):
        async def generate(self, request):
            completion = await super().generate(request)
            if len(self.requests) == 2:
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            return completion

    file = write(agent(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"))
    sessions = []
    sessions += [Killer(sessions, "a", "b"), Lockstep(sessions, "c", "d"), Lockstep(sessions, "e", "f")]
    got = run(build(agent_func_path=file), sessions)
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b", "1+1=c;d", "1+1=e;f"]
    assert [len(session.requests) for session in sessions] == [2, 2, 2]


def test_hanging_episode_does_not_disturb_others_in_its_process(build, write, tmp_path):
    """A waiting episode is cancelled; its process continues, and the other episode runs only once."""
    log = str(tmp_path / "log")
    body = f"""
        with open({log!r}, "a") as log:
            log.write(action)
        if action == "x":
            await asyncio.sleep(3600)
        await asyncio.sleep(0.6)
    """
    executor = build(agent_func_path=write(agent(body)), reward_timeout=1.0, on_reward_error="skip")
    got = run(executor, [Scripted("a", "b"), Scripted("x")])
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b"]
    assert "did not return within 1 s" in str(got.failures[0])
    said = (tmp_path / "log").read_text()
    assert sorted(said) == ["a", "b", "x", "x"]


def test_exception_fails_only_the_episode_that_raised_it(build, write):
    body = """
        match action:
            case "v": raise KeyError("k")
            case "w": sys.exit(2)
            case "x": return {"rewards": float("nan"), "done": True}
            case "y": return {"done": True}
            case "z": raise asyncio.CancelledError
    """
    executor = build(agent_func_path=write(agent(body)), on_reward_error="skip")
    got = run(executor, [Scripted(text, "b") for text in "avwxyz"])
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b"]
    expected = [
        (RewardError, "raised KeyError: 'k' at"),
        (RewardError, "called sys.exit(2) at"),
        (RewardError, "'rewards' of the agent's step is nan"),
        (RolloutError, "without rewards"),
        (RewardError, "raised CancelledError"),
    ]
    for failure, (error, message) in zip(got.failures, expected, strict=True):
        assert type(failure) is error
        assert message in str(failure)


def test_exception_stops_the_run_by_default(build, write):
    executor = build(agent_func_path=write(agent("if action == 'x':\n    raise OSError('no disk')")))
    with pytest.raises(RewardError, match=r"raised OSError: no disk at .*user.py:.*, for sample 1 of prompt 7"):
        run(executor, [Scripted("a", "b"), Scripted("x")])


class Slow(Scripted):
    """Session of an engine that blocks the trainer's event loop for longer than the timeout of user code."""

    async def generate(self, request):
        if not self.requests:
            time.sleep(1.5)
        return await super().generate(request)


def test_engine_time_is_not_charged_even_if_it_blocks_the_trainers_loop(build, write):
    executor = build(agent_func_path=write(agent("await asyncio.sleep(0.2)")), reward_timeout=1.0)
    got = run(executor, [Slow("a", "b"), Scripted("c", "d")])
    assert [decode(item.input_ids) for item in got.trajectories] == ["1+1=a;b", "1+1=c;d"]


def test_requests_of_an_episode_reach_the_engine_one_at_a_time(build, write):
    file = write("""
        import asyncio
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
                ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
                outputs = await asyncio.gather(*(llm_engine.generate(ids, sampling_params) for _ in range(4)))
                best = max((item.outputs[0] for item in outputs), key=lambda item: item.text)
                return {"observation_tokens": ids + best.token_ids, "action_ranges": [(len(ids), len(ids) + 1)],
                        "rollout_log_probs": None, "reward": 1.0}
    """)

    class OneAtATime(Scripted):
        busy = False

        async def generate(self, request):
            assert not self.busy
            self.busy = True
            await asyncio.sleep(0)
            self.busy = False
            return await super().generate(request)

    session = OneAtATime("a", "d", "c", "b")
    got = run(build(agent_func_path=file), [session]).trajectories[0]
    assert decode(got.input_ids) == "1+1=d"
    assert got.rollout_log_probs[-1] == -2.0
    assert len({request.params.seed for request in session.requests}) == 4


def test_request_that_is_not_awaited_ends_before_its_session_closes(build, write, caplog):
    file = write("""
        import asyncio
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
                ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
                self.unused = asyncio.ensure_future(llm_engine.generate(ids, sampling_params))
                await asyncio.sleep(0)
                return {"observation_tokens": ids + [7], "action_ranges": [(len(ids), len(ids) + 1)],
                        "rollout_log_probs": [0.0] * len(ids) + [-1.0], "reward": 1.0}
    """)
    sessions = Lockstep.group(["a"], ["b"])
    got = run(build(agent_func_path=file), sessions)
    assert [item.reward for item in got.trajectories] == [1.0, 1.0]
    assert "never retrieved" not in caplog.text


def test_episodes_with_a_real_engine_are_reproducible(build, write, tmp_path, tokenizer):
    folder = make_model(tmp_path / "model")
    model = load_causal_lm(folder, ModelFlags(pretrain=folder), device=torch.device("cpu"), packing=False)
    engine = HFEngine(Network(model), tokenizer)

    class Session(Scripted):
        """A session of the RL loop, whose requests meet in the batches of the engine."""

        def __init__(self, episode):
            super().__init__()
            self.episode = episode

        async def generate(self, request):
            self.requests.append(request)
            return await self.episode.generate(request)

        def close(self):
            self.episode.close()

    def play(executor):
        """Return the trajectories of two groups, and their sessions."""

        async def go():
            scheduler = EpisodeScheduler(engine)
            try:
                async with scheduler.open_group(3) as first, scheduler.open_group(3) as second:
                    groups = [[Session(episode) for episode in group] for group in (first, second)]
                    jobs = [executor.run_group(prompt(), params(3, max_tokens=6), group) for group in groups]
                    results = await asyncio.wait_for(asyncio.gather(*jobs), WATCHDOG)
                return [item for result in results for item in result.trajectories], [*groups[0], *groups[1]]
            finally:
                await executor.close()

        return asyncio.run(go())

    file = write(agent("assert action"))
    items, sessions = play(build(agent_func_path=file))
    again, _ = play(build(agent_func_path=file))
    assert plain(items) == plain(again)
    assert len({tuple(item.input_ids) for item in items[:3]}) == 3
    assert [item.input_ids.tolist() for item in items[:3]] == [item.input_ids.tolist() for item in items[3:]]
    for item, session in zip(items, sessions, strict=True):
        assert all(value < 0 for value, acted in zip(item.rollout_log_probs, item.action_mask, strict=True) if acted)
        spans = [item.input_ids[len(r.prompt_token_ids) :][: r.params.max_tokens] for r in session.requests]
        assert len(spans) == 2
        begun = session.requests[1].prompt_token_ids
        assert tuple(item.input_ids[: len(begun)]) == begun


def test_many_episodes_share_processes(build, write):
    executor = build(agent_func_path=write(agent()), processes=2)
    groups = [(prompt(index=n), [Scripted("a", "b") for _ in range(4)]) for n in range(10)]
    got = run_all(executor, groups)
    assert [len(item.trajectories) for item in got] == [4] * 10
    assert {decode(sample.input_ids) for item in got for sample in item.trajectories} == {"1+1=a;b"}
    assert all(len(session.requests) == 2 for _, group in groups for session in group)


PARENT = """
    import asyncio, os, sys
    sys.path.insert(0, {root!r})
    from openrlhf.agents.sandbox.messages import RewardInput, WorkerSpec
    from openrlhf.agents.sandbox.pool import Pool
    from openrlhf.agents.sandbox.handle import PoolLimits
    pool = Pool(WorkerSpec({file!r}, "reward"), PoolLimits(timeout=3600.0))
    pool.start()
    asyncio.run(pool.call(RewardInput([], [], [], seed=0), retries=0))
"""


DAEMONS = """
    import os, subprocess, sys, time

    def start_daemon():
        "A grandchild in a session of its own, whose parent has ended."
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()
            if (daemon := os.fork()) == 0:
                os.execvp("sleep", ["sleep", "3600"])
            os.write(write, str(daemon).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return int(os.read(read, 20))

    def reward_func(queries, prompts):
        pids = [os.getpid(), subprocess.Popen(["sleep", "3600"]).pid, start_daemon()]
        with open({out!r}, "a") as out:
            out.write(" ".join(map(str, pids)) + "\\n")
        {then}
        return [0.0] * len(queries)
"""


def wait_for_end(pids):
    deadline = time.monotonic() + WATCHDOG
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_worker_processes_die_with_the_trainer(write, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = write(DAEMONS.format(out=str(fifo), then="time.sleep(3600)"))
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    source = textwrap.dedent(PARENT.format(root=root, file=file))
    trainer = subprocess.Popen([sys.executable, "-c", source])
    pids = [int(pid) for pid in fifo.read_text().split()]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for_end(pids)


@pytest.mark.parametrize("then", ["pass", "os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 19); os._exit(3)"])
def test_daemons_of_a_worker_die_with_it(build, write, tmp_path, then):
    """This holds if the worker is closed, dies, or stops the process that cleans up after it."""
    pids = tmp_path / "pids"
    executor = build(remote_rm_url=write(DAEMONS.format(out=str(pids), then=then)))
    if then == "pass":
        run(executor, [Scripted("a")])
    else:
        with pytest.raises(RewardError, match=r"killed by SIGKILL|exit code 3"):
            run(executor, [Scripted("a")])
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == (3 if then == "pass" else 6)  # a reward that failed is tried again
    wait_for_end(found)
