"""Executor for agent files: runs each sample of a prompt as an episode in a worker process.

The pool runs the user's code. The dict that it returns is validated and converted to a `Trajectory`; a list of dicts
becomes several trajectories (`branches`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from openrlhf.agents.branches import read_episode
from openrlhf.agents.executor import GroupResult, OnError, SampleError, Session, sample_name
from openrlhf.agents.futures import gather_or_cancel
from openrlhf.agents.node_pools import NodePools, RemotePool, join_nodes
from openrlhf.agents.overrides import EngineLogProbs, check_overrides, find_mismatch, temperature_factors
from openrlhf.agents.sandbox.call import CallFailure
from openrlhf.agents.sandbox.messages import EpisodeInput, WorkerSpec
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.trajectory import read_trajectory
from openrlhf.errors import EngineError, RewardError, RolloutError
from openrlhf.types import Prompt, SamplingParams, Trajectory

RETRIES = 1  # retries of an episode after a crash or a timeout


@dataclass
class AgentEpisodes:
    """GroupExecutor that runs the samples of a prompt as concurrent episodes of an agent."""

    pool: Pool | NodePools
    context_length: int
    step_rewards: bool  # keep the reward of each turn
    on_error: OnError
    log_probs: EngineLogProbs = field(default_factory=EngineLogProbs)

    @property
    def spec(self) -> WorkerSpec:
        return self.pool.spec

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        """Run all episodes concurrently; with --on_reward_error skip, return the errors of failed episodes."""

        async def run(number: int, params: SamplingParams, session: Session) -> list[Trajectory] | SampleError:
            try:
                return await self._run_episode(prompt, number, params, session)
            except EngineError:  # the engine failed, not this sample
                raise
            except (RewardError, RolloutError) as error:
                if self.on_error == "stop":
                    raise
                return error
            finally:
                session.close()

        pairs = zip(params, sessions, strict=True)
        outcomes = await gather_or_cancel(run(number, *pair) for number, pair in enumerate(pairs))
        trajectories = [item for outcome in outcomes if isinstance(outcome, list) for item in outcome]
        return GroupResult(trajectories, [outcome for outcome in outcomes if not isinstance(outcome, list)])

    async def close(self) -> None:
        """End the worker processes."""
        await self.pool.close()

    async def add_pools(self, pools: Sequence[RemotePool]) -> None:
        """Also run episodes on other nodes; may be called once."""
        assert isinstance(self.pool, Pool)
        self.pool = await join_nodes(self.pool, pools)

    async def _run_episode(
        self, prompt: Prompt, number: int, params: SamplingParams, session: Session
    ) -> list[Trajectory]:
        """Run one episode and validate its result; errors name the agent file and the sample."""
        sample, agent = sample_name(prompt, sample=number), self.spec.name
        try:
            given = EpisodeInput(prompt.text, prompt.label, params)
            played = await self.pool.call(given, retries=RETRIES, generate=session.generate)
        except CallFailure as failure:
            # A RolloutError in the worker means that the agent violated the interface; other errors are RewardErrors.
            kind = RolloutError if failure.error_class == RolloutError.__name__ else RewardError
            text = failure.text if failure.error_class else f"{agent} {failure.text}"
            raise failure.to_error(kind, f"{text}, for {sample}") from None
        try:
            check_overrides(params, played.params, self.log_probs)
            read = partial(
                read_trajectory,
                prompt=prompt,
                completions=played.completions,
                context_length=self.context_length,
                step_rewards=self.step_rewards,
                scored_later=self.spec.scored_later,
                temperature_factors=temperature_factors(params, played.params),
                whole_vocabulary=not any(find_mismatch(params, turn, self.log_probs) for turn in played.params),
            )
            return read_episode(played.result, number, read, step_rewards=self.step_rewards)
        except (RewardError, RolloutError) as error:
            message = f"{agent}: {error.message}, for {sample}"
            raise type(error)(message, try_this=error.try_this) from None
