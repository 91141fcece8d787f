"""DeepSpeed's settings as a function of our flags, and what it cannot combine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.sections.training import Sharding
from openrlhf.errors import ConfigError
from openrlhf.training.optim import OptimizerSettings

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's own default


@dataclass(frozen=True)
class Site:
    """What a network is and where it trains: the facts beside the flags that the settings depend on."""

    dtype: torch.dtype
    device_type: str  # cpu or cuda
    hidden_size: int
    num_parameters: int
    world_size: int
    adapters: bool = False
    quantised: bool = False


def engine_config(
    sharding: Sharding, settings: OptimizerSettings, site: Site, *, universal: bool = False
) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` takes; refuses what DeepSpeed would fail on later or do wrongly."""
    for rule in RULES:
        rule(sharding, settings, site)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # sizes are ours to choose: the engine's counters are not used
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # a step ends when we say so
        "gradient_clipping": 0.0 if clips_outside(sharding, site) else settings.max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": zero_section(sharding, site),
        **_precision(sharding, site),
    }
    if sharding.ds_tensor_parallel_size > 1:
        config["tensor_parallel"] = {
            "autotp_size": sharding.ds_tensor_parallel_size,
            "vocab_parallel_lm_head": False,  # its loss would be DeepSpeed's; ours needs whole logits
        }
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return config


def clips_outside(sharding: Sharding, site: Site) -> bool:
    """Without ZeRO and in fp32 the engine clips but tells no norm: then the backend does both."""
    return sharding.zero_stage == 0 and site.dtype == torch.float32


def frozen_config(sharding: Sharding, site: Site, *, offload: bool) -> dict[str, Any]:
    """ZeRO-3 around a model that only looks: sharded weights and no optimizer."""
    assert sharding.zero_stage == 3, "only ZeRO-3 shards a model that does not learn"
    zero = {**_weights_section(sharding, site), "stage": 3}
    if offload and site.device_type != "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "zero_optimization": zero,
        **_precision(sharding, site, sums=False),
    }


def zero_section(sharding: Sharding, site: Site) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": sharding.zero_stage,
        "reduce_bucket_size": min(LARGEST_BUCKET, max(site.num_parameters, 1)),
    }
    if sharding.overlap_comm:  # unset, it is off below stage 3 and on at stage 3
        section |= {"overlap_comm": True, "contiguous_gradients": True}
    if sharding.adam_offload and site.device_type != "cpu":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if sharding.zero_stage == 3:
        section |= _weights_section(sharding, site)
    return section


def _weights_section(sharding: Sharding, site: Site) -> dict[str, Any]:
    # Biases and norms stay whole, matrices are sharded, whatever the model's size.
    section: dict[str, Any] = {"stage3_param_persistence_threshold": 10 * site.hidden_size}
    if sharding.zpg > 1:
        section["zero_hpz_partition_size"] = sharding.zpg
    return section


def _precision(sharding: Sharding, site: Site, *, sums: bool = True) -> dict[str, Any]:
    section: dict[str, Any] = {}
    if site.dtype == torch.bfloat16:
        section["bf16"] = {"enabled": True}
    elif site.dtype == torch.float16:
        section["fp16"] = {"enabled": True}
    if sums and (dtype := sum_dtype(sharding, site)):
        section["data_types"] = {"grad_accum_dtype": dtype}
    return section


def sum_dtype(sharding: Sharding, site: Site) -> str | None:
    """Where gradients are sharded, micro-batches add up in fp32 unless asked otherwise: bf16 has 8 bits to add with."""
    if sharding.grad_accum_dtype is None and site.dtype == torch.bfloat16 and sharding.zero_stage >= 2:
        return "fp32"
    return sharding.grad_accum_dtype


Rule = Callable[[Sharding, OptimizerSettings, Site], None]


def muon_trains_whole_matrices(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if settings.optim == "muon":
        raise ConfigError(
            "--optim muon needs whole matrices and runs in one process only; DeepSpeed's own Muon has neither "
            "--muon_ns_steps nor --muon_nesterov",
            try_this="--optim adam",
        )


def overlapping_needs_sharded_gradients(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if sharding.overlap_comm and sharding.zero_stage < 2:
        raise ConfigError(
            f"--overlap_comm reduces gradients shard by shard, which --zero_stage {sharding.zero_stage} does not have",
            try_this="--zero_stage 2",
        )


def offloading_needs_a_sharded_optimizer(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if sharding.adam_offload and sharding.zero_stage == 0:
        raise ConfigError("--adam_offload needs a sharded optimizer, and --zero_stage is 0", try_this="--zero_stage 2")


def hierarchy_needs_sharded_weights(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if sharding.zpg > 1 and sharding.zero_stage != 3:
        raise ConfigError(
            f"--zpg {sharding.zpg} keeps a second copy of sharded weights, and --zero_stage is {sharding.zero_stage}",
            try_this="--zero_stage 3",
        )
    if site.world_size % sharding.zpg:
        raise ConfigError(f"--zpg {sharding.zpg} does not divide the {site.world_size} processes")


def gradients_are_summed_in_fp32_or_as_they_come(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    asked, own = sharding.grad_accum_dtype, DTYPE_NAMES[site.dtype]
    if asked in (None, own):
        return
    if asked != "fp32":
        raise ConfigError(
            f"--grad_accum_dtype {asked} with weights in {own}: gradients are summed in fp32 or in the weights' dtype",
            try_this="--grad_accum_dtype fp32",
        )
    if sharding.zero_stage == 0:
        raise ConfigError(
            f"--grad_accum_dtype fp32 with weights in {own} needs a sharded optimizer, and --zero_stage is 0",
            try_this="--zero_stage 2",
        )


def compiling_needs_fixed_shapes(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if sharding.deepcompile:
        raise ConfigError(
            "--deepcompile compiles for fixed shapes, and rows here keep their own lengths: two layers on an H200 were "
            "not compiled after five minutes; leave it out"
        )


def half_floats_need_a_loss_scale(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if site.dtype == torch.float16 and sharding.zero_stage == 0:
        raise ConfigError(
            "fp16 needs a scaled loss, and DeepSpeed scales none at --zero_stage 0", try_this="--zero_stage 1"
        )


def tensor_parallelism_splits_plain_layers(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    size = sharding.ds_tensor_parallel_size
    if size == 1:
        return
    if site.world_size % size:
        raise ConfigError(f"--ds_tensor_parallel_size {size} does not divide the {site.world_size} processes")
    if site.adapters:
        raise ConfigError(
            f"--ds_tensor_parallel_size {size} splits plain layers, and LoRA's adapters are in the way",
            try_this="--ds_tensor_parallel_size 1 --zero_stage 3",
        )


def packed_weights_stay_whole(sharding: Sharding, settings: OptimizerSettings, site: Site) -> None:
    if site.quantised and (sharding.zero_stage == 3 or sharding.ds_tensor_parallel_size > 1):
        raise ConfigError("--load_in_4bit packs weights, which cannot be sharded", try_this="--zero_stage 2")


RULES: tuple[Rule, ...] = (
    muon_trains_whole_matrices,
    overlapping_needs_sharded_gradients,
    offloading_needs_a_sharded_optimizer,
    hierarchy_needs_sharded_weights,
    gradients_are_summed_in_fp32_or_as_they_come,
    compiling_needs_fixed_shapes,
    half_floats_need_a_loss_scale,
    tensor_parallelism_splits_plain_layers,
    packed_weights_stay_whole,
)
