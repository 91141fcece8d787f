"""Device, engine and sampling parameters of the inference commands that run a model in this process.

Chat and `batch_inference --eval_task generate` use the same Transformers engine; scoring and the reward server only
choose their device here.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.inference import SamplingFlags
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.preflight import explain_experts, explain_precision
from openrlhf.training.processes import choose_device
from openrlhf.types import SamplingParams


def choose_model_device(flags: LoadingFlags, name: str, local_rank: int = -1) -> torch.device:
    """Choose the device for the model `name`, and report loading flags that have no effect."""
    device = choose_device(flags.device, local_rank)
    explain_precision(flags.param_dtype, device)
    explain_experts(flags, name)
    return device


def open_hf_engine(
    flags: LoadingFlags, name: str, tokenizer: PreTrainedTokenizerBase, device: torch.device, *, max_rows: int = 256
) -> HFEngine:
    """Load a language model onto the device and return an engine that runs up to `max_rows` requests concurrently."""
    model = load_causal_lm(name, flags, device=device, packing=False)
    network = Network(model, self_test=not flags.skip_self_test)
    if not flags.load_in_4bit:  # a quantised model is already on its device
        network.to(device)
    return HFEngine(network, tokenizer, max_rows=max_rows).prepare()


def sampling_params(flags: SamplingFlags, *, max_tokens: int, seed: int) -> SamplingParams:
    """Return the parameters of one request; a temperature of 0 is greedy decoding."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if flags.greedy_sampling else flags.temperature,
        top_p=flags.top_p,
        repetition_penalty=flags.repetition_penalty,
        seed=seed,
    )
