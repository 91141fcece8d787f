"""vLLM samples from part of the distribution and reports log-probs of the whole, as training computes them."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.types import Request, SamplingParams
from tests.rollout.vllm_engines import build
from tests.tiny import make_model

pytestmark = pytest.mark.slow(seconds=8)


def test_truncated_samples_have_log_probs_of_the_whole_distribution(tmp_path, tokenizer):
    folder = make_model(tmp_path, seed=3, head_dim=32)  # the smallest that vLLM's attention supports on CPU
    engine = build(folder, tokenizer, context_length=64, seeded_requests=False, whole_log_probs=True)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in ("hello", "1+1=")]
    params = SamplingParams(max_tokens=8, top_p=0.3)
    try:
        made = asyncio.run(engine.generate([Request(prompt, params) for prompt in prompts]))
    finally:
        asyncio.run(engine.close())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, completion in zip(prompts, made, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids, dtype=torch.long)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(exact.tolist(), abs=1e-4)
