"""A stream of groups: replacement of rejected groups, oversampling, staleness, and what a checkpoint stores of it."""

import asyncio
import random
from dataclasses import replace

import pytest

from openrlhf.agents.executor import GroupResult
from openrlhf.algo.kl import FixedKL
from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.errors import RolloutError
from openrlhf.rl.checkpoints import GROUPS_FILE, QUEUE_FILE, load_state
from openrlhf.rl.group_stream import GeneratedRollouts, StreamState
from openrlhf.rl.record import read_groups, write_groups, write_queue
from openrlhf.rl.rollouts import GroupRunner, PromptOrder
from openrlhf.rl.state import State
from openrlhf.training import checkpoint
from openrlhf.types import Completion, Request
from tests.rl.stand_ins import EchoEngine, NoModels, OneTurn, RewardFunction, prompts
from tests.samples import plain

NUM_PROMPTS = 24
WATCHDOG = 120.0  # seconds
CONFIG = replace_flags(
    RLConfig(), rollout_batch_size=4, n_samples_per_prompt=2, max_len=8, max_new_tokens=10, seed=5, vllm_num_engines=1
)  # with vLLM, groups do not run in rounds
FILTERED = replace_flags(CONFIG, dynamic_filtering=True)


async def settle():
    """Let the event loop run until only the test can cause anything."""
    for _ in range(50):
        await asyncio.sleep(0)


class HeldEngine:
    """An engine that finishes the requests of a prompt when the test says so."""

    def __init__(self):
        self.version = 0
        self.held = {}  # position of a prompt -> the event that its requests wait for
        self.cancelled = []

    async def generate(self, requests):
        version, position = self.version, requests[0].prefix
        try:
            await self.held.setdefault(position, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(position)
            raise
        return [Completion.of((1,), (-1.0,), "", "stop", version) for _ in requests]

    async def started(self, *positions):
        """Wait until exactly these prompts have started, and no other is about to start."""
        for _ in range(1000):
            if sorted(self.held) == sorted(positions):
                break
            await asyncio.sleep(0)
        await settle()
        assert sorted(self.held) == sorted(positions)

    @property
    def waiting(self):
        return sorted(position for position, event in self.held.items() if not event.is_set())

    def finish(self, *positions):
        for position in positions:
            self.held[position].set()


class Sampled(OneTurn):
    """One request per sample, through its session."""

    async def run_group(self, prompt, params, sessions):
        requests = (Request(prompt.input_ids, param) for param in params)
        made = await asyncio.gather(*(session.generate(one) for session, one in zip(sessions, requests, strict=True)))
        result = await super().run_group(prompt, params, sessions)
        return GroupResult([replace(item, version=made[0].version) for item in result.trajectories])


def make_source(engine, config, reward=lambda prompt, sample: 0.5, *, state=None, workers=None, count=NUM_PROMPTS):
    order = PromptOrder(prompts(count), 1, 0)
    return GeneratedRollouts(order, engine, GroupRunner(Sampled(reward), print), workers or NoModels(), config, state)


def positions(rollout):
    return [item.prompt.index for item in rollout.trajectories][::2]


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, WATCHDOG))


async def all_rollouts(source):
    """Return the non-empty rollouts of a source until it is exhausted."""
    rollouts, place = [], 0
    while place < len(source):
        rollouts.append(await source.take(len(rollouts), place))
        place = rollouts[-1].next_place
    return [rollout for rollout in rollouts if rollout.trajectories]


LIMITS = {
    "rounds in one process": {"vllm_num_engines": None},
    "small rounds in one process": {"vllm_num_engines": None, "vllm_generate_batch_size": 3},
    "stream": {},
    "few at a time": {"vllm_generate_batch_size": 1},
    "few episodes": {"max_concurrent_episodes": 4},
    "rollouts ahead": {"async_train": True, "async_queue_size": 2},
}


@pytest.mark.parametrize("reject", [0.0, 0.4, 0.9])
def test_rollouts_do_not_depend_on_limits_or_on_the_order_in_which_groups_finish(reject):
    """The samples are those of serial rounds: the accepted groups in prompt order."""
    kept = [position for position in range(NUM_PROMPTS) if random.Random(position).random() >= reject]

    class Shuffled(EchoEngine):
        async def generate(self, requests):
            for _ in range(random.Random(requests[0].params.seed).randrange(40)):
                await asyncio.sleep(0)
            return await super().generate(requests)

    async def rollouts(limits):
        config = replace_flags(FILTERED, **limits)
        source = make_source(Shuffled(), config, lambda prompt, sample: 0.5 if prompt.index in kept else 0.0)
        source.open_rollouts(0, 2 if "async_train" in limits else 0)
        return await all_rollouts(source)

    found = {name: asyncio.run(rollouts(limits)) for name, limits in LIMITS.items()}
    first = found["rounds in one process"]
    assert [positions(rollout) for rollout in first] == [kept[start : start + 4] for start in range(0, len(kept), 4)]
    for name, others in found.items():
        assert [plain(other.trajectories) for other in others] == [plain(one.trajectories) for one in first], name
        assert others[-1].next_place == NUM_PROMPTS


