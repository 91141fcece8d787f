"""vLLM engines on tiny models, and requests for them."""

import asyncio
from dataclasses import replace

import torch

from openrlhf.config.sections.cluster import EngineFlags
from openrlhf.config.sections.model import ServedModelFlags
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm import VLLMEngine
from openrlhf.types import Request, SamplingParams

LONGEST = 2048
ATTENTION = {"head_dim": 32}  # the smallest that vLLM's attention supports on CPU
LONG = Request((5, 6, 7), SamplingParams(max_tokens=500, min_tokens=501, seed=1))
SHORT = replace(LONG, params=replace(LONG.params, max_tokens=3))


def build(
    folder,
    tokenizer,
    *,
    context_length=LONGEST,
    seeded_requests=True,
    engine_timeout=1800.0,
    enable_prefix_caching=None,
    **more,
):
    spec = EngineSpec(
        model=ServedModelFlags(pretrain=folder, param_dtype="fp32"),
        engines=EngineFlags(
            vllm_num_engines=1,
            enforce_eager=True,
            vllm_enable_sleep=True,
            vllm_gpu_memory_utilization=0.9,
            engine_timeout=engine_timeout,
            enable_prefix_caching=enable_prefix_caching,
        ),
        context_length=context_length,
        seeded_requests=seeded_requests,
        **more,
    )
    return VLLMEngine(spec, tokenizer, torch.device("cpu"))


async def begun(engine):
    """Start a long request, and return its task once it has some tokens, because a short request has ended."""
    task = asyncio.create_task(engine.generate([LONG]))
    await asyncio.sleep(0)  # post it before the short request
    await engine.generate([SHORT])
    assert not task.done()
    return task
