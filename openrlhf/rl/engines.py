"""The rollout engines of a run: `engine_spec` describes them, and `make_engine` builds one from the description.

For an engine in a separate process, the `EngineSpec` is sent to that process, which calls `load_engine`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import caches_prefixes
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm, load_tokenizer
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.rollout.engine import LoadingEngine
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm import VLLMEngine
from openrlhf.rollout.vllm_peer import run_workers
from openrlhf.training.local import LocalFrozen
from openrlhf.training.processes import choose_device, enter_folder


def engine_spec(config: RLConfig) -> EngineSpec:
    """Describe the engines of a reinforcement learning run."""
    return EngineSpec(
        model=config.model,
        engines=replace(config.engines, enable_prefix_caching=caches_prefixes(config)),
        context_length=config.rollout.context_length,
        seed=config.batches.seed,
        seeded_requests=config.batches.full_determinism,
        whole_log_probs=config.rollout.whole_log_probs,
        keeps_cache=config.asynchrony.partial_rollout_keep_cache,
        reports_experts=config.rollout.router_replay,
    )


def load_engine(spec: EngineSpec, number: int, folder: str) -> LoadingEngine:
    """Build engine `number` in a separate process; `folder` is the driver's working folder."""
    enter_folder(folder)
    tokenizer = load_tokenizer(str(spec.model.pretrain), spec.model)
    return make_engine(spec, tokenizer, choose_device(spec.model.device), number)


def join_engine(spec: EngineSpec, number: int, folder: str) -> None:
    """Run the part of engine `number` that is on this node, until it fails; `folder` is the driver's working folder."""
    enter_folder(folder)
    run_workers(replace(spec, seed=spec.seed + number), choose_device(spec.model.device))


def make_engine(
    spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device, number: int = 0
) -> LoadingEngine:
    """Build engine `number`; the number is added to vLLM's seed, so that engines sample differently."""
    if spec.engines.vllm_num_engines:
        return VLLMEngine(replace(spec, seed=spec.seed + number), tokenizer, device)
    whole = replace(spec.model, load_in_4bit=False)  # synced weights are merged and never quantised
    model = load_causal_lm(str(spec.model.pretrain), whole, device=device, packing=False)
    network = LocalFrozen(Network(model, self_test=not spec.model.skip_self_test), device).network
    if spec.reports_experts:
        network.routed = RoutedLayers(network.decoder)
    timeout = spec.engines.engine_timeout
    return HFEngine(network, tokenizer, whole_log_probs=spec.whole_log_probs, timeout=timeout).prepare()
