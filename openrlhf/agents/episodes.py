"""Executor for agent files: runs each sample of a prompt as an episode in a worker process.

The pool runs the user's code; the dict it returns is validated and converted to a `Trajectory`.
"""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.agents.executor import GroupResult, OnError, SampleError, Session, all_of, sample_name, settle
from openrlhf.agents.overrides import bends, check_overrides, temperature_factors
from openrlhf.agents.rewards import episode_error
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.agents.sandbox.process import Failure
from openrlhf.agents.trajectory import read_trajectory
from openrlhf.errors import EngineError, RewardError, RolloutError
from openrlhf.types import Prompt, SamplingParams, Trajectory

RETRIES = 1  # of an episode that crashed its process or timed out


class Episodes:
    """GroupExecutor that runs the samples of a prompt as concurrent episodes of an agent."""

    def __init__(
        self, pool: Pool, *, context_length: int, step_rewards: bool, on_error: OnError, compares_engine: bool = False
    ) -> None:
        self.pool = pool
        self.context_length = context_length
        self.step_rewards = step_rewards
        self.on_error: OnError = on_error
        self.compares_engine = compares_engine
        self.source = f"the agent in {pool.spec.file}"

    async def run_group(
        self, prompt: Prompt, params: Sequence[SamplingParams], sessions: Sequence[Session]
    ) -> GroupResult:
        outcomes = await all_of(
            self._episode(prompt, number, item, session)
            for number, (item, session) in enumerate(zip(params, sessions, strict=True))
        )
        return settle(outcomes, self.on_error)

    async def close(self) -> None:
        await self.pool.close()

    async def _episode(
        self, prompt: Prompt, number: int, params: SamplingParams, session: Session
    ) -> Trajectory | SampleError:
        """Run one episode and close its session; return the error of a failed sample if failures are skipped."""
        try:
            return await self._run(prompt, number, params, session)
        except EngineError:
            raise
        except (RewardError, RolloutError) as error:
            if self.on_error == "stop":
                raise
            return error
        finally:
            session.close()

    async def _run(self, prompt: Prompt, number: int, params: SamplingParams, session: Session) -> Trajectory:
        """Run one episode and validate its result; errors name the agent file and the sample."""
        body = {"prompt": prompt.text, "label": prompt.label, "params": params}
        sample = sample_name(prompt, sample=number)
        try:
            reply = await self.pool.call(body, retries=RETRIES, generate=session.generate)
        except Failure as failure:
            raise episode_error(failure, self.source, sample) from None
        try:
            check_overrides(params, reply.params, compares_engine=self.compares_engine)
            return read_trajectory(
                reply.result,
                prompt,
                reply.completions,
                context_length=self.context_length,
                step_rewards=self.step_rewards,
                scored_later=self.pool.spec.scored_later,
                temperature_factors=temperature_factors(params, reply.params),
                whole_vocabulary=not any(map(bends, reply.params)),
            )
        except (RewardError, RolloutError) as error:
            message = f"{self.source}: {error.message}, for {sample}"
            raise type(error)(message, try_this=error.try_this) from None
