"""The RL loop, written once: a producer of rollouts and a trainer around a bounded queue.

              prompts
                |
                v
         +-------------+ accepted  +------------+  rollout   +-------------+  rollout   +----------------------------+
         |   groups    |---------->|  _produce  |----------->| state.queue |----------->| _consume                   |
         +-------------+  groups   +------------+    [1]     +-------------+    [2]     |   _train: score,           |
            |       ^                    ^                                              |     advantages, steps      |
   requests |       | completions,       | recorded rollouts                            |   _finish_step: sync, log, |
        [6] v       | rewards            | (--replay)                                   |     probe, evaluate,       |
         +-------------+                                                                |     after_step             |
         |   engine    |<--------- weights, version + 1 [3] ----------------------------+----------------------------+
         +-------------+

Let k be `runtime.queue_size`. Rollout i may begin once the weights have reached version i - k, so a sample is at most k
versions old when it is trained; k = 0 is synchronous training. In lockstep (one process) rollout i begins exactly at
that version, which makes a run a function of its seed; on a cluster, timing decides within the same bound. All rollouts
that may begin are generated at the same time as one stream of groups (`group_stream.py`), so the last samples of one
do not leave the engines idle; without vLLM in one process, they are generated one after the other. Only oversampling
lets samples grow older than k: the surplus of a rollout waits for the next one, at most until --max_staleness.
`rl/train.py` builds the parts and calls `Controller.run`.

Back-pressure points:

1. The producer waits before each rollout until made <= version + k. So at most k + 1 rollouts are untrained at any
   time, counting those being generated and the one in training. With oversampling, groups of the surplus that are in
   progress keep running while the producer waits, but no new ones start.
2. The trainer waits before each step for a rollout in the queue. In lockstep it waits for k + 1, all that the current
   weights may generate, so generation and training alternate. Once no rollout is left to generate, it trains the rest
   without waiting.
3. The weight sync after each step pauses an engine that has its own weights: the trainer waits until the requests in
   progress have finished (with --partial_rollout they are interrupted instead), and new requests wait for the sync.
4. With k = 0, `begin_training` puts engines that share devices with the models to sleep until the next sync.
5. The probe after a sync (see `proof.py`), evaluation and `after_step` (checkpoints) delay the next training step. A
   producer that waits at [1] is woken only after them.
6. The groups in progress are those that the open rollouts still miss, plus the surplus of --vllm_generate_batch_size
   above --rollout_batch_size. Below it, the flag limits them, and so does `runtime.most_episodes`. A rejected group is
   replaced as soon as it is judged; with --dynamic_filtering, that waits for the reward models.
7. The recorder writes the samples of a step while the trainer works. At most one file is pending: the next step waits
   for it before it records its own samples, and so does a checkpoint.

If the producer or the trainer fails, `run` cancels the other and raises.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from openrlhf.agents.futures import gather_or_cancel
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import evaluation_config, generates_in_lockstep, queue_size, resolve_runtime, uses_vllm
from openrlhf.monitor import Monitor
from openrlhf.plan.estimate import EXPERIENCE, GENERATION, SAVING, SYNC, TRAINING
from openrlhf.plan.gpus import Machine
from openrlhf.rl.evaluate import evaluate
from openrlhf.rl.experience import Experience, make_experience
from openrlhf.rl.group_stream import FAILURES
from openrlhf.rl.health import RLHealth, StepNumbers
from openrlhf.rl.proof import Encode, watch_gap
from openrlhf.rl.record import Recorder
from openrlhf.rl.rollout_times import describe
from openrlhf.rl.rollouts import GroupRunner, Rollout, RolloutSource
from openrlhf.rl.samples import Batching
from openrlhf.rl.state import State
from openrlhf.rl.step_metrics import in_progress_bar, over_steps
from openrlhf.rl.workers import WeightSync, Workers
from openrlhf.rollout.engine import Engine
from openrlhf.training.memory_check import explain_memory
from openrlhf.types import Prompt

AfterStep: TypeAlias = "Callable[[Controller], Awaitable[None]]"  # `checkpoints.Saver` in a run


@dataclass(eq=False)
class Controller:
    """The components of a run, and the loop that continues from its state, new or resumed."""

    config: RLConfig
    state: State
    source: RolloutSource
    engine: Engine
    runner: GroupRunner
    workers: Workers
    sync: WeightSync
    monitor: Monitor
    recorder: Recorder
    scoring: Batching  # micro-batches of forward-only passes
    training: Batching
    eval_prompts: Sequence[Prompt] = ()
    encode: Encode | None = None  # tokenises a prompt's text
    machine: Machine | None = None  # for messages about memory

    def __post_init__(self) -> None:
        self.queue_size = queue_size(self.config)
        self.lockstep = resolve_runtime(self.config) == "local"
        self.changed = asyncio.Condition()
        self.gap = watch_gap(self.config, self.workers, self.scoring, self.monitor, self.encode)
        self.completed_at: dict[int, float] = {}  # when rollouts were put into the queue, by their number
        self.health = RLHealth(self.config)
        self.step_began = time.perf_counter()
        self.last: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}

    async def run(self, after_step: AfterStep) -> None:
        """Train until prompts or steps run out, or until a sink raises StopTraining.

        `after_step` saves checkpoints, and may stop the run by raising.
        """
        if self.state.version == 0:
            await self.evaluate()
        self._between_steps(self.step_began)
        await gather_or_cancel([self._produce(), self._consume(after_step)])

    @property
    def exhausted(self) -> bool:
        """True if no rollout is left to generate. Not stored, because a resumed run may have more steps or prompts."""
        most = self.config.batches.max_steps
        return self.state.place >= len(self.source) or (most is not None and self.state.made >= most)

    def _open_rollouts(self) -> None:
        """Let the source work on all rollouts that the version of the weights permits."""
        last, most = self.state.version + self.queue_size, self.config.batches.max_steps
        self.source.open_rollouts(self.state.made, last if most is None else min(last, most - 1))

    async def _produce(self) -> None:
        """Put rollouts into the queue, as fast as the version of the weights permits."""
        state = self.state
        try:
            while not self.exhausted:
                async with self.changed:
                    await self.changed.wait_for(
                        lambda: self.monitor.stops or state.made <= state.version + self.queue_size
                    )
                if self.monitor.stops:
                    return
                began = time.perf_counter()
                self._open_rollouts()
                with explain_memory(self.config, GENERATION, self.machine):
                    rollout = await self.source.take(state.made, state.place)
                # A checkpoint may be written at any await: until the rollout is in the queue, there must be none.
                self.completed_at[rollout.number] = time.perf_counter()
                rollout.times["timing/generation"] = self.completed_at[rollout.number] - began
                assert rollout.trajectories or rollout.next_place > state.place, (
                    "no prompts are left, but some are unused"
                )
                state.place = rollout.next_place
                state.failures += int(rollout.metrics.get(FAILURES, 0.0))
                if state.failures:
                    rollout.metrics[f"{FAILURES}_total"] = float(state.failures)
                if rollout.trajectories:  # an empty rollout is never trained, so the trainer must not wait for it
                    state.made += 1
                    state.queue.append(rollout)
                async with self.changed:
                    self.changed.notify_all()
        finally:
            await self.source.close()

    async def _consume(self, after_step: AfterStep) -> None:
        """Train on the rollouts of the queue in order, one step for each, until there are none left."""
        state = self.state
        ahead = self.queue_size if self.lockstep else 0  # in lockstep, first wait for all rollouts of these weights
        while True:
            began = time.perf_counter()
            async with self.changed:
                await self.changed.wait_for(lambda: self.monitor.stops or self.exhausted or len(state.queue) > ahead)
            if self.monitor.stops or not state.queue:
                return
            rollout = state.queue.popleft()
            now = time.perf_counter()
            rollout.times["timing/trainer_wait"] = now - began
            if rollout.number in self.completed_at:  # unknown for a rollout from the queue of a checkpoint
                rollout.times["timing/queue_wait"] = now - self.completed_at.pop(rollout.number)
            values = await self._train(rollout)
            await self._finish_step(rollout, values, after_step)

    async def _finish_step(self, rollout: Rollout, values: dict[str, float], after_step: AfterStep) -> None:
        """Send the new weights to the engine, log, and probe, evaluate and save if due.

        The time of a step runs from the end of the previous call of this function to the end of the sync. It includes
        the wait for the step's samples, but not generation that overlapped with earlier training.
        """
        logs, state = self.config.logs, self.state
        version = state.version + 1
        trained = time.perf_counter()
        with explain_memory(self.config, SYNC, self.machine):
            await self.sync.sync(version)
        now = time.perf_counter()
        state.version = version
        values |= {"timing/broadcast": now - trained, "timing/step_total": now - self.step_began}
        tokens = sum(len(item.input_ids) for item in rollout.trajectories)
        values["timing/tokens_per_second"] = tokens / (now - self.step_began)
        values |= await self._probe(rollout, values)
        self.last = values
        if version % logs.logging_steps == 0:
            self.monitor.log("train", version, values)
            if not generates_in_lockstep(self.config) and (line := describe(version, values)):
                self.monitor.tell(line)
        self.monitor.advance(in_progress_bar(values))
        try:
            if logs.eval_steps > 0 and version % logs.eval_steps == 0:
                await self.evaluate()
            with explain_memory(self.config, SAVING, self.machine):
                await after_step(self)
        finally:  # an interrupted run shows its rate, too
            self._between_steps(now)
        self._open_rollouts()
        async with self.changed:
            self.changed.notify_all()

    def _between_steps(self, since: float) -> None:
        """Start the clock of the next step; the time since `since` is not part of any step."""
        self.step_began = time.perf_counter()
        self.monitor.leave_out(self.step_began - since)

    async def _train(self, rollout: Rollout) -> dict[str, float]:
        """Train on one rollout: make experience, take optimizer steps, update the KL controller; return metrics."""
        state = self.state
        began, coef = time.perf_counter(), state.kl.coef
        if self.queue_size == 0:
            await self.sync.begin_training()
        with explain_memory(self.config, EXPERIENCE, self.machine):
            experience = await make_experience(rollout.trajectories, self.workers, self.scoring, self.config, coef)
        step = state.version + 1
        if self.monitor.shows_samples and step % self.config.logs.logging_steps == 0:
            self.monitor.log_samples(step, self.recorder.first_group(experience))
        values = {} if self.gap is None else await self.gap.compare(rollout.trajectories, state.version, step)
        scored = time.perf_counter()
        await self.recorder.record(step, experience)
        with explain_memory(self.config, TRAINING, self.machine):
            values |= await self._take_steps(rollout, experience)
        if uses_vllm(self.config) and "engine_kl" in values:
            values["vllm_kl"] = values["engine_kl"]  # the name that dashboards use
        if experience.kl is not None:
            state.kl = state.kl.updated(experience.kl, len(experience.trajectories))
        values |= experience.metrics | rollout.metrics | rollout.times
        values |= {"kl_coef": coef, "staleness": float(state.version - rollout.version)}
        values["staleness_mean"] = state.version - float(np.mean([item.version for item in rollout.trajectories]))
        for line in self.health.check(StepNumbers.of(step, values)):
            self.monitor.tell(line)
        values |= {"timing/make_experience": scored - began, "timing/ppo_train": time.perf_counter() - scored}
        return values

    async def _take_steps(self, rollout: Rollout, experience: Experience) -> dict[str, float]:
        """Take the optimizer steps of a rollout, and return their metrics."""
        flags, version = self.config.batches, self.state.version
        # The samples of each step, shuffled in every epoch; the last step of an epoch may have fewer.
        count, size = len(experience.trajectories), flags.train_batch_size
        steps: list[list[int]] = []
        for epoch in range(flags.max_epochs):
            order = np.random.default_rng((flags.seed, version, epoch)).permutation(count).tolist()
            steps += [order[place : place + size] for place in range(0, count, size)]
        found: list[dict[str, float]] = []
        for number, samples in enumerate(steps):
            micro_batches = await asyncio.to_thread(experience.micro_batches, samples, self.training)
            metrics = await self.workers.train(
                micro_batches,
                kl_coef=self.state.kl.coef,
                progress=self._progress(rollout, number / len(steps)),
                train_policy=version + 1 > self.config.policy.freezing_actor_steps,
            )
            found.append(metrics)
        return over_steps(found)

    async def _probe(self, rollout: Rollout, values: dict[str, float]) -> dict[str, float]:
        """Compare engine and trainer right after a sync, if a probe is due."""
        if self.gap is None:
            return {}
        self.gap.note_update(values)
        if not self.gap.probe_is_due(self.state.version):
            return {}
        prompts = list({item.prompt.index: item.prompt for item in rollout.trajectories}.values())
        return await self.gap.probe(self.engine, prompts, self.config.rollout, self.state.version)

    def _progress(self, rollout: Rollout, trained: float) -> float:
        """Return the fraction of the run that is done once the fraction `trained` of a rollout has been trained on.

        The number of optimizer steps is unknown, because groups may be filtered out or fail. A run ends when the
        prompts run out or at --max_steps, so progress is measured by whichever of the two is nearer.
        """
        prompts = rollout.place + trained * (rollout.next_place - rollout.place)
        most = self.config.batches.max_steps
        return max(prompts / len(self.source), 0.0 if most is None else (rollout.number + trained) / most)

    async def evaluate(self) -> None:
        """Evaluate and log, if there are evaluation prompts."""
        if not self.eval_prompts:
            return
        config = evaluation_config(self.config)
        values = await evaluate(self.eval_prompts, self.engine, self.runner, self.workers, config)
        self.last_evaluation = values
        self.monitor.log("eval", self.state.version, values)
        shown = [f"{name} {value:.4f}" for name, value in values.items() if "_pass" in name or name.endswith("_reward")]
        self.monitor.tell(f"step {self.state.version}: " + (", ".join(shown) or "no sample could be evaluated"))
