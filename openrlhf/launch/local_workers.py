"""The models of a reinforcement-learning run in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.launch.scorers import Scorer
from openrlhf.models.export import save_model, saved_tensors
from openrlhf.rl.workers import Scores
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.backend import Frozen, values_of
from openrlhf.training.local import LocalBackend
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import Batch, Trajectory

EMA_FILE = "ema.safetensors"


@dataclass(frozen=True)
class Trained:
    """A network that learns, with its objective and its learning rate over the optimizer steps."""

    backend: LocalBackend
    schedule: Callable[[int], float]
    learning_rate: float


class LocalWorkers:
    """Policy, critic, reference and reward models on one device."""

    def __init__(
        self,
        policy: Trained,
        objective: PolicyObjective,
        *,
        critic: Trained | None = None,
        value_objective: ValueObjective | None = None,
        reference: Frozen | None = None,
        scorers: Sequence[Scorer] = (),
        ema_beta: float | None = None,
    ) -> None:
        self.policy = policy
        self.objective = objective
        self.critic = critic
        self.value_objective = value_objective
        self.reference = reference
        self.scorers = scorers
        self.ema_beta = ema_beta
        self.ema = {name: tensor.clone() for name, tensor in saved_tensors(policy.backend.network)} if ema_beta else {}
        self.steps = 0  # optimizer steps of the critic, and of the policy where it was not held still
        self.policy_steps = 0

    async def score(self, batches: Sequence[Batch], *, log_probs: bool) -> Scores:
        reference = self.reference
        return Scores(
            log_probs=[self._log_probs(self.policy.backend, batch) for batch in batches] if log_probs else None,
            reference_log_probs=None if reference is None else [self._log_probs(reference, batch) for batch in batches],
            values=None if self.critic is None else [self._values(batch) for batch in batches],
        )

    def _log_probs(self, model: Frozen, batch: Batch) -> Tensor:
        found = model.forward(batch, "log_probs", temperature=self.objective.temperature).log_probs
        assert found is not None
        return found

    def _values(self, batch: Batch) -> Tensor:
        assert self.critic is not None
        found = self.critic.backend.forward(batch, "values").values
        assert found is not None
        return found

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Tensor | None:
        if not self.scorers:
            return None
        return torch.stack([scorer.score(trajectories) for scorer in self.scorers]).sum(0)

    async def train(self, micro_batches: Sequence[Batch], *, kl_coef: float, train_policy: bool) -> dict[str, float]:
        values: dict[str, float] = {}
        if train_policy:
            uses_kl = self.objective.kl_coef > 0
            objective = replace(self.objective, kl_coef=kl_coef if uses_kl else 0.0)
            result = self.policy.backend.forward_backward(micro_batches, objective)
            values |= values_of(result.metrics) | self._move("actor", self.policy, self.policy_steps)
            self.policy_steps += 1
            self._average()
        if self.critic is not None:
            assert self.value_objective is not None
            result = self.critic.backend.forward_backward(micro_batches, self.value_objective)
            values |= values_of(result.metrics) | self._move("critic", self.critic, self.steps)
        self.steps += 1
        return values

    @staticmethod
    def _move(name: str, trained: Trained, step: int) -> dict[str, float]:
        scale = trained.schedule(step)
        norm = trained.backend.optim_step(scale)
        return {f"{name}_lr": trained.learning_rate * scale, f"{name}_grad_norm": norm}

    @torch.no_grad()
    def _average(self) -> None:
        if self.ema_beta:
            for name, tensor in saved_tensors(self.policy.backend.network):
                self.ema[name].lerp_(tensor.to(self.ema[name]), 1.0 - self.ema_beta)

    async def save(self, folder: Path) -> None:
        for name, trained in self._trained():
            (folder / name).mkdir()
            trained.backend.save(folder / name)
        if self.ema:
            save_file({name: tensor.contiguous() for name, tensor in self.ema.items()}, folder / EMA_FILE)
        save_file({"steps": torch.tensor([self.steps, self.policy_steps])}, folder / "steps.safetensors")

    async def load(self, folder: Path) -> None:
        for name, trained in self._trained():
            trained.backend.load(folder / name)
        if self.ema:
            self.ema = load_file(folder / EMA_FILE)
        self.steps, self.policy_steps = load_file(folder / "steps.safetensors")["steps"].tolist()

    def _trained(self) -> list[tuple[str, Trained]]:
        return [("_actor", self.policy), *([("_critic", self.critic)] if self.critic else [])]

    def export(self, folder: Path) -> None:
        """The policy, or its average where one is kept."""
        save_model(self.policy.backend.network, folder, self.ema or None)

    async def close(self) -> None:
        """Nothing outlives the process."""


class LocalSync:
    """Weights to an engine in the same process: a shared network needs only its new version number."""

    def __init__(self, policy: LocalBackend, engine: HFEngine, *, shared: bool) -> None:
        self.policy = policy
        self.engine = engine
        self.shared = shared

    async def sync(self, version: int) -> None:
        await self.engine.load([] if self.shared else self.policy.weights(), version)
