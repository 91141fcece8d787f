"""Stand-ins for an engine, executors and workers: they answer immediately and record what they were given."""

import asyncio

import torch

from openrlhf.agents.executor import GroupResult
from openrlhf.rl.workers import ModelRewards
from openrlhf.types import Completion, Prompt, Request
from tests.samples import make_trajectory


def prompts(count):
    return [Prompt(number, f"p{number}", (number, number), datasource=f"d{number % 2}") for number in range(count)]


class EchoEngine:
    """An engine that answers with the seed and records its batches.

    Like `HFEngine`, it makes one batch of all requests of an iteration of the event loop.
    """

    def __init__(self):
        self.version = 0
        self.batches = []
        self.gathers = False

    async def generate(self, requests):
        if not self.gathers:
            self.gathers = True
            self.batches.append([])
            asyncio.get_running_loop().call_soon(setattr, self, "gathers", False)
        self.batches[-1] += [request.prompt_token_ids for request in requests]
        await asyncio.sleep(0)
        return [
            Completion.of((request.params.seed % 2**31,), (-1.0,), "", "stop", self.version) for request in requests
        ]


class OneTurn:
    """An executor of one turn per sample; `reward(prompt, sample)` gives the reward, None means failure."""

    def __init__(self, reward):
        self.reward = reward

    async def run_group(self, prompt, params, sessions):
        result = GroupResult([])
        for number, (param, session) in enumerate(zip(params, sessions, strict=True)):
            reward = self.reward(prompt, number)
            if reward is None:
                result.failures.append("failed")
            else:
                ids = (*prompt.input_ids, param.seed % 2**31)
                mask, log_probs = (False, False, True), (0.0, 0.0, -1.0)
                item = make_trajectory(prompt, ids, mask, log_probs, reward, truncated=number == 0)
                result.trajectories.append(item)
            session.close()
        return result

    async def close(self):
        pass


class SeveralTurns:
    """An executor in which each sample takes `turns(prompt, sample)` turns."""

    def __init__(self, turns):
        self.turns = turns

    async def run_group(self, prompt, params, sessions):
        for number, (param, session) in enumerate(zip(params, sessions, strict=True)):
            for turn in range(self.turns(prompt, number)):
                await session.generate(Request((prompt.index, number, turn), param))
            session.close()
        return GroupResult([])

    async def close(self):
        pass


class NoModels:
    """Workers without a reward model."""

    async def rewards(self, trajectories):
        return None


class RewardFunction:
    """Workers whose only reward model is a function of the sample."""

    def __init__(self, reward):
        self.reward = reward

    async def rewards(self, trajectories):
        scores = torch.tensor([float(self.reward(item)) for item in trajectories])
        return ModelRewards(scores, scores, [()] * len(trajectories))
