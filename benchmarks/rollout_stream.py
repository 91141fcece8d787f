"""Compare ways to fill a rollout with the run's own stream of groups, in simulated time. Needs neither GPU nor model.

    python benchmarks/rollout_stream.py [--rollouts 6]

Rollouts of 128 prompts with 8 samples each, on engines with room for all of them. The seconds of a sample are
lognormal, with a median of 50 and at most 290. A group passes the filter with the probability in the first column.
`rounds` replaces rejected groups when all others have finished, as in one process; `stream` replaces each of them
immediately; `ahead` also begins the next rollout (--async_train). The last two keep 160 groups in progress
(--vllm_generate_batch_size 160): slow ones are left for the next rollout or aborted (--abort_stragglers). Training
takes no time here, so the seconds per rollout are those of generation.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence

from openrlhf.agents.executor import GroupResult, Session
from openrlhf.agents.scores import Scored
from openrlhf.agents.trajectory import join_turn
from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.rl.group_stream import GeneratedRollouts
from openrlhf.rl.rollouts import GroupRunner, PromptOrder, is_kept
from openrlhf.types import Completion, Prompt, Request, SamplingParams

PROMPTS = [Prompt(number, "", (1, 2)) for number in range(20_000)]
FLAGS = {
    "rollout_batch_size": 128,
    "n_samples_per_prompt": 8,
    "max_len": 8,
    "max_new_tokens": 5,
    "vllm_num_engines": 1,
    "dynamic_filtering": True,
}
WAYS = {
    "rounds": {},
    "stream": {},
    "ahead": {"async_train": True, "async_queue_size": 1},
    "oversampled": {"vllm_generate_batch_size": 160, "async_train": True},
    "aborting": {"vllm_generate_batch_size": 160, "abort_stragglers": True},
}


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def jump(timeout: float | None = None) -> object:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


class SimulatedEngine:
    """An engine that takes a random time for each request, which depends only on its seed."""

    version = 0

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        await asyncio.sleep(min(290.0, random.Random(requests[0].params.seed).lognormvariate(3.9, 0.9)))
        return [Completion.of((1,), (-1.0,), "", "stop", self.version) for _ in requests]


class SimulatedExecutor:
    """One turn per sample; a group has a score of 0.5, which passes the filter, or of 0."""

    def __init__(self, pass_rate: float) -> None:
        self.pass_rate = pass_rate

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        answers = (
            session.generate(Request(prompt.input_ids, sample), last=True)
            for session, sample in zip(sessions, params, strict=True)
        )
        made = await asyncio.gather(*answers)
        score = 0.5 if random.Random(f"pass {prompt.index}").random() < self.pass_rate else 0.0
        return GroupResult([join_turn(prompt, completion, 8, Scored(score, score)) for completion in made])

    async def close(self) -> None:
        """Do nothing."""


class NoModels:
    """Workers without reward models."""

    async def rewards(self, trajectories: object) -> None:
        return None


async def seconds_per_rollout(way: str, pass_rate: float, rollouts: int) -> float:
    config, engine = replace_flags(RLConfig(), **FLAGS, **WAYS[way]), SimulatedEngine()
    order = PromptOrder(PROMPTS, 1, 0)
    source = GeneratedRollouts(order, engine, GroupRunner(SimulatedExecutor(pass_rate), print), NoModels(), config)
    if way == "rounds":
        source.in_rounds = True
    place = 0
    for number in range(rollouts):
        source.open_rollouts(number, number + (way == "ahead"))
        rollout = await source.take(number, place)
        assert len(rollout.trajectories) == config.rollout.samples_per_rollout
        assert is_kept(rollout.trajectories[:8], config.rollout)
        place, engine.version = rollout.next_place, number + 1
    seconds = asyncio.get_running_loop().time() / rollouts
    await source.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=6)
    rollouts = parser.parse_args().rollouts
    print(f"{'pass rate':>12}" + "".join(f"{way:>14}" for way in WAYS))
    for pass_rate in (1.0, 0.5, 0.3):
        found = []
        for way in WAYS:
            with asyncio.Runner(loop_factory=SimulatedTime) as runner:
                found.append(runner.run(seconds_per_rollout(way, pass_rate, rollouts)))
        print(f"{pass_rate:>12}" + "".join(f"{seconds:>12.0f} s" for seconds in found))


if __name__ == "__main__":
    main()
