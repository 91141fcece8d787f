"""Generation engines: a picklable description (`EngineSpec`) and the function that builds the engine from it.

The engine is built in this process or, on a cluster, in the worker process that receives the description.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.sections.model import ServedModelFlags
from openrlhf.models.forward import Network
from openrlhf.models.load import choose_dtype, load_causal_lm
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.vllm import VLLMEngine, VLLMSettings
from openrlhf.training.local import LocalFrozen

BY_DEVICE = "by device"  # placeholder dtype; `make_engine` chooses the real one for its device


@dataclass(frozen=True)
class EngineSpec:
    """Description of an engine: vLLM if `vllm` is set, otherwise Transformers."""

    model: ServedModelFlags
    vllm: VLLMSettings | None = None
    awaits_weights: bool = True  # generate nothing before the policy's weights have arrived
    whole_log_probs: bool = False


def engine_spec(config: RLConfig) -> EngineSpec:
    """Describe the engines of a reinforcement learning run."""
    vllm = vllm_settings(config) if config.engines.vllm_num_engines else None
    return EngineSpec(config.model, vllm, whole_log_probs=config.rollout.whole_log_probs)


def vllm_settings(config: RLConfig) -> VLLMSettings:
    engines = config.engines
    return VLLMSettings(
        model=str(config.model.pretrain),
        dtype=BY_DEVICE,
        max_model_len=config.rollout.context_length,
        tensor_parallel_size=engines.vllm_tensor_parallel_size,
        gpu_memory_utilization=engines.vllm_gpu_memory_utilization,
        enforce_eager=engines.enforce_eager,
        enable_prefix_caching=engines.enable_prefix_caching,
        enable_sleep=engines.vllm_enable_sleep,
        seed=config.batches.seed,
        trust_remote_code=config.model.trust_remote_code,
        seeded_requests=config.batches.full_determinism,
        whole_log_probs=config.rollout.whole_log_probs,
    )


def make_engine(
    spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device, number: int = 0
) -> LoadingEngine:
    """Build engine `number`; its number offsets vLLM's seed, so that several engines sample differently."""
    if spec.vllm is None:
        whole = replace(spec.model, load_in_4bit=False)  # synced weights are merged and not quantised
        model = load_causal_lm(str(spec.model.pretrain), whole, device=device, packing=False)
        network = LocalFrozen(Network(model, self_test=not spec.model.skip_self_test), device).network
        return HFEngine(network, tokenizer, whole_log_probs=spec.whole_log_probs).prepare()
    dtype = str(choose_dtype(spec.model.param_dtype, device)).removeprefix("torch.")
    return VLLMEngine(replace(spec.vllm, dtype=dtype, seed=spec.vllm.seed + number), tokenizer)
