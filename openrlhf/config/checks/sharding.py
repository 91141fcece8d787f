"""Rules about flags that DeepSpeed or FSDP cannot combine, checked before any model loads.

By default, a single process trains with neither (see `backend_of`), so most rules apply only to runs with several
processes or with universal checkpoints, which only DeepSpeed can read.
"""

import math

from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import RLConfig, TrainingConfig
from openrlhf.config.runtime import backend_of, num_devices, resolve_runtime, used_roles
from openrlhf.config.sections.algorithm import PolicyOptimizerFlags
from openrlhf.errors import ConfigError


def model_processes(config: TrainingConfig, *, frozen: bool = False) -> dict[str, int]:
    """Return the process count of each trained model and, with `frozen`, of the frozen ones."""
    if not isinstance(config, RLConfig):
        return {"model": world_size()}
    roles = (role for role in used_roles(config) if frozen or role in ("actor", "critic"))
    return {str(role): num_devices(config, role) for role in roles}


def deepspeed_processes(config: TrainingConfig, *, frozen: bool = False) -> dict[str, int]:
    """Return the process count of each model that DeepSpeed trains and, with `frozen`, of the frozen ones it shards."""
    counts = model_processes(config, frozen=frozen)
    return {name: count for name, count in counts.items() if backend_of(config, count) == "deepspeed"}


def local_backend_is_one_process(config: TrainingConfig) -> None:
    """Reject --backend local with several processes, each of which would train a separate model."""
    if config.sharding.backend != "local":
        return
    most = max(model_processes(config, frozen=True).values())
    if most > 1:
        raise ConfigError(
            f"--backend local trains in one process, but a model has {most} processes", try_this="--backend fsdp"
        )
    if config.checkpoints.use_ds_universal_ckpt:
        raise ConfigError(
            "--use_ds_universal_ckpt reads a checkpoint that only DeepSpeed understands, but --backend is local",
            try_this="--backend deepspeed",
        )


def sharded_policies_have_other_engines(config: RLConfig) -> None:
    """Reject FSDP in a local run, in which the engine generates with the policy's own weights."""
    if config.sharding.backend == "fsdp" and resolve_runtime(config) == "local":
        raise ConfigError(
            "--backend fsdp shards the weights of the policy, but a local run generates with them",
            try_this="--runtime ray, or --backend auto",
        )


def muon_trains_whole_matrices(config: TrainingConfig) -> None:
    """Reject Muon under DeepSpeed and FSDP, which split the matrices that Muon must orthogonalise as a whole."""
    flags = config.optimizer
    own = flags.critic_optim if isinstance(flags, PolicyOptimizerFlags) else None
    for name, count in model_processes(config).items():
        flag = "--critic_optim" if name == "critic" and own else "--optim"
        backend = backend_of(config, count)
        if backend == "local" or (own if flag == "--critic_optim" else flags.optim) != "muon":
            continue
        why = "DeepSpeed's Muon supports neither --muon_ns_steps nor --muon_nesterov"
        raise ConfigError(
            f"{flag} muon needs whole matrices and runs in one process only; "
            f"{why if backend == 'deepspeed' else 'FSDP splits them'}",
            try_this=f"{flag} adam",
        )


def overlapping_needs_sharded_gradients(config: TrainingConfig) -> None:
    """Require stage 2 or 3 for --overlap_comm: DeepSpeed overlaps only the reduction of gradient shards."""
    sharding = config.sharding
    if sharding.overlap_comm and sharding.zero_stage < 2 and deepspeed_processes(config):
        raise ConfigError(
            f"--overlap_comm reduces gradients shard by shard: expected --zero_stage 2 or 3, got {sharding.zero_stage}",
            try_this="--zero_stage 2",
        )


def offloading_needs_a_sharded_optimizer(config: TrainingConfig) -> None:
    """Require stage 1 or higher for --adam_offload: DeepSpeed offloads only sharded optimizers."""
    if config.sharding.adam_offload and config.sharding.zero_stage == 0 and deepspeed_processes(config):
        raise ConfigError("--adam_offload needs a sharded optimizer, but --zero_stage is 0", try_this="--zero_stage 2")


def hierarchy_needs_sharded_weights(config: TrainingConfig) -> None:
    """Require stage 3 for --zpg, because only stage 3 shards weights, and a size that divides the processes."""
    zpg, stage = config.sharding.zpg, config.sharding.zero_stage
    counts = deepspeed_processes(config, frozen=True).values()
    if zpg == 1 or not counts:
        return
    if stage != 3:
        raise ConfigError(
            f"--zpg {zpg} keeps a second copy of sharded weights, but --zero_stage is {stage}",
            try_this="--zero_stage 3",
        )
    uneven = [count for count in counts if count % zpg]
    if uneven:
        raise ConfigError(
            f"--zpg {zpg} does not divide the {uneven[0]} processes of a model", try_this=f"--zpg {uneven[0]}"
        )