def test_a_rejected_group_is_replaced_before_the_others_finish():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, FILTERED, lambda prompt, sample: 0.0 if prompt.index in (1, 4) else 0.5)
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(0, 1, 2, 3)
        engine.finish(1)
        await engine.started(0, 1, 2, 3, 4)
        engine.finish(4)
        await engine.started(0, 1, 2, 3, 4, 5)
        engine.finish(5, 3, 2)
        await engine.started(0, 1, 2, 3, 4, 5)
        assert not taking.done()
        engine.finish(0)
        rollout = await taking
        assert positions(rollout) == [0, 2, 3, 5]
        assert rollout.next_place == 6
        assert rollout.metrics["dynamic_filtering_pass_rate"] == pytest.approx(400 / 6)

    run(scenario())


def test_reward_models_score_all_groups_that_have_finished():
    class SlowModel(RewardFunction):
        def __init__(self):
            super().__init__(lambda item: 0.5)
            self.calls, self.may_answer = [], asyncio.Event()

        async def rewards(self, trajectories):
            self.calls.append([item.prompt.index for item in trajectories])
            await self.may_answer.wait()
            return await super().rewards(trajectories)

    async def scenario():
        engine, models = HeldEngine(), SlowModel()
        source = make_source(engine, FILTERED, lambda prompt, sample: float("nan"), workers=models)
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(0, 1, 2, 3)
        engine.finish(2)
        while not models.calls:
            await asyncio.sleep(0)
        engine.finish(0, 1, 3)
        await engine.started(0, 1, 2, 3)
        models.may_answer.set()
        assert positions(await taking) == [0, 1, 2, 3]
        assert models.calls == [[2, 2], [0, 0, 1, 1, 3, 3]]

    run(scenario())


def test_rollouts_that_may_begin_are_generated_together():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, replace_flags(CONFIG, async_train=True))
        source.open_rollouts(0, 1)
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(*range(8))
        engine.finish(*range(1, 8))
        await engine.started(*range(8))
        assert not taking.done()  # rollouts are cut in prompt order, so none of their samples is older than the queue
        engine.finish(0)
        assert positions(await taking) == [0, 1, 2, 3]
        source.open_rollouts(1, 2)
        await engine.started(*range(12))
        assert positions(await source.take(1, 4)) == [4, 5, 6, 7]
        await source.close()
        assert sorted(set(engine.cancelled)) == [8, 9, 10, 11]
        assert source.state.unfinished == [8, 9, 10, 11]

    run(scenario())


def test_a_resumed_run_begins_with_its_own_rollout():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, replace_flags(CONFIG, async_train=True), state=StreamState(drawn=12))
        source.open_rollouts(3, 4)
        await engine.started(*range(12, 20))
        await source.close()

    run(scenario())


OVERSAMPLED = replace_flags(CONFIG, async_train=True, vllm_generate_batch_size=6)


def test_a_surplus_is_left_to_the_next_rollout():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, OVERSAMPLED)
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(*range(6))
        engine.finish(5, 4, 2, 1)
        first = await taking
        assert positions(first) == [1, 2, 4, 5]
        assert (first.place, first.next_place) == (0, 4)
        await engine.started(*range(6))  # no rollout is open
        engine.version = 1
        taking = asyncio.create_task(source.take(1, 4))
        await engine.started(*range(10))
        engine.finish(0, 3, 6, 9)
        second = await taking
        assert positions(second) == [0, 3, 6, 9]
        assert [item.version for item in second.trajectories][::2] == [0, 0, 1, 1]
        assert second.version == 0
        assert engine.cancelled == []
        await source.close()

    run(scenario())


def test_aborted_stragglers_are_generated_again():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, replace_flags(OVERSAMPLED, async_train=False, abort_stragglers=True))
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(*range(6))
        engine.finish(0, 1, 2, 3)
        first = await taking
        assert positions(first) == [0, 1, 2, 3]
        assert first.metrics == {"rollout/aborted_groups": 2.0}
        await asyncio.sleep(0)
        assert sorted(set(engine.cancelled)) == [4, 5]
        engine.version = 1
        del engine.held[4], engine.held[5]
        taking = asyncio.create_task(source.take(1, 4))
        await engine.started(*range(10))
        engine.finish(4, 5, 6, 7)
        second = await taking
        assert positions(second) == [4, 5, 6, 7]
        assert {item.version for item in second.trajectories} == {1}
        await source.close()

    run(scenario())


