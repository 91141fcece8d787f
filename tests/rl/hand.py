"""An engine, an executor and prompts by hand: everything answers at once and can be counted."""

import torch

from openrlhf.agents.executor import GroupResult
from openrlhf.rl.workers import ModelRewards
from openrlhf.types import Completion, Prompt, Request, Trajectory


def prompts(count):
    return [Prompt(number, f"p{number}", (number, number), datasource=f"d{number % 2}") for number in range(count)]


class EchoEngine:
    """Answers with the seed; remembers the batches that it was given."""

    def __init__(self):
        self.version = 0
        self.batches = []

    async def generate(self, requests):
        self.batches.append([request.prompt_token_ids for request in requests])
        return [Completion((request.params.seed,), (-1.0,), "", "stop", self.version) for request in requests]


class OneTurn:
    """Asks once for each sample; the reward is the function's of prompt and sample number, None fails."""

    def __init__(self, reward):
        self.reward = reward

    async def run_group(self, prompt, params, sessions):
        made = GroupResult([])
        for number, (param, session) in enumerate(zip(params, sessions, strict=True)):
            reward = self.reward(prompt, number)
            if reward is None:
                made.failures.append("failed")
            else:
                ids = (*prompt.input_ids, param.seed)
                mask, log_probs = (False, False, True), (0.0, 0.0, -1.0)
                made.trajectories.append(Trajectory(prompt, ids, mask, log_probs, reward, reward, number == 0, 0))
            session.close()
        return made

    async def close(self):
        pass


class Turns:
    """Each sample of each prompt takes as many turns as the function says."""

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


class Judge:
    """Workers with one reward model: a function of the sample."""

    def __init__(self, judge):
        self.judge = judge

    async def rewards(self, trajectories):
        scores = torch.tensor([float(self.judge(item)) for item in trajectories])
        return ModelRewards(scores, scores, [()] * len(trajectories))