def gradient_sums_use_fp32_or_the_weights_dtype(config: TrainingConfig) -> None:
    """Require a supported accumulation dtype: fp32 or the weights' dtype; at stage 0 only the latter."""
    asked, own = config.sharding.grad_accum_dtype, config.model.param_dtype
    if not deepspeed_processes(config):
        return
    if asked is None and own == "bf16" and config.sharding.zero_stage == 0 and config.model.device != "cpu":
        raise ConfigError(
            "--zero_stage 0 sums the gradients of micro-batches in bf16, whose 8-bit mantissa makes sums inaccurate",
            try_this="--zero_stage 1, which sums in fp32, or --grad_accum_dtype bf16",
        )
    if asked in (None, own):
        return
    if asked != "fp32":
        raise ConfigError(
            f"--grad_accum_dtype {asked} with weights in {own}: gradients are summed in fp32 or in the weights' dtype",
            try_this="--grad_accum_dtype fp32",
        )
    if config.sharding.zero_stage == 0:
        raise ConfigError(
            f"--grad_accum_dtype fp32 with weights in {own} needs a sharded optimizer, but --zero_stage is 0",
            try_this="--zero_stage 2",
        )


def sleeping_needs_movable_gradients(config: RLConfig) -> None:
    """Reject sleep at stage 1 with bf16 weights and fp32 gradients, because DeepSpeed cannot offload that optimizer."""
    sharding = config.sharding
    fp32_sums = config.model.param_dtype == "bf16" and sharding.grad_accum_dtype != "bf16"
    stuck = sharding.zero_stage == 1 and fp32_sums and not sharding.adam_offload
    if config.placement.deepspeed_enable_sleep and stuck and deepspeed_processes(config):
        raise ConfigError(
            "--deepspeed_enable_sleep cannot move the fp32 gradients of --zero_stage 1 off the device",
            try_this="--zero_stage 2",
        )


def fp16_needs_a_loss_scale(config: TrainingConfig) -> None:
    """Require loss scaling for fp16, because small fp16 gradients would underflow to zero."""
    if config.model.param_dtype == "fp16" and config.sharding.zero_stage == 0 and deepspeed_processes(config):
        raise ConfigError(
            "--param_dtype fp16 needs loss scaling, which DeepSpeed does not support at --zero_stage 0",
            try_this="--zero_stage 1",
        )


def tensor_parallelism_splits_plain_layers(config: TrainingConfig) -> None:
    """Reject LoRA with DeepSpeed's tensor parallelism, which does not recognise linear layers that LoRA has wrapped."""
    size = config.sharding.ds_tensor_parallel_size
    if size > 1 and config.lora.lora_rank > 0 and config.sharding.backend != "fsdp":
        raise ConfigError(
            f"--ds_tensor_parallel_size {size} cannot split the layers that LoRA wraps: expected --lora_rank 0, "
            f"got {config.lora.lora_rank}",
            try_this="--backend fsdp, or --ds_tensor_parallel_size 1 --zero_stage 3",
        )


def fsdp_divides_experts(config: TrainingConfig) -> None:
    """Require FSDP without adapters and split layers for --expert_parallel_size, and a size that divides processes."""
    size = config.sharding.expert_parallel_size
    if size == 1:
        return
    if config.sharding.backend != "fsdp":
        raise ConfigError(
            f"--expert_parallel_size {size} divides experts under FSDP only, but --backend is"
            f" {config.sharding.backend}",
            try_this="--backend fsdp",
        )
    if config.lora.lora_rank > 0:
        raise ConfigError(
            f"--expert_parallel_size {size} cannot divide adapters of experts: expected --lora_rank 0, "
            f"got {config.lora.lora_rank}",
            try_this="--expert_parallel_size 1",
        )
    if config.sharding.ds_tensor_parallel_size > 1:
        raise ConfigError(
            f"--expert_parallel_size {size} cannot be combined with --ds_tensor_parallel_size "
            f"{config.sharding.ds_tensor_parallel_size}",
            try_this="--ds_tensor_parallel_size 1",
        )
    for name, count in model_processes(config, frozen=True).items():
        if count % size:
            raise ConfigError(
                f"--expert_parallel_size {size} does not divide the number of processes ({count}) of {name}",
                try_this=f"--expert_parallel_size {math.gcd(size, count)}",
            )


def four_bit_weights_are_not_sharded(config: TrainingConfig) -> None:
    """Reject 4-bit weights at stage 3 and under FSDP: they are packed into blocks that cannot be sharded."""
    if config.model.load_in_4bit and config.sharding.backend == "fsdp":
        raise ConfigError(
            "--load_in_4bit packs weights into blocks that --backend fsdp cannot shard", try_this="--backend deepspeed"
        )
    if config.model.load_in_4bit and config.sharding.zero_stage == 3 and deepspeed_processes(config, frozen=True):
        raise ConfigError(
            "--load_in_4bit packs weights into blocks that --zero_stage 3 cannot shard", try_this="--zero_stage 2"
        )


def compiled_layers_are_not_sharded(config: TrainingConfig) -> None:
    """Reject compilation at stage 3: a compiled layer cannot wait for the weights that ZeRO-3 gathers as it runs."""
    if config.sharding.deepcompile and config.sharding.zero_stage == 3 and deepspeed_processes(config):
        raise ConfigError(
            "--deepcompile cannot compile layers whose weights --zero_stage 3 gathers during the forward pass",
            try_this="--zero_stage 2, or without --deepcompile",
        )