def test_samples_beyond_the_staleness_limit_are_generated_again():
    async def scenario():
        engine = HeldEngine()
        source = make_source(engine, replace_flags(OVERSAMPLED, max_staleness=1, async_queue_size=1))
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(*range(6))
        engine.finish(1, 2, 3, 4)
        assert positions(await taking) == [1, 2, 3, 4]
        engine.version = 1
        taking = asyncio.create_task(source.take(1, 4))
        await engine.started(*range(10))
        engine.finish(6, 7, 8, 9)
        assert positions(await taking) == [6, 7, 8, 9]
        engine.version = 2
        engine.finish(0)  # it has version 0, and training on the next rollout starts at version 2
        await engine.started(*range(10))
        del engine.held[0]
        taking = asyncio.create_task(source.take(2, 8))
        await engine.started(*range(14))
        engine.finish(0, 10, 11, 12)
        third = await taking
        assert positions(third) == [0, 10, 11, 12]
        assert {item.version for item in third.trajectories} == {2}
        assert third.metrics == {"rollout/stale_groups": 1.0}
        await source.close()

    run(scenario())


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_every_prompt_is_trained_exactly_once_after_a_resume(stop_after, tmp_path):
    """The surplus is part of a checkpoint: finished groups as they are, prompts of unfinished ones to draw again."""

    async def first_part():
        engine = HeldEngine()
        state = StreamState()
        source = make_source(engine, OVERSAMPLED, state=state)
        trained, place = [], 0
        for number in range(stop_after):
            taking = asyncio.create_task(source.take(number, place))
            await settle()
            engine.finish(*engine.waiting[-4:])
            rollout = await taking
            trained, place = trained + positions(rollout), rollout.next_place
        engine.finish(engine.waiting[-1])
        await settle()
        write_groups(tmp_path / GROUPS_FILE, state.accepted)
        saved, finished = list(state.unfinished), [group[0].prompt.index for group in state.accepted]
        assert sorted(trained + saved + finished) == list(range(state.drawn))
        assert place == len(trained)
        assert (len(saved), len(finished)) == (1, 1)
        drawn = state.drawn
        await source.close()
        return trained, place, saved, drawn

    trained, place, again, drawn = asyncio.run(first_part())
    state = StreamState(drawn, again=again, accepted=read_groups(tmp_path / GROUPS_FILE))

    async def second_part():
        source = make_source(EchoEngine(), OVERSAMPLED, state=state)
        used, number, rest = place, stop_after, []
        while used < len(source):
            rollout = await source.take(number, used)
            used, number = rollout.next_place, number + 1
            rest += positions(rollout)
        return rest

    assert sorted(trained + asyncio.run(second_part())) == list(range(NUM_PROMPTS))


def test_prompts_rejected_since_the_last_rollout_are_not_drawn_again_by_a_resumed_run(tmp_path):
    """Prompts 0 to 2 are done; 3 was rejected after their rollout was cut, while 4 to 7 were running."""
    state = State(FixedKL(0.0), version=1, made=1, place=3, stream=StreamState(8, running=[4, 5, 6, 7]))
    checkpoint.write_state(tmp_path, {"step": 1, "settings": {}, **state.plain()})
    write_queue(tmp_path / QUEUE_FILE, state.queue)
    write_groups(tmp_path / GROUPS_FILE, state.stream.accepted)
    resumed = load_state(tmp_path, FixedKL(0.0)).stream
    assert (resumed.drawn, resumed.again, resumed.done) == (8, [4, 5, 6, 7], 4)


def test_a_group_that_user_code_cancels_ends_the_rollout_with_an_error():
    def cancel(prompt, sample):
        raise asyncio.CancelledError

    with pytest.raises(RolloutError, match="the samples of prompt 0 were cancelled"):
        run(make_source(EchoEngine(), CONFIG, cancel).take(0, 0))


def test_an_error_of_a_group_reaches_the_caller_and_ends_the_others():
    async def scenario():
        engine = HeldEngine()

        def reward(prompt, sample):
            if prompt.index == 2:
                raise RolloutError("no grader")
            return 1.0

        source = make_source(engine, CONFIG, reward)
        taking = asyncio.create_task(source.take(0, 0))
        await engine.started(0, 1, 2, 3)
        engine.finish(2)
        with pytest.raises(RolloutError, match="no grader"):
            await taking
        await source.close()
        assert sorted(set(engine.cancelled)) == [0, 1, 3]
        assert source.scheduler.running == 0

    run(scenario())
