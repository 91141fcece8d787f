"""The models, devices and sizes of a run as plain numbers, derived from its flags: the input of `openrlhf/plan`.

Lengths are the longest that the flags allow. Real data is shorter, so figures that depend on them are upper bounds.
"""

from dataclasses import dataclass, replace
from math import ceil

from openrlhf.config.commands import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    RLConfig,
    RMConfig,
    SupervisedConfig,
    TrainingConfig,
)
from openrlhf.config.runtime import (
    critic_model,
    is_asynchronous,
    num_engines,
    policy_ranks,
    reference_is_base,
    resolve_runtime,
    scores_policy,
    steps_per_rollout,
    uses_vllm,
)
from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.config.sections.training import ShardingFlags
from openrlhf.config.worker_groups import GroupPlan, plan_groups


@dataclass(frozen=True)
class WorkModel:
    """A model of a run."""

    role: str  # policy, critic, reference, reward model, teacher or, in supervised commands, model
    name: str  # folder or hub name
    trained: bool = False
    scalar: bool = False  # has a scalar head instead of the vocabulary head
    offloaded: bool = False  # frozen, and in host memory between uses


@dataclass(frozen=True)
class WorkGroup:
    """Devices that hold the same models, with one process each."""

    name: str
    models: tuple[WorkModel, ...]
    devices: int
    nodes: int = 1
    has_engine: bool = False  # engines share its devices


@dataclass(frozen=True)
class WorkEngine:
    """The rollout engines of a run."""

    vllm: bool  # False: Transformers generates with the policy's network
    count: int = 1
    devices: int = 1  # devices of one engine: its tensor-parallel size
    per_gpu: int = 1
    memory_share: float = 0.0  # share of a device's memory for all engines on it
    sleeps: bool = False
    eager: bool = False  # without CUDA graphs
    own_weights: bool = True  # False: the policy's network


@dataclass(frozen=True)
class Workload:
    """Models, devices, sharding and sizes of batches."""

    groups: tuple[WorkGroup, ...]
    loading: ModelFlags
    lora: LoraFlags
    sharding: ShardingFlags
    train_tokens: int  # tokens of a training micro-batch
    score_tokens: int  # tokens of a forward-only micro-batch
    sequence: int  # tokens of the longest sequence
    micro_batches: int  # micro-batches per device and optimizer step
    step_samples: int  # sequences of an optimizer step, over all devices
    by_tokens: bool = False  # micro-batches are limited by tokens instead of samples
    always_deepspeed: bool = False  # use DeepSpeed even in one process
    muon: bool = False
    sleeps: bool = False  # trained models leave the device while idle
    engine: WorkEngine | None = None  # None in supervised commands
    samples: int = 0  # samples per rollout
    samples_per_prompt: int = 1
    response: int = 0  # tokens of the longest response
    optimizer_steps: int = 1  # optimizer steps per rollout
    scores_policy: bool = False  # the policy's log-probs are computed before training
    logs_entropy: bool = False
    moving_average: bool = False
    resumable: bool = True  # may write checkpoints
    distils: bool = False

    @property
    def fsdp(self) -> bool:
        return self.sharding.backend == "fsdp"

    @property
    def trains_policy(self) -> bool:
        return self.engine is not None

    @property
    def devices(self) -> int:
        """Devices of the whole run."""
        own = self.engine is not None and not any(group.has_engine for group in self.groups)
        engines = self.engine.count * self.engine.devices // self.engine.per_gpu if own and self.engine else 0
        return sum(group.devices for group in self.groups) + engines


def workload_of(config: TrainingConfig, processes: int) -> Workload:
    """Return the workload of a training command; `processes` is the number of processes of a supervised command."""
    if isinstance(config, RLConfig):
        return rl_workload(config)
    assert isinstance(config, SupervisedConfig)
    return supervised_workload(config, processes)


