"""DeepSpeed's settings as a function of our flags: the dictionaries that `deepspeed.py` passes to the engine.

`engine_config` is for a network that is trained, `frozen_config` for one that is only sharded. The flags have already
passed the rules of `config/checks/sharding.py`. DeepSpeed's documentation explains each key.
"""

from dataclasses import dataclass

import torch

from openrlhf.config.sections.training import ShardingFlags

LARGEST_BUCKET = 500_000_000  # elements; DeepSpeed's default

Section = dict[str, object]  # part of DeepSpeed's JSON config


@dataclass(frozen=True)
class NetworkFacts:
    """Facts about a network and its device that the settings depend on, in addition to the flags."""

    dtype: torch.dtype
    device_type: str  # cpu or cuda
    hidden_size: int
    num_parameters: int


def engine_config(sharding: ShardingFlags, max_norm: float, facts: NetworkFacts, *, universal: bool = False) -> Section:
    """Build the config for `deepspeed.initialize` of a network that is trained."""
    zero: Section = {
        "stage": sharding.zero_stage,
        "reduce_bucket_size": min(LARGEST_BUCKET, max(facts.num_parameters, 1)),
    }
    if sharding.overlap_comm:  # DeepSpeed's default: off below stage 3, on at stage 3
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if sharding.adam_offload and facts.device_type != "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if sharding.zero_stage == 3:
        zero |= _sharded_weights(sharding, facts)
    config: Section = {
        "train_micro_batch_size_per_gpu": 1,  # a placeholder: we choose the sizes and do not use the engine's counters
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `optim_step` decides when a step ends
        "gradient_clipping": 0.0 if clips_outside(sharding, facts) else max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "zero_optimization": zero,
        **half_precision(facts.dtype),
    }
    # The dtype in which gradients accumulate over micro-batches. Under ZeRO, bf16 models accumulate in fp32 unless a
    # flag sets another dtype, because bf16 has only 8 significant bits. On a CPU, weights are
    # always fp32; fp32 weights have fp32 gradients regardless of the flag.
    in_bf16 = facts.dtype == torch.bfloat16 and sharding.zero_stage >= 1
    dtype = sharding.grad_accum_dtype or ("fp32" if in_bf16 else None)
    if dtype and facts.dtype != torch.float32:
        config["data_types"] = {"grad_accum_dtype": dtype}
    if sharding.ds_tensor_parallel_size > 1:
        config["tensor_parallel"] = {
            "autotp_size": sharding.ds_tensor_parallel_size,
            "vocab_parallel_lm_head": False,  # True would require DeepSpeed's own loss; ours needs full logits
        }
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return config


def frozen_config(sharding: ShardingFlags, facts: NetworkFacts, *, offload: bool) -> Section:
    """Build the ZeRO-3 config of a model that is not trained: sharded weights, no optimizer."""
    assert sharding.zero_stage == 3, "only ZeRO-3 shards a model that is not trained"
    zero: Section = {**_sharded_weights(sharding, facts), "stage": 3}
    if offload and facts.device_type != "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "zero_optimization": zero,
        **half_precision(facts.dtype),
    }


def clips_outside(sharding: ShardingFlags, facts: NetworkFacts) -> bool:
    """Return True if the backend must clip: without ZeRO and in fp32, the engine clips but does not report the norm."""
    return sharding.zero_stage == 0 and facts.dtype == torch.float32


def _sharded_weights(sharding: ShardingFlags, facts: NetworkFacts) -> Section:
    """Return the keys of the ZeRO section that only stage 3 has."""
    # This threshold keeps biases and norms whole and shards matrices, for models of any size.
    section: Section = {"stage3_param_persistence_threshold": 10 * facts.hidden_size}
    if sharding.zpg > 1:
        section["zero_hpz_partition_size"] = sharding.zpg
    return section


def half_precision(dtype: torch.dtype) -> Section:
    """Return the section that makes DeepSpeed compute in bf16 or fp16; empty for fp32."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return {names[dtype]: {"enabled": True}} if dtype in names else {}
