"""DeepSpeed's settings as a function of our flags: the dictionaries that `deepspeed.py` passes to the engine."""

from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.sections.training import ShardingFlags

LARGEST_BUCKET = 500_000_000  # elements; DeepSpeed's default


@dataclass(frozen=True)
class Site:
    """Facts about a network and its device that the settings depend on, in addition to the flags."""

    dtype: torch.dtype
    device_type: str  # cpu or cuda
    hidden_size: int
    num_parameters: int


def engine_config(sharding: ShardingFlags, max_norm: float, site: Site, *, universal: bool = False) -> dict[str, Any]:
    """Build the config for `deepspeed.initialize`; the flags have passed the rules of `config/checks/sharding.py`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # a placeholder: we choose the sizes and do not use the engine's counters
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `optim_step` decides when a step ends
        "gradient_clipping": 0.0 if clips_outside(sharding, site) else max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": zero_section(sharding, site),
        **_precision(sharding, site),
    }
    if sharding.ds_tensor_parallel_size > 1:
        config["tensor_parallel"] = {
            "autotp_size": sharding.ds_tensor_parallel_size,
            "vocab_parallel_lm_head": False,  # that would need DeepSpeed's loss; ours needs full logits
        }
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return config


def clips_outside(sharding: ShardingFlags, site: Site) -> bool:
    """Return True if the backend must clip: without ZeRO and in fp32 the engine clips but does not report the norm."""
    return sharding.zero_stage == 0 and site.dtype == torch.float32


def frozen_config(sharding: ShardingFlags, site: Site, *, offload: bool) -> dict[str, Any]:
    """Build the ZeRO-3 config of a model that is not trained: sharded weights, no optimizer."""
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


def zero_section(sharding: ShardingFlags, site: Site) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": sharding.zero_stage,
        "reduce_bucket_size": min(LARGEST_BUCKET, max(site.num_parameters, 1)),
    }
    if sharding.overlap_comm:  # DeepSpeed's default: off below stage 3, on at stage 3
        section |= {"overlap_comm": True, "contiguous_gradients": True}
    if sharding.adam_offload and site.device_type != "cpu":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if sharding.zero_stage == 3:
        section |= _weights_section(sharding, site)
    return section


def _weights_section(sharding: ShardingFlags, site: Site) -> dict[str, Any]:
    # This threshold keeps biases and norms whole and shards matrices, for models of any size.
    section: dict[str, Any] = {"stage3_param_persistence_threshold": 10 * site.hidden_size}
    if sharding.zpg > 1:
        section["zero_hpz_partition_size"] = sharding.zpg
    return section


def _precision(sharding: ShardingFlags, site: Site, *, sums: bool = True) -> dict[str, Any]:
    section: dict[str, Any] = {}
    if site.dtype == torch.bfloat16:
        section["bf16"] = {"enabled": True}
    elif site.dtype == torch.float16:
        section["fp16"] = {"enabled": True}
    if sums and (dtype := sum_dtype(sharding, site)):
        section["data_types"] = {"grad_accum_dtype": dtype}
    return section


def sum_dtype(sharding: ShardingFlags, site: Site) -> str | None:
    """Return the dtype in which gradients accumulate over micro-batches; None leaves it to DeepSpeed.

    Under ZeRO, bf16 models accumulate in fp32 unless a flag says otherwise, because bf16 has only 8 significant bits.
    Weights in fp32, as always on a CPU, have fp32 gradients regardless of the flag.
    """
    if site.dtype == torch.float32:
        return None
    if sharding.grad_accum_dtype is None and site.dtype == torch.bfloat16 and sharding.zero_stage >= 1:
        return "fp32"
    return sharding.grad_accum_dtype
