"""Check that engine and trainer compute the same policy, by comparing their log-probs of the same sampled tokens.

Only tokens sampled with the trainer's current weights can be compared. Samples are scored at least two to a batch, in
the layout of the run: a model that mixes up the sequences of a batch would pass a test with a single sequence. The
controller calls `GapWatch.compare` at every step and, in asynchronous runs, `GapWatch.probe` after some weight syncs.
If the difference is too large, `gap_causes.find_cause` looks for the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from openrlhf.agents.executor import sample_name
from openrlhf.agents.trajectory import join_turn
from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import is_asynchronous, resolve_runtime
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.errors import RolloutError
from openrlhf.monitor import Monitor
from openrlhf.rl.gap_causes import Comparison, Differences, find_cause, mean_gap
from openrlhf.rl.rollouts import sampling
from openrlhf.rl.samples import Batching, batch_trajectories
from openrlhf.rl.workers import Workers
from openrlhf.rollout.engine import Engine
from openrlhf.types import NOT_SAMPLED, Prompt, Request, Trajectory

SAMPLES = 4
PROBE_TOKENS = 32
PROBE_SECONDS = 30.0  # how long training waits for a busy engine
Encode: TypeAlias = Callable[[str], Sequence[int]]  # tokenises text


def watch_gap(
    config: RLConfig, workers: Workers, batching: Batching, monitor: Monitor, encode: Encode | None = None
) -> GapWatch | None:
    """Return the comparison for a run; its limits depend on the run's precision.

    Return None for recorded rollouts, and if sampling excludes tokens (top-p, for example): the engine's log-probs then
    cover only the remaining tokens and cannot be compared.
    """
    rollout = config.rollout
    if rollout.replay or rollout.limits_on_log_probs:
        return None
    local = resolve_runtime(config) == "local"
    separate = not local or bool(config.engines.vllm_num_engines)  # the engine does not share the trainer's modules
    on_cpu = config.model.device == "cpu" or (local and not torch.cuda.is_available())
    exact = config.model.param_dtype == "fp32" or on_cpu
    probe_every = None
    if is_asynchronous(config) and (separate or config.engines.sync_check_every):
        probe_every = config.engines.sync_check_every
    warn, stop = (0.001, 0.02) if exact else (0.05, 0.5)
    return GapWatch(workers, batching, monitor, warn, stop, probe_every, encode)


def differences_of(item: Trajectory, trained: Tensor) -> list[float]:
    """Return engine - trainer for the log-probs of the action tokens; `trained` are the trainer's, [tokens]."""
    differences = item.rollout_log_probs.astype(np.float64) - trained.double().numpy()
    return differences[item.action_mask].tolist()


