"""The RL loop, written once: a producer of rollouts and a trainer around a bounded queue.

Synchronous training is the queue of length zero. A rollout numbered i may begin once the weights have reached version
i - k, so a sample is at most k versions old when it is trained. In lockstep (one process) it begins exactly then, which
makes a run a function of its seed; on a cluster timing decides within the same bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from openrlhf.agents.executor import GroupExecutor
from openrlhf.algo.kl import AdaptiveKL, FixedKL
from openrlhf.monitor import Monitor
from openrlhf.rl.evaluate import evaluate
from openrlhf.rl.experience import Experience, ExperienceSettings, make_experience
from openrlhf.rl.proof import GapSettings, GapWatch
from openrlhf.rl.record import Recorder
from openrlhf.rl.rollouts import Rollout, RolloutSettings, Source
from openrlhf.rl.samples import Batching, batch_samples
from openrlhf.rl.workers import WeightSync, Workers
from openrlhf.rollout.engine import Engine
from openrlhf.types import Prompt

STANDING = ("_lr", "_loss_scale", "_skipped_steps")  # ends of the names of metrics that are not averaged over steps


@dataclass(frozen=True)
class LoopSettings:
    """How often what happens; plain values from the flags."""

    train_batch_size: int
    epochs: int
    queue_size: int
    seed: int
    max_rollouts: int | None
    freezing_steps: int = -1
    eval_every: int = -1
    save_every: int = -1
    log_every: int = 1
    lockstep: bool = True
    gap: GapSettings | None = None  # none where engine and trainer cannot be compared


@dataclass(frozen=True)
class Parts:
    """Who takes part in a run."""

    source: Source
    engine: Engine
    executor: GroupExecutor
    workers: Workers
    sync: WeightSync
    monitor: Monitor
    recorder: Recorder
    eval_prompts: Sequence[Prompt] = ()


@dataclass(frozen=True)
class Settings:
    """What each part of the loop needs to know."""

    loop: LoopSettings
    rollout: RolloutSettings
    evaluation: RolloutSettings
    experience: ExperienceSettings
    scoring: Batching
    training: Batching


@dataclass
class State:
    """Where a run stands: everything that resuming needs beside weights and optimizer."""

    kl: FixedKL | AdaptiveKL
    version: int = 0  # updates done
    made: int = 0  # rollouts generated
    place: int = 0  # of the next rollout in its source
    queue: deque[Rollout] = field(default_factory=deque)
    best: float | None = None  # value of the best evaluation
    best_key: str | None = None  # and its metric

    def plain(self) -> dict[str, Any]:
        """Without the queue, which the recorder writes beside it."""
        return {
            "kl": asdict(self.kl),
            "version": self.version,
            "made": self.made,
            "place": self.place,
            "best": self.best,
            "best_key": self.best_key,
        }


class Controller:
    """Runs the loop from where its state stands."""

    def __init__(self, parts: Parts, settings: Settings, state: State) -> None:
        self.parts = parts
        self.settings = settings
        self.state = state
        self.changed = asyncio.Condition()
        gap = settings.loop.gap
        self.gap = GapWatch(gap, parts.workers, settings.scoring, parts.monitor) if gap is not None else None
        self.generation_seconds: dict[int, float] = {}  # by the number of the rollout
        self.step_began = time.perf_counter()
        self.last: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}

    async def run(self, after_step: AfterStep) -> None:
        """Trains until prompts or steps run out; `after_step` saves, and may stop the run by raising."""
        if self.state.version == 0:
            await self.evaluate()
        self._between_steps(self.step_began)
        producer = asyncio.create_task(self._produce())
        consumer = asyncio.create_task(self._consume(after_step))
        try:
            done, _ = await asyncio.wait((producer, consumer), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (producer, consumer):
                task.cancel()
            await asyncio.gather(producer, consumer, return_exceptions=True)

    @property
    def exhausted(self) -> bool:
        """True when no rollout is left to make; asked anew, because a resumed run may have more steps or prompts."""
        most = self.settings.loop.max_rollouts
        return self.state.place >= len(self.parts.source) or (most is not None and self.state.made >= most)

    async def _produce(self) -> None:
        state, parts = self.state, self.parts
        while not self.exhausted:
            async with self.changed:
                await self.changed.wait_for(lambda: state.made <= state.version + self.settings.loop.queue_size)
            began = time.perf_counter()
            rollout = await parts.source.take(state.made, state.place)
            self.generation_seconds[rollout.number] = time.perf_counter() - began
            async with self.changed:
                state.place = rollout.next_place
                if rollout.trajectories:  # an empty one is trained by nobody, so nobody may wait for it
                    state.made += 1
                    state.queue.append(rollout)
                self.changed.notify_all()

    async def _consume(self, after_step: AfterStep) -> None:
        state = self.state
        while True:
            async with self.changed:
                await self.changed.wait_for(self._may_train)
            if not state.queue:
                return
            rollout = state.queue.popleft()
            values = await self._train(rollout)
            await self._finish_step(rollout, values, after_step)

    def _may_train(self) -> bool:
        """In lockstep a rollout waits until those that its weights must make have been made."""
        state, loop = self.state, self.settings.loop
        ahead = loop.queue_size if loop.lockstep else 0
        return self.exhausted or len(state.queue) > ahead

    async def _finish_step(self, rollout: Rollout, values: dict[str, float], after_step: AfterStep) -> None:
        """The new weights to the engine, what is logged, and what is due after so many steps.

        A step takes from the end of what followed the one before until here: with the wait for its samples, and without
        generation that ran beside the training of others.
        """
        loop, state, parts = self.settings.loop, self.state, self.parts
        version = state.version + 1
        trained = time.perf_counter()
        await parts.sync.sync(version)
        now = time.perf_counter()
        state.version = version
        values |= {"timing/broadcast": now - trained, "timing/step_total": now - self.step_began}
        values |= await self._probe(rollout, values)
        self.last = values
        if version % loop.log_every == 0:
            parts.monitor.log("train", version, values)
        parts.monitor.advance(shown(values))
        if loop.eval_every > 0 and version % loop.eval_every == 0:
            await self.evaluate()
        await after_step(self)
        self._between_steps(now)
        async with self.changed:
            self.changed.notify_all()

    def _between_steps(self, since: float) -> None:
        """The next step begins now; what was done since then belongs to none."""
        self.step_began = time.perf_counter()
        self.parts.monitor.leave_out(self.step_began - since)

    async def _train(self, rollout: Rollout) -> dict[str, float]:
        """One rollout: experience, its optimizer steps, the KL controller; what there is to log about it."""
        settings, state, parts = self.settings, self.state, self.parts
        began, coef = time.perf_counter(), state.kl.coef
        if settings.loop.queue_size == 0:
            await parts.sync.begin_training()
        experience = await make_experience(
            rollout.trajectories, parts.workers, settings.scoring, settings.experience, coef
        )
        values = {} if self.gap is None else await self.gap.look(rollout.trajectories, state.version, state.version + 1)
        scored = time.perf_counter()
        writing = asyncio.create_task(
            asyncio.to_thread(parts.recorder.write, state.version + 1, experience.samples)
        )  # beside the training
        epochs = range(settings.loop.epochs)
        cut = [places for epoch in epochs for places in self._minibatches(len(experience.samples), epoch)]
        steps = [
            await self._step(experience, places, coef, self._progress(rollout, number / len(cut)))
            for number, places in enumerate(cut)
        ]
        await writing
        if experience.kl is not None:
            state.kl = state.kl.updated(experience.kl, len(experience.samples))
        values |= averaged(steps) | experience.metrics | rollout.metrics
        values |= {"kl_coef": coef, "staleness": float(state.version - rollout.version)}
        values |= {"timing/make_experience": scored - began, "timing/ppo_train": time.perf_counter() - scored}
        if rollout.number in self.generation_seconds:  # not where it comes from a checkpoint's queue
            values["timing/generation"] = self.generation_seconds.pop(rollout.number)
        return values

    async def _probe(self, rollout: Rollout, values: dict[str, float]) -> dict[str, float]:
        """Compares engine and trainer right after a sync, where no later rollout of these weights will tell in time."""
        if self.gap is None:
            return {}
        self.gap.note_update(values)
        if not self.gap.probe_is_due(self.state.version):
            return {}
        prompts = list({item.prompt.index: item.prompt for item in rollout.trajectories}.values())
        return await self.gap.probe(self.parts.engine, prompts, self.settings.rollout, self.state.version)

    def _progress(self, rollout: Rollout, trained: float) -> float:
        """How much of the run is done when so much of a rollout is trained.

        How many optimizer steps a run has depends on the groups that are filtered out or fail. It ends when prompts run
        out or at --max_steps, so those measure it, whichever is nearer.
        """
        prompts = rollout.place + trained * (rollout.next_place - rollout.place)
        most = self.settings.loop.max_rollouts
        return max(prompts / len(self.parts.source), 0.0 if most is None else (rollout.number + trained) / most)

    async def _step(
        self, experience: Experience, places: Sequence[int], kl_coef: float, progress: float
    ) -> dict[str, float]:
        samples = [experience.samples[place] for place in places]
        batching = self.settings.training
        parts = batching.cut([len(sample.trajectory.input_ids) for sample in samples])
        batches = [batch_samples([samples[place] for place in part], batching.layout) for part in parts]
        train_policy = self.state.version + 1 > self.settings.loop.freezing_steps
        return await self.parts.workers.train(batches, kl_coef=kl_coef, progress=progress, train_policy=train_policy)

    def _minibatches(self, count: int, epoch: int) -> list[list[int]]:
        """Places of the samples of each optimizer step; the last one takes what is left."""
        seed = (self.settings.loop.seed, self.state.version, epoch)
        order = np.random.default_rng(seed).permutation(count).tolist()
        size = self.settings.loop.train_batch_size
        return [order[place : place + size] for place in range(0, count, size)]

    async def evaluate(self) -> None:
        parts = self.parts
        if not parts.eval_prompts:
            return
        values = await evaluate(
            parts.eval_prompts, parts.engine, parts.executor, parts.workers, self.settings.evaluation
        )
        self.last_evaluation = values
        parts.monitor.log("eval", self.state.version, values)
        told = [f"{name} {value:.4f}" for name, value in values.items() if "_pass" in name or name.endswith("_reward")]
        parts.monitor.tell(f"step {self.state.version}: " + ", ".join(told))


class AfterStep(Protocol):
    """Called after each step with the controller; see launch."""

    async def __call__(self, controller: Controller) -> None: ...


def averaged(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a rollout; of what stands rather than varies, the last."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {name: float(np.mean([step[name] for step in steps if name in step])) for name in names}
    return means | {name: value for name, value in steps[-1].items() if name.endswith(STANDING)}


def shown(values: dict[str, float]) -> dict[str, float]:
    """What stands beside the progress bar, under the short names that people know."""
    names = {
        "reward": "reward",
        "policy_loss": "act_loss",
        "kl": "kl",
        "response_length": "gen_len",
        "actor_lr": "act_lr",
        "timing/step_total": "s/step",
    }
    return {short: values[name] for name, short in names.items() if name in values}
