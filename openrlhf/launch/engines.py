"""The flags of vLLM engines as their settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from openrlhf.config.commands import RLConfig

if TYPE_CHECKING:
    from openrlhf.rollout.vllm import VLLMSettings


def vllm_settings(config: RLConfig, dtype: torch.dtype, number: int = 0) -> VLLMSettings:
    """For the engine of this number: each draws from a seed of its own."""
    from openrlhf.rollout.vllm import VLLMSettings

    engines = config.engines
    return VLLMSettings(
        model=str(config.model.pretrain),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=config.rollout.context_length,
        tensor_parallel_size=engines.vllm_tensor_parallel_size,
        gpu_memory_utilization=engines.vllm_gpu_memory_utilization,
        enforce_eager=engines.enforce_eager,
        enable_prefix_caching=engines.enable_prefix_caching,
        enable_sleep=engines.vllm_enable_sleep,
        seed=config.batches.seed + number,
        trust_remote_code=config.model.trust_remote_code,
        seeded_requests=config.batches.full_determinism,
    )
