"""The models in one process of a reinforcement learning run: score, train, save and export them.

`rl.build` builds `Models`. `LocalWorkers` calls its methods directly; on a cluster, the driver calls them in each
`ModelWorker`. If several processes share a model, all of them must make the same calls, because sharded models compute
and gather together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrlhf.models.forward import LogProbs, Values
from openrlhf.rl.reward_models import RewardModel
from openrlhf.rl.workers import ModelRewards
from openrlhf.rollout.engine import Weights
from openrlhf.training.backend import Frozen, TrainBackend, temperature_of, values_of
from openrlhf.training.base_reference import BaseReference
from openrlhf.training.moving_average import MovingAverage
from openrlhf.training.optim import between_steps
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import Batch, PolicyBatch, RolloutBatch, Trajectory

SCHEDULE_FILE = "schedule.safetensors"
NOT_HELD = "this process does not have the requested model"


@dataclass(frozen=True)
class Trained:
    """A trained network with its learning rate schedule."""

    backend: TrainBackend
    schedule: Callable[[int], float]  # optimizer step -> factor on the learning rate
    planned_steps: int  # number of optimizer steps in the schedule
    learning_rate: float  # peak learning rate

    def scale(self, progress: float, began: float) -> float:
        """Return the learning rate factor at `progress`, the fraction of the run that is done.

        `began` is the progress at which this network started training. Because the schedule follows progress, a run
        with fewer steps than planned still covers the whole schedule, in larger steps. A resumed run with a different
        number of prompts stays within the schedule.
        """
        done = (progress - began) / (1.0 - began) if began < 1.0 else 0.0
        return between_steps(self.schedule, self.planned_steps * min(max(done, 0.0), 1.0))


@dataclass(frozen=True)
class Policy(Trained):
    """The policy with its objective."""

    objective: PolicyObjective
    ema_beta: float | None = None  # decay of the moving average; None: no moving average


@dataclass(frozen=True)
class Critic(Trained):
    """The critic with its objective."""

    objective: ValueObjective


Model = TypeVar("Model", bound=Trained)


@dataclass
class Models:
    """The policy, critic, reference and reward models of this process, each of which may be absent.

    The driver calls a method only in processes that have the model it needs.
    """

    policy: Policy | None = None
    critic: Critic | None = None
    reference: Frozen | None = None
    reward_models: Sequence[RewardModel] = ()
    temperature: float = 1.0  # sampling temperature, at which log-probs are computed
    sleeps: bool = False  # trained models are offloaded while idle, and at most one of them is on the device
    average: MovingAverage | None = field(default=None, init=False)  # moving average of the policy
    began: dict[str, float] = field(default_factory=dict)  # progress at a model's first step, which freezing delays
    awake: TrainBackend | None = None  # if models sleep, the model on the device

    def __post_init__(self) -> None:
        # The trained models, by the names of their checkpoint folders.
        named: dict[str, Trained | None] = {"_actor": self.policy, "_critic": self.critic}
        self.trained = {name: model for name, model in named.items() if model is not None}
        if self.policy is not None and self.policy.ema_beta:
            self.average = MovingAverage(self.policy.backend, self.policy.ema_beta)
        if self.sleeps:
            for trained in self.trained.values():
                trained.backend.sleep()

    def sharing_limit(self) -> int:
        """Return the longest sequence whose prefix policy, critic and reference may all share; 0 if there is none."""
        return min((model.network.sharing_limit for model in self._token_models()), default=sys.maxsize)

    def share_no_prefixes(self) -> None:
        """Make the policy, critic and reference compute the prefix of every sequence."""
        for model in self._token_models():
            model.network.shares_prefixes = False

    def _token_models(self) -> list[Frozen]:
        """Return the models that get the policy's tokens."""
        models = (*(trained.backend for trained in self.trained.values()), self.reference)
        return [model for model in models if model is not None]

    def log_probs(self, batches: Sequence[RolloutBatch], *, of_reference: bool = False) -> list[Tensor]:
        """Return the log-probs of the policy, or of the reference, for each batch: [rows, tokens], on the CPU."""
        model = self.reference if of_reference else self._use(self.policy).backend
        assert model is not None, NOT_HELD
        if isinstance(model, BaseReference):  # the reference is part of the policy, which may be asleep
            self._use(self.policy)
        with model.on_device():
            return [
                model.forward(batch, LogProbs, temperature=temperature_of(batch, self.temperature)).log_probs.cpu()
                for batch in batches
            ]

    def values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the critic's values for each batch: [rows, tokens], on the CPU."""
        model = self._use(self.critic).backend
        return [model.forward(batch, Values).values.cpu() for batch in batches]

    def rewards(self, trajectories: Sequence[Trajectory]) -> ModelRewards:
        """Return the sum of the rewards of all reward models in this process."""
        return reduce(add, [model.score(trajectories) for model in self.reward_models])

    def train_policy(self, micro_batches: Sequence[PolicyBatch], kl_coef: float, progress: float) -> dict[str, float]:
        """Take one optimizer step of the policy and return its metrics.

        `kl_coef` is used only if the objective has a KL term.
        """
        policy = self._use(self.policy)
        objective = replace(policy.objective, kl_coef=kl_coef if policy.objective.kl_coef > 0 else 0.0)
        policy.backend.has_signal = any(objective.has_signal(batch) for batch in micro_batches)
        result = policy.backend.forward_backward(micro_batches, objective)
        values = values_of(result.metrics) | self._update("actor", policy, progress)
        if self.average is not None:
            self.average.update()
        return values

    def train_critic(self, micro_batches: Sequence[PolicyBatch], progress: float) -> dict[str, float]:
        """Take one optimizer step of the critic and return its metrics."""
        critic = self._use(self.critic)
        result = critic.backend.forward_backward(micro_batches, critic.objective)
        return values_of(result.metrics) | self._update("critic", critic, progress)

    def _update(self, name: str, trained: Trained, progress: float) -> dict[str, float]:
        """Apply the accumulated gradients at the scheduled learning rate and return the optimizer's metrics."""
        scale = trained.scale(progress, self.began.setdefault(f"_{name}", progress))
        trained.backend.steps_left = round(trained.planned_steps * (1.0 - progress))
        norm = trained.backend.optim_step(scale)
        values = {
            "lr": trained.learning_rate * scale,
            **trained.backend.loss_scaling(),
            **trained.backend.utilization(),
        }
        values |= {} if norm is None else {"grad_norm": norm}
        return {f"{name}_{key}": value for key, value in values.items()}

    def _use(self, model: Model | None) -> Model:
        """Return the model; if models sleep, wake it up first and put the current one to sleep."""
        assert model is not None, NOT_HELD
        if self.sleeps and self.awake is not model.backend:
            self.rest()
            model.backend.wake()
            self.awake = model.backend
        return model

    def rest(self) -> None:
        """Put the model that is awake to sleep, if there is one."""
        if self.awake is not None:
            self.awake.sleep()
        self.awake = None

    def free_cache(self) -> None:
        """Free the device memory that PyTorch caches, so that other programs can allocate it."""
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # frees weight-sync buckets that the receiver has released
            torch.cuda.empty_cache()

    def wake_policy(self) -> TrainBackend:
        """Move the policy to the device, for an engine that generates with the policy's network."""
        return self._use(self.policy).backend

    def weights(self) -> Weights:
        """Return the policy's weights for the engines."""
        return self._use(self.policy).backend.weights()

    def save(self, folder: Path) -> None:
        """Save the trained models and the moving average to a folder shared by all processes of the run."""
        for name, trained in self.trained.items():
            backend = self._use(trained).backend
            (folder / name).mkdir(exist_ok=True)
            backend.save(folder / name)
            if backend.process == 0:
                began = {"began": torch.tensor(self.began[name], dtype=torch.float64)} if name in self.began else {}
                save_file(began, folder / name / SCHEDULE_FILE)
        if self.average is not None:
            self.average.save(folder)
        self.rest()

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`."""
        for name, trained in self.trained.items():
            self._use(trained).backend.load(folder / name)
            saved = load_file(folder / name / SCHEDULE_FILE)
            if "began" in saved:
                self.began[name] = float(saved["began"])
        if self.average is not None:
            self.average.load(folder)

    def export(self, folder: Path) -> None:
        """Write the policy, or its moving average with --enable_ema, as a model folder for Transformers."""
        backend = self._use(self.policy).backend
        if self.average is None:
            backend.export(folder)
        else:
            self.average.export(folder)
        self.rest()

    def export_critic(self, folder: Path) -> None:
        """Write the critic as a model folder for Transformers."""
        self._use(self.critic).backend.export(folder)
        self.rest()
