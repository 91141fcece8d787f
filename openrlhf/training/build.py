"""Build the models and backends of a training run from its config.

All training commands use `load_language_model`, `make_network`, `make_backend` and `make_frozen`, which choose between
the local backend, DeepSpeed and FSDP; `rl.build` calls them for the models of reinforcement learning. For a supervised
run, `build` combines them: the network in its backend, the frozen reference or teacher, and the objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.algo.reduce import Metrics, Moments
from openrlhf.config.commands import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrlhf.config.runtime import reference_is_base
from openrlhf.config.sections.objectives import DirectPreferenceFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout
from openrlhf.data.process import step_tokens
from openrlhf.errors import ConfigError
from openrlhf.models.attention import choose_attention
from openrlhf.models.forward import Network, share_alike
from openrlhf.models.heads import separate_pad_from_eos
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model, recompute_activations
from openrlhf.monitor import say
from openrlhf.training import objectives
from openrlhf.training.audit import report_frozen, report_trained
from openrlhf.training.backend import Frozen, TrainBackend, values_of
from openrlhf.training.base_reference import BaseReference
from openrlhf.training.compilation import pays_off_on
from openrlhf.training.fit import LOSS_NAMES, Evaluated, Summary
from openrlhf.training.local import CompilingBackend, LocalBackend, LocalFrozen
from openrlhf.training.objectives import SupervisedObjective
from openrlhf.training.preflight import balances_experts
from openrlhf.training.processes import defers_weights, loading, training_backend


def evaluation_values(metrics: Metrics) -> dict[str, float]:
    """Return the evaluation metrics: `eval_loss` and, if there is an accuracy, `acc_mean`.

    The same values are added under names with a space, which dashboards of some commands expect.
    """
    values = values_of(metrics)
    dashboard = {f"eval {name}": values[name] for name in ("gpt_loss", "prm_loss") if name in values}
    if "prm_loss" in values:
        dashboard["eval acc"] = values["acc"]
    return {EVALUATION_NAMES.get(name, name): value for name, value in values.items()} | dashboard


C = TypeVar("C", bound=TrainingConfig)
AnyObjective: TypeAlias = SupervisedObjective[Any, Any, Any]  # the rows and batches depend on the command
EVALUATION_NAMES = {**dict.fromkeys(LOSS_NAMES, "eval_loss"), "acc": "acc_mean"}


def reward_values(metrics: Metrics) -> dict[str, float]:
    """Return a reward model's evaluation metrics, including the mean and unbiased std of all scores."""
    scores = metrics[objectives.SCORES]
    assert isinstance(scores, Moments)
    mean, count = float(scores.value), float(scores.count)
    spread = max(math.sqrt(float(scores.variance) * count / max(count - 1, 1)), 1e-8)
    return evaluation_values(metrics) | {"reward_mean": mean, "reward_std": spread}


@dataclass(frozen=True)
class Built:
    """The backend and objective of a supervised run."""

    backend: TrainBackend
    objective: AnyObjective
    summarise: Summary = evaluation_values  # converts the metrics of an evaluation to the values to log
    on_evaluated: Evaluated | None = None  # called with those values


def build(
    config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, *, soft_labels: bool
) -> Built:
    """Load the models of a supervised command and build its backend and objective."""
    config = replace_unavailable_attention(config, device)

    # Load the model to train, with the head that the command needs.
    name = str(config.model.pretrain)
    if isinstance(config, RMConfig):
        model = load_trained_scalar_model(config, name, device)
        separate_pad_from_eos(model, tokenizer)
        model.config.update({"value_head_prefix": config.head.value_head_prefix, "normalize_reward": False})
    else:
        model = load_language_model(config, name, device)
    if isinstance(config, PRMConfig):  # saved with the model, so that scoring uses the same tokens
        fields = config.fields
        tokens = {"placeholder_token": fields.placeholder_token, "reward_tokens": list(fields.reward_tokens)}
        model.config.update(tokens)

    network = make_network(config, model, scalar=isinstance(config, RMConfig))
    backend = make_backend(config, network, config.optimizer, config.optimizer.learning_rate, device)
    objective = make_objective(config, tokenizer, device, backend, soft_labels=soft_labels)
    if isinstance(config, RMConfig):
        # Store mean and std in the model's config, from which --normalize_reward reads them.
        def keep_statistics(values: Mapping[str, float]) -> None:
            network.decoder.config.update({"mean": values["reward_mean"], "std": values["reward_std"]})

        return Built(backend, objective, reward_values, keep_statistics)
    return Built(backend, objective)


def replace_unavailable_attention(config: C, device: torch.device) -> C:
    """Report a missing flash attention package once and use the default, before several models load."""
    asked = config.model.attn_implementation
    attention, line = choose_attention(asked, device, config.batches.packing_samples)
    if line:
        say(line)
    return config if attention == asked else replace(config, model=replace(config.model, attn_implementation="auto"))


def load_language_model(config: TrainingConfig, name: str, device: torch.device) -> PreTrainedModel:
    """Load a causal language model; under ZeRO-3 and FSDP, each process keeps only its shard."""
    packing, defer = config.batches.packing_samples, defers_weights(config)
    with loading(config, device):
        return load_causal_lm(name, config.model, device=device, packing=packing, defer=defer)


