"""DeepSpeed's settings as a function of our flags."""

from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.sections.training import Sharding
from openrlhf.training.optim import OptimizerSettings

LARGEST_BUCKET = 500_000_000  # elements: DeepSpeed's own default


@dataclass(frozen=True)
class Site:
    """What a network is and where it trains: the facts beside the flags that the settings depend on."""

    dtype: torch.dtype
    device_type: str  # cpu or cuda
    hidden_size: int
    num_parameters: int


def engine_config(
    sharding: Sharding, settings: OptimizerSettings, site: Site, *, universal: bool = False
) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` takes; the flags keep the rules of `config/checks/sharding.py`."""
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
    """Under ZeRO micro-batches add up in fp32 unless asked otherwise: bf16 has 8 bits to add with.

    Weights in fp32, as always on a CPU, have gradients in fp32 whatever was asked.
    """
    if site.dtype == torch.float32:
        return None
    if sharding.grad_accum_dtype is None and site.dtype == torch.bfloat16 and sharding.zero_stage >= 1:
        return "fp32"
    return sharding.grad_accum_dtype
