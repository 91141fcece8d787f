"""Engines of vLLM on tiny models, and requests for them."""

import asyncio
from dataclasses import replace

from openrlhf.rollout.vllm import VLLMEngine, VLLMSettings
from openrlhf.types import Request, SamplingParams

LONGEST = 2048
ATTENTION = {"head_dim": 32}  # vLLM's attention on CPU knows no smaller one
LONG = Request((5, 6, 7), SamplingParams(max_tokens=500, min_tokens=501, seed=1))
SHORT = replace(LONG, params=replace(LONG.params, max_tokens=3))


def build(folder, tokenizer, **settings):
    fixed = {"enforce_eager": True, "enable_sleep": True, "seeded_requests": True}
    return VLLMEngine(VLLMSettings(folder, "float32", LONGEST, **fixed | settings), tokenizer)


async def begun(engine):
    """A long request of which some tokens are there: a short one that came with it has ended."""
    task = asyncio.create_task(engine.generate([LONG]))
    await asyncio.sleep(0)  # it has asked before the short one asks
    await engine.generate([SHORT])
    assert not task.done()
    return task