def load_trained_scalar_model(config: RMConfig | RLConfig, name: str, device: torch.device) -> PreTrainedModel:
    """Load a model with a scalar head to train: a reward model or a critic. The head is new if the model has none."""
    return load_scalar_model(
        name,
        config.model,
        device=device,
        packing=config.batches.packing_samples,
        head_prefix=config.head.value_head_prefix,
        new_head=True,
        defer=defers_weights(config),
    )


def make_network(config: TrainingConfig, model: PreTrainedModel, *, scalar: bool) -> Network:
    """Prepare a loaded model for training, with LoRA adapters and gradient checkpointing if the flags request them.

    `scalar` marks a model with a scalar head; the head is trained in full, in addition to any adapters.
    """
    adapted = add_adapters(model, config.lora, scalar=scalar)
    if config.sharding.gradient_checkpointing:
        recompute_activations(adapted, reentrant=config.sharding.gradient_checkpointing_use_reentrant)
    balances = balances_experts(config.model, model.config)
    return Network(adapted, with_aux_loss=balances, self_test=not config.model.skip_self_test)


def make_backend(
    config: TrainingConfig,
    network: Network,
    optimizer: OptimizerFlags,
    learning_rate: float,
    device: torch.device,
    *,
    role: str = "model",
) -> TrainBackend:
    """Wrap a network for training, in the backend that the flags and the number of processes select.

    `optimizer` is the config's optimizer section or, for a critic, `PolicyOptimizerFlags.critic`. `role` names the
    network in messages.
    """
    report_trained(network, role)
    if not config.lora.lora_rank:
        report_frozen(network)
    chosen = training_backend(config)
    if chosen == "local":
        compiles = config.sharding.deepcompile
        # Whether to compile later is decided by timings, which must not change a deterministic run.
        may_compile = compiles is None and not config.batches.full_determinism and pays_off_on(network, device)
        kind = CompilingBackend if may_compile else LocalBackend
        return kind(
            network,
            optimizer,
            device,
            learning_rate=learning_rate,
            adam_offload=config.sharding.adam_offload,
            compile_layers=bool(compiles),
        )
    if chosen == "fsdp":
        from openrlhf.training.fsdp import FsdpBackend

        return FsdpBackend(network, optimizer, config.sharding, device, learning_rate=learning_rate)
    from openrlhf.training.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(
        network,
        optimizer,
        config.sharding,
        device,
        learning_rate=learning_rate,
        universal_checkpoint=config.checkpoints.use_ds_universal_ckpt,
    )


def make_frozen(config: TrainingConfig, network: Network, device: torch.device, *, offload: bool) -> Frozen:
    """Wrap a frozen network, in the same way as `make_backend`."""
    chosen = training_backend(config)
    if chosen == "local":
        return LocalFrozen(network, device, offload=offload)
    if chosen == "fsdp":
        from openrlhf.training.fsdp import FsdpFrozen

        return FsdpFrozen(network, config.sharding, device, offload=offload)
    from openrlhf.training.deepspeed import DeepSpeedFrozen

    return DeepSpeedFrozen(network, config.sharding, device, offload=offload)


def load_frozen(
    config: SupervisedConfig, device: torch.device, network: Network, name: str, flag: str, *, offload: bool
) -> Frozen:
    """Load the reference of DPO and KTO or the teacher of distillation.

    Its vocabulary must be as large as that of the trained network, because the two are compared token by token.
    """
    model = load_language_model(config, name, device)
    found, own = (item.config.get_text_config().vocab_size for item in (model, network.decoder))
    if found != own:
        raise ConfigError(
            f"{flag} {name} does not match --pretrain: expected a vocabulary of {own} tokens, got {found}"
        )
    frozen = Network(model, self_test=not config.model.skip_self_test)
    return make_frozen(config, frozen, device, offload=offload)


def make_objective(
    config: SupervisedConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    backend: TrainBackend,
    *,
    soft_labels: bool,
) -> AnyObjective:
    """Return the objective of the command, and load its frozen model if it has one."""
    aux, network = config.model.aux_loss_coef, backend.network
    match config:
        case SFTConfig():
            return objectives.SFT(aux)
        case RMConfig(objective=flags):
            return objectives.PairwiseReward(flags, aux)
        case PRMConfig(fields=fields):
            return objectives.ProcessReward(step_tokens(tokenizer, fields).reward_ids, soft_labels, aux)
        case KDConfig(objective=flags):
            name, flag = str(flags.teacher_model), "--teacher_model"
            teacher = load_frozen(config, device, network, name, flag, offload=flags.teacher_offload)
            return objectives.Distillation(flags, teacher, aux)
        case DPOConfig(objective=flags, reference=given) | KTOConfig(objective=flags, reference=given):
            reference: Frozen = BaseReference(backend)
            if not reference_is_base(config):
                name, flag = str(given.ref_pretrain or config.model.pretrain), "--ref_pretrain"
                reference = load_frozen(config, device, network, name, flag, offload=given.ref_offload)
                share_alike([network, reference.network])
            if isinstance(flags, DirectPreferenceFlags):
                return objectives.DirectPreference(flags, reference, aux)
            layout = Layout(config.batches.packing_samples, tokenizer.pad_token_id)
            return objectives.UnpairedPreference(flags, reference, layout, config.data.max_len, aux)
    raise AssertionError(f"{type(config).__name__} has no objective")
