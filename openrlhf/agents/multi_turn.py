"""Executor for multi-turn episodes: policy and environment take turns until the episode is done or reaches a limit.

`MultiTurnAgentExecutor` runs this loop with a user's `AgentInstanceBase` in a worker process. Step functions and
executors for older versions (`legacy.py`) run in the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from openrlhf.agents.interface import AgentInstanceBase, EpisodeExecutor, EpisodeResult, EpisodeTask, StepStates
from openrlhf.agents.loading import create_instance, resolve
from openrlhf.agents.sandbox.messages import plain
from openrlhf.agents.scores import kind_of, read_logs, read_number
from openrlhf.agents.transcript import Transcript, tokenise
from openrlhf.errors import RolloutError

STEP = "the agent's step"


class MultiTurnAgentExecutor(EpisodeExecutor):
    """Executor that runs an AgentInstanceBase, with a new instance for each sample."""

    def __init__(self, agent_instance_cls: Callable[[], AgentInstanceBase]) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def run_episode(self, task: EpisodeTask) -> EpisodeResult:
        """Alternate generation and `step` until the episode is done, the context is full, or max_turns is reached.

        Rewards are summed; for scores and extra_logs, the last values are used.
        """
        instance = await create_instance(self.agent_instance_cls)
        first = await resolve(instance.reset({"observation": task.prompt, "label": task.label}))
        transcript = Transcript.begin(read_observation(first), task)
        params: object = task.sampling_params
        step_rewards: list[tuple[int, float]] = []  # (index of a turn's last token, reward)
        score: float | None = None
        logs: dict[str, float] = {}
        total, turns, done, finish_reason = 0.0, 0, False, "stop"
        while not done and len(transcript.tokens) < task.max_length and turns != self.max_turns:
            before = transcript.text
            action = (await task.engine.generate(list(transcript.tokens), params)).outputs[0]
            finish_reason = action.finish_reason
            transcript.add_turn(action)

            states: StepStates = {
                "observation_text": before,
                "action_text": action.text,
                "label": task.label,
                "sampling_params": params,
            }
            result = read_step(await resolve(instance.step(states)))
            total, turns, done = total + result.reward, turns + 1, result.done
            if transcript.action_ranges:
                step_rewards.append((transcript.action_ranges[-1][1] - 1, result.reward))
            score = score if result.score is None else result.score
            logs = logs if result.logs is None else result.logs
            transcript.add_feedback(result.feedback, tokenise(result.feedback, task.tokenizer))
            params = result.sampling_params or params
        return {
            **transcript.result(truncated=not done or finish_reason == "length"),
            "reward": total,
            "scores": total if score is None else score,
            "extra_logs": logs,
            "step_rewards": step_rewards,
        }


def read_observation(result: object) -> str:
    """Validate the result of `reset` and return its observation."""
    observation = result.get("observation") if isinstance(result, Mapping) else None
    if not isinstance(observation, str):
        raise RolloutError(f"the agent's reset returned {kind_of(result)}: expected a dict with a string 'observation'")
    return observation


@dataclass(frozen=True)
class StepResult:
    """The validated result of `step`; None for keys that it lacks."""

    reward: float
    done: bool
    score: float | None
    logs: dict[str, float] | None
    feedback: str  # empty if the environment gives none
    sampling_params: object  # parameters of the next turn


def read_step(result: object) -> StepResult:
    """Validate the result of `step`; raise a RolloutError that describes the problem."""
    if not isinstance(result, Mapping):
        raise RolloutError(f"{STEP} returned {kind_of(result)}: expected a dict with 'rewards' and 'done'")
    missing = [key for key in ("rewards", "done") if key not in result]
    if missing:
        raise RolloutError(f"{STEP} returned a dict without {' and '.join(missing)}; its keys are {list(result)}")
    if result.get("environment_images"):
        raise RolloutError(
            f"{STEP} returned 'environment_images', but models are trained on text only",
            try_this="describe the images in 'environment_feedback'",
        )
    feedback = result.get("environment_feedback")
    if not isinstance(feedback, str | None):
        raise RolloutError(f"'environment_feedback' of {STEP} is {kind_of(feedback)}: expected a string")
    reward = read_number(plain(result["rewards"]), f"'rewards' of {STEP}")
    score, logs = result.get("scores"), result.get("extra_logs")
    return StepResult(
        reward=reward,
        done=bool(result["done"]),
        score=None if score is None else read_number(plain(score), f"'scores' of {STEP}"),
        logs=None if logs is None else read_logs(plain(logs), 1, STEP)[0],
        feedback=feedback or "",
        sampling_params=result.get("sampling_params"),
    )
