"""Single-turn executor for agent files: generate one response and score it.

It corresponds to `single_turn.SingleTurnSamples`, but runs in a worker process, and users can extend it.
"""

from __future__ import annotations

from collections.abc import Callable

from openrlhf.agents.interface import EpisodeExecutor, EpisodeResult, EpisodeTask
from openrlhf.agents.loading import RewardFunction, adapt_reward, find_reward, load_module, resolve
from openrlhf.agents.reward_server import RewardServer
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import Samples, read_scores
from openrlhf.agents.transcript import Transcript
from openrlhf.errors import RewardError
from openrlhf.types import Prompt

SERVER_TIMEOUT = 180.0  # seconds


class SingleTurnAgentExecutor(EpisodeExecutor):
    """Executor that generates one response and scores it.

    `remote_rm_url` is a reward function, the path of a .py file that defines reward_func, or the address of a reward
    server. Without it, reward models must score the sample later.
    """

    def __init__(self, remote_rm_url: Callable[..., object] | str | None = None) -> None:
        self.reward: RewardFunction | None = None
        if callable(remote_rm_url):
            self.reward = adapt_reward(remote_rm_url, "the reward function in the agent's file")
        elif remote_rm_url is not None and remote_rm_url.endswith(".py"):
            self.reward = find_reward(load_module(remote_rm_url), remote_rm_url)
        elif remote_rm_url is not None:
            self.reward = RewardFunction(RewardServer(remote_rm_url, SERVER_TIMEOUT).score, is_async=True)

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Generate one response to the prompt and score it."""
        transcript = Transcript.begin(task.prompt, task)
        prompt_ids = tuple(transcript.tokens)
        action = (await task.engine.generate(list(prompt_ids), task.sampling_params)).outputs[0]
        transcript.add_turn(action)
        result = transcript.result(truncated=action.finish_reason == "length")
        if self.reward is None:
            if not self.scored_later:
                raise RewardError(
                    "SingleTurnAgentExecutor was created without a reward",
                    try_this="SingleTurnAgentExecutor(reward_func), or --reward_pretrain for a reward model",
                )
            return {**result, "reward": None, "scores": None, "extra_logs": {}}
        query = str(task.tokenizer.decode(transcript.tokens))
        returned = plain(await resolve(self.reward([query], [task.prompt], [task.label])))
        sample = Samples((Prompt(0, task.prompt, prompt_ids, task.label),), (query,), (action.text,))
        (scored,) = read_scores(returned, sample, "the reward")
        if isinstance(scored, RewardError):
            raise scored
        return {**result, "reward": scored.reward, "scores": scored.score, "extra_logs": dict(scored.extra_logs)}