def supervised_workload(config: SupervisedConfig, processes: int) -> Workload:
    """Return the workload of a supervised command in this many processes."""
    batches, sharding = config.batches, config.sharding
    models = [WorkModel("model", str(config.model.pretrain), trained=True, scalar=isinstance(config, RMConfig))]
    match config:
        case DPOConfig(reference=given) | KTOConfig(reference=given):
            if not reference_is_base(config):
                name = str(given.ref_pretrain or config.model.pretrain)
                models.append(WorkModel("reference", name, offloaded=given.ref_offload))
        case KDConfig(objective=flags):
            models.append(WorkModel("teacher", str(flags.teacher_model), offloaded=flags.teacher_offload))
    rows = 2 if isinstance(config, RMConfig | DPOConfig) else 1  # a pair has two
    ranks = max(1, processes // (sharding.ring_attn_size * sharding.ds_tensor_parallel_size))
    share = ceil(batches.train_batch_size / ranks)
    micro = min(batches.micro_train_batch_size, share)
    tokens = rows * micro * config.data.max_len
    return replace(
        _common(config, WorkGroup("model", tuple(models), processes), tokens, config.data.max_len),
        micro_batches=ceil(share / micro),
        step_samples=rows * batches.train_batch_size,
        distils=isinstance(config, KDConfig),
    )


def rl_workload(config: RLConfig) -> Workload:
    """Return the workload of train_ppo and train_ppo_ray."""
    rollout, batches = config.rollout, config.batches
    context, ranks = rollout.context_length, policy_ranks(config)
    samples = rollout.samples_per_rollout
    step = min(batches.train_batch_size, samples)
    share = ceil(step / ranks)
    train = min(batches.micro_train_batch_size, share) * context
    score = min(rollout.micro_rollout_batch_size, ceil(samples / ranks)) * context
    if rollout.use_dynamic_batch:  # one sample always fits
        train = min(max(rollout.train_max_tokens_per_gpu, context), share * context)
        score = min(max(rollout.scoring_token_budget, context), ceil(samples / ranks) * context)
    engine = _engine(config)
    groups = [_rl_group(config, group) for group in plan_groups(config)]
    hybrid = config.placement.colocate_all_models and not config.asynchrony.async_train
    if not engine.vllm or hybrid or resolve_runtime(config) == "local":
        groups[0] = replace(groups[0], has_engine=True)
    return replace(
        _common(config, groups[0], train, context),
        groups=tuple(groups),
        score_tokens=score,
        by_tokens=rollout.use_dynamic_batch,
        micro_batches=ceil(share * context / train),
        step_samples=step,
        sleeps=config.placement.deepspeed_enable_sleep,
        engine=engine,
        samples=samples,
        samples_per_prompt=rollout.n_samples_per_prompt,
        response=min(rollout.longest_response, context),
        optimizer_steps=steps_per_rollout(config),
        scores_policy=scores_policy(config),
        logs_entropy=config.policy.entropy_loss_coef is not None,
        moving_average=config.policy.enable_ema,
    )


def _common(config: TrainingConfig, group: WorkGroup, tokens: int, sequence: int) -> Workload:
    """Return the part of a workload that does not depend on the kind of command."""
    return Workload(
        groups=(group,),
        loading=config.model,
        lora=config.lora,
        sharding=config.sharding,
        train_tokens=tokens,
        score_tokens=tokens,
        sequence=sequence,
        micro_batches=1,
        step_samples=1,
        always_deepspeed=config.checkpoints.use_ds_universal_ckpt or config.sharding.backend == "deepspeed",
        muon=config.optimizer.optim == "muon",
        resumable=not config.checkpoints.disable_ds_ckpt,
    )


def _rl_group(config: RLConfig, group: GroupPlan) -> WorkGroup:
    """Return the models of a worker group."""
    policy, offload = str(config.model.pretrain), config.critic.ref_reward_offload
    models: list[WorkModel] = []
    for role in group.roles:
        if role == "actor":
            models.append(WorkModel("policy", policy, trained=True))
        elif role == "critic":
            models.append(WorkModel("critic", str(critic_model(config)), trained=True, scalar=True))
        elif role == "ref":
            if "actor" in group.roles and reference_is_base(config):
                continue  # the policy without its adapters
            models.append(WorkModel("reference", config.critic.ref_pretrain or policy, offloaded=offload))
        else:
            names = [config.rewards.reward_models[number] for number in group.rewards]
            models += [WorkModel("reward model", name, scalar=True, offloaded=offload) for name in names]
    return WorkGroup(group.name, tuple(models), group.size, group.nodes)


def _engine(config: RLConfig) -> WorkEngine:
    engines = config.engines
    if not uses_vllm(config):
        return WorkEngine(vllm=False, count=num_engines(config), own_weights=is_asynchronous(config))
    return WorkEngine(
        vllm=True,
        count=num_engines(config),
        devices=engines.devices_per_engine,
        per_gpu=engines.vllm_engines_per_gpu or 1,
        memory_share=engines.vllm_gpu_memory_utilization,
        sleeps=engines.vllm_enable_sleep,
        eager=engines.enforce_eager,
    )