@dataclass
class GapWatch:
    """Comparison of engine and trainer on samples from the current weights; it stops the run if their gap is too large.

    The gap is the mean of |log p - log p'| over tokens, in nats, with p from the engine and p' from the trainer.
    """

    workers: Workers
    batching: Batching
    monitor: Monitor
    warn: float  # gap above which the user is warned
    stop: float  # gap above which the run stops
    # Asynchronous runs train on samples from older weights, so they request extra samples from new weights: after the
    # first sync of changed weights, and after every N-th sync (0: only after that first one). None: never.
    probe_every: int | None = None
    encode: Encode | None = None  # tokenises a prompt again, to find the cause of a gap
    warned: float = 0.0  # gap of the last warning
    moved: bool = False  # the weights have changed since the start of the run
    agreed: bool = False  # a comparison before the weights changed was within the limits
    proved: bool = False  # a sync of changed weights was checked, or a message says why not

    async def compare(self, trajectories: Sequence[Trajectory], version: int, step: int) -> dict[str, float]:
        """Return the gap as a metric of the step; empty if no sample can be compared.

        A sample cannot be compared if older weights generated it, or if sampling excluded tokens in one of its turns.
        """
        comparable = (item for item in trajectories if item.version == version and item.whole_vocabulary)
        fresh = [item for item in comparable if item.action_mask.any()]
        if not fresh:
            return {}
        # Choose a few samples spread over the rollout, or the shortest ones if two of these exceed a micro-batch.
        chosen = fresh[:: max(1, len(fresh) // SAMPLES)][:SAMPLES]
        room = self.batching.token_budget or self.batching.size * max(len(item.input_ids) for item in fresh)
        if sum(sorted(len(item.input_ids) for item in chosen)[-2:]) > room:
            chosen = sorted(fresh, key=lambda item: len(item.input_ids))[:SAMPLES]
        pairs = [chosen[place : place + 2] for place in range(0, len(chosen), 2)]
        if len(pairs[-1]) == 1:  # add a sequence in front, because values leak only into later sequences
            pairs[-1] = [min(trajectories, key=lambda item: len(item.input_ids)), *pairs[-1]]
        batches = [batch_trajectories(pair, self.batching.layout) for pair in pairs]

        def compare_with(scores: Sequence[Tensor]) -> Differences:
            """Return the differences of the chosen samples from `scores`, log-probs [rows, tokens] of each batch."""
            differences = []
            for pair, batch, tensor in zip(pairs, batches, scores, strict=True):
                for number, item in enumerate(pair):
                    if item in chosen:
                        differences.append((item, differences_of(item, tensor[batch.sequence_ids == number])))
            return differences

        differences = compare_with(await self.workers.log_probs(batches))
        found = Comparison(batches, differences, compare_with, lambda: self._with_other_prompts(chosen))
        gap = await self._judge(found, step)
        self.proved = self.proved or self.moved
        self.agreed = self.agreed or (not self.moved and gap <= self.warn)
        return {"rollout/log_prob_difference": gap}

    async def _with_other_prompts(self, chosen: Sequence[Trajectory]) -> Differences | None:
        """Compare the samples after tokenising their prompts again; return None if the tokens do not change."""
        if self.encode is None:
            return None
        others: list[Trajectory] = []
        for item in chosen:
            length, ids = len(item.prompt.input_ids), np.array(self.encode(item.prompt.text), np.int32)
            if len(item.input_ids) <= length or not len(ids):
                return None
            factors = item.temperature_factors
            if factors is not None:
                factors = np.concatenate([np.ones(len(ids), np.float32), factors[length:]])
            others.append(
                replace(
                    item,
                    input_ids=np.concatenate([ids, item.input_ids[length:]]),
                    action_mask=np.concatenate([np.zeros(len(ids), np.bool_), item.action_mask[length:]]),
                    rollout_log_probs=np.concatenate([np.zeros(len(ids), np.float32), item.rollout_log_probs[length:]]),
                    token_versions=np.concatenate(
                        [np.full(len(ids), NOT_SAMPLED, np.int32), item.token_versions[length:]]
                    ),
                    temperature_factors=factors,
                    routed_experts=None,
                )
            )
        if all(np.array_equal(other.input_ids, item.input_ids) for other, item in zip(others, chosen, strict=True)):
            return None
        batches = [batch_trajectories([other], self.batching.layout) for other in others]
        pairs = zip(others, await self.workers.log_probs(batches), strict=True)
        return [(other, differences_of(other, tensor.flatten())) for other, tensor in pairs]

    async def _judge(self, found: Comparison, step: int) -> float:
        """Return the mean difference over all tokens; if it is too large, warn or raise, with the likely cause."""
        gap = mean_gap(found.differences)
        stops = not gap <= self.stop  # also true for NaN
        if not stops and gap <= max(self.warn, 2 * self.warned):
            return gap
        worst, _ = max(found.differences, key=lambda pair: mean_gap([pair]))
        problem = (
            f"step {step}: the log-probs of engine and trainer differ by {gap:.2g} nats per token on average, "
            f"expected below {self.warn:g}; most in {sample_name(worst.prompt)}"
        )
        cause = await find_cause(found, self.workers, agreed_before_update=self.agreed and self.moved)
        if stops:
            raise RolloutError(f"{problem}. Likely cause: {cause.text}", try_this=cause.advice)
        self.warned = gap
        advice = f"{cause.advice}, or --enable_vllm_is_correction to correct for it"
        self.monitor.tell(f"{problem}. Likely cause: {cause.text}. Try: {advice}")
        return gap

    def note_update(self, metrics: dict[str, float]) -> None:
        """Record whether an update changed the weights; with a learning rate of zero it does not."""
        self.moved = self.moved or (metrics.get("actor_lr", 0.0) > 0 and metrics.get("actor_grad_norm", 0.0) > 0)

    def probe_is_due(self, version: int) -> bool:
        """Return True at every `probe_every`-th version, and until a sync of changed weights has been compared."""
        every = self.probe_every
        return every is not None and ((every > 0 and version % every == 0) or (self.moved and not self.proved))

    async def probe(
        self, engine: Engine, prompts: Sequence[Prompt], flags: RolloutFlags, version: int
    ) -> dict[str, float]:
        """Sample a few tokens with the weights just synced, and compare their log-probs."""
        asked = [prompt for prompt in prompts if len(prompt.input_ids) < flags.context_length][:SAMPLES]
        requests: list[Request] = []
        for prompt in asked:
            most = min(PROBE_TOKENS, flags.context_length - len(prompt.input_ids))
            params = replace(sampling(prompt, flags, version)[0], max_tokens=most, seed=version, stop=())
            requests.append(Request(prompt.input_ids, params))
        self.proved = self.proved or self.moved  # if the comparison fails, a message says why
        skipped = (
            f"step {version}: the log-probs of engine and trainer were not compared after this weight sync, because"
        )
        try:
            made = await asyncio.wait_for(engine.generate(requests), PROBE_SECONDS)
        except TimeoutError:
            self.monitor.tell(f"{skipped} the engines were busy for {PROBE_SECONDS:g} s")
            return {}
        pairs = zip(asked, made, strict=True)
        sampled = [join_turn(prompt, completion, flags.context_length) for prompt, completion in pairs]
        found = await self.compare(sampled, version, version)
        if not found:
            self.monitor.tell(f"{skipped} no prompt leaves room for a probe")
        return found
