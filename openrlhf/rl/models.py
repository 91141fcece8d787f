"""The models that one process of a reinforcement learning run holds: score, train, save and export them.

`LocalWorkers` calls `Models` directly; on a cluster each `ModelWorker` holds one. If several processes share a model,
each of them must call every method, because sharded models compute and gather together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.models.export import save_model
from openrlhf.models.forward import LogProbs, Values
from openrlhf.rl.reward_models import Scorer
from openrlhf.rl.workers import ModelRewards
from openrlhf.rollout.engine import Weights
from openrlhf.training.backend import Frozen, TrainBackend, temperature_of, values_of
from openrlhf.training.optim import between_steps
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import Batch, PolicyBatch, RolloutBatch, Trajectory

EMA_FILE = "ema.safetensors"
SCHEDULE_FILE = "schedule.safetensors"


@dataclass(frozen=True)
class Trained:
    """Trainable network with its learning rate schedule over the planned optimizer steps."""

    backend: TrainBackend
    schedule: Callable[[int], float]
    planned_steps: int
    learning_rate: float

    def scale(self, progress: float, began: float) -> float:
        """Return the learning rate factor at `progress`, the fraction of the run that is done.

        `began` is the progress at which this network started training. Because the schedule follows progress, a run
        with fewer steps than planned still goes through the whole schedule, in larger strides. A resumed run with more
        or fewer prompts than before stays within it.
        """
        done = (progress - began) / (1.0 - began) if began < 1.0 else 0.0
        return between_steps(self.schedule, self.planned_steps * min(max(done, 0.0), 1.0))


@dataclass(frozen=True)
class Policy:
    """The policy with its objective and the decay of its moving average (None: no average is kept)."""

    trained: Trained
    objective: PolicyObjective
    ema_beta: float | None = None


@dataclass(frozen=True)
class Critic:
    """The critic with its objective."""

    trained: Trained
    objective: ValueObjective


class Models:
    """The policy, critic, reference and reward models of this process, each of which may be absent.

    With `sleeps`, trained models are offloaded while idle, and at most one of them is on the device.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        critic: Critic | None = None,
        reference: Frozen | None = None,
        scorers: Sequence[Scorer] = (),
        *,
        temperature: float = 1.0,
        sleeps: bool = False,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.reference = reference
        self.scorers = scorers
        self.temperature = temperature
        self.sleeps = sleeps
        self.ema = self._first_average()
        self.began: dict[str, float] = {}  # progress at each model's first step; the policy may be frozen at first
        self.awake: TrainBackend | None = None
        if sleeps:
            for _, trained in self._trained():
                trained.backend.sleep()

    def log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        """Return the policy's log-probs for each batch: [rows, tokens], on the CPU."""
        assert self.policy is not None
        return self._log_probs(self._use(self.policy.trained.backend), batches)

    def reference_log_probs(self, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        """Return the reference's log-probs for each batch: [rows, tokens], on the CPU."""
        assert self.reference is not None
        return self._log_probs(self.reference, batches)

    def _log_probs(self, model: Frozen, batches: Sequence[RolloutBatch]) -> list[Tensor]:
        return [
            model.forward(batch, LogProbs, temperature=temperature_of(batch, self.temperature)).log_probs.cpu()
            for batch in batches
        ]

    def values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the critic's values for each batch: [rows, tokens], on the CPU."""
        assert self.critic is not None
        model = self._use(self.critic.trained.backend)
        return [model.forward(batch, Values).values.cpu() for batch in batches]

    def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return the sum of the rewards of this process's reward models."""
        return reduce(add, [scorer.score(trajectories) for scorer in self.scorers])

    def train_policy(self, micro_batches: Sequence[PolicyBatch], kl_coef: float, progress: float) -> dict[str, float]:
        """Take one optimizer step and return its metrics.

        `kl_coef` applies only if the objective has a KL term.
        """
        assert self.policy is not None
        objective = self.policy.objective
        objective = replace(objective, kl_coef=kl_coef if objective.kl_coef > 0 else 0.0)
        result = self._use(self.policy.trained.backend).forward_backward(micro_batches, objective)
        values = values_of(result.metrics) | self._move("actor", self.policy.trained, progress)
        self._average()
        return values

    def train_critic(self, micro_batches: Sequence[PolicyBatch], progress: float) -> dict[str, float]:
        """Take one optimizer step of the critic and return its metrics."""
        assert self.critic is not None
        trained = self.critic.trained
        result = self._use(trained.backend).forward_backward(micro_batches, self.critic.objective)
        return values_of(result.metrics) | self._move("critic", trained, progress)

    def _move(self, name: str, trained: Trained, progress: float) -> dict[str, float]:
        """Apply the accumulated gradients at the scheduled learning rate."""
        scale = trained.scale(progress, self.began.setdefault(f"_{name}", progress))
        norm = trained.backend.optim_step(scale)
        values = {"lr": trained.learning_rate * scale, **trained.backend.loss_scaling()}
        values |= {} if norm is None else {"grad_norm": norm}
        return {f"{name}_{key}": value for key, value in values.items()}

    def _use(self, backend: TrainBackend) -> TrainBackend:
        """Return the backend, ready for use; if models sleep, first swap it with the one on the device."""
        if self.sleeps and self.awake is not backend:
            self.rest()
            backend.wake()
            self.awake = backend
        return backend

    def rest(self) -> None:
        """Put the awake model, if any, to sleep, which frees the device; does nothing if models do not sleep."""
        if self.awake is not None:
            self.awake.sleep()
        self.awake = None

    def wake_policy(self) -> None:
        """Bring the policy onto the device, for an engine that generates with the policy's own network."""
        assert self.policy is not None
        self._use(self.policy.trained.backend)

    def weights(self) -> Weights:
        """Return the policy's weights, for the engines."""
        assert self.policy is not None
        return self._use(self.policy.trained.backend).weights()

    def _first_average(self) -> dict[str, Tensor]:
        """Return the initial moving average of the policy.

        Only process 0 keeps it; the others take part in gathering the weights and get an empty dict.
        """
        if self.policy is None or not self.policy.ema_beta:
            return {}
        backend = self.policy.trained.backend
        return {name: in_host_memory(tensor) for name, tensor in backend.exported() if backend.process == 0}

    @torch.no_grad()
    def _average(self) -> None:
        """Move the average towards the policy's new weights."""
        assert self.policy is not None
        if self.policy.ema_beta:
            backend = self.policy.trained.backend
            for name, tensor in backend.exported():
                if backend.process == 0:
                    self.ema[name].lerp_(in_host_memory(tensor), 1.0 - self.policy.ema_beta)

    def save(self, folder: Path) -> None:
        """Save the trained models and the moving average into a folder that all processes of the run write to."""
        for name, trained in self._trained():
            backend = self._use(trained.backend)
            (folder / name).mkdir(exist_ok=True)
            backend.save(folder / name)
            if backend.process == 0:
                began = {"began": torch.tensor(self.began[name], dtype=torch.float64)} if name in self.began else {}
                save_file(began, folder / name / SCHEDULE_FILE)
        if self.ema:
            save_file({name: tensor.contiguous() for name, tensor in self.ema.items()}, folder / EMA_FILE)
        self.rest()

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        for name, trained in self._trained():
            self._use(trained.backend).load(folder / name)
            saved = load_file(folder / name / SCHEDULE_FILE)
            if "began" in saved:
                self.began[name] = float(saved["began"])
        if self.ema:
            self.ema = load_file(folder / EMA_FILE)

    def _trained(self) -> list[tuple[str, Trained]]:
        """Return the trained models of this process, with the names of their checkpoint folders."""
        policy = [("_actor", self.policy.trained)] if self.policy else []
        return policy + ([("_critic", self.critic.trained)] if self.critic else [])

    def export(self, folder: Path) -> None:
        """Write the policy, or its moving average if one is kept, for plain Transformers."""
        assert self.policy is not None
        backend = self._use(self.policy.trained.backend)
        if not self.policy.ema_beta:
            backend.export(folder)
        elif backend.process == 0:
            dtype = backend.network.decoder.dtype
            save_model(backend.network, folder, {name: tensor.to(dtype) for name, tensor in self.ema.items()})
        self.rest()

    def export_critic(self, folder: Path) -> None:
        assert self.critic is not None
        self._use(self.critic.trained.backend).export(folder)
        self.rest()


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return a copy in fp32, because an average changes by less than bf16 can resolve."""
    return tensor.detach().to("cpu", torch.float32, copy=True)
