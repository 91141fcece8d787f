"""A vLLM engine that keeps the KV cache of unfinished requests at a weight sync (--partial_rollout_keep_cache)."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.types import Request, SamplingParams
from tests.rollout.vllm_engines import ATTENTION, LONGEST, build
from tests.tiny import make_model

# The prompt fills blocks of the prefix cache, so that other requests could share them.
LONG = Request(tuple(5 + place % 7 for place in range(400)), SamplingParams(max_tokens=200, min_tokens=201, seed=1))
SHORT = replace(LONG, params=replace(LONG.params, max_tokens=3))


def log_probs(decoder, completion, eos):
    """Return log-probs of a completion of the prompt, with the end token forbidden."""
    ids = completion.token_ids.tolist()
    with torch.no_grad():
        logits = decoder(torch.tensor([[*LONG.prompt_token_ids, *ids]])).logits[0, len(LONG.prompt_token_ids) - 1 : -1]
    logits[:, eos] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.slow(seconds=6)
def test_only_unfinished_requests_use_the_cache_of_older_weights(tmp_path, tokenizer):
    folder = make_model(tmp_path, seed=3, sharp=True, max_position_embeddings=LONGEST, **ATTENTION)
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    with torch.no_grad():
        for weight in new.parameters():
            weight.mul_(1.5)
    engine = build(folder, tokenizer, keeps_cache=True, enable_prefix_caching=True)

    async def change():
        task = asyncio.create_task(engine.generate([LONG]))
        await asyncio.sleep(0)  # post it before the short request
        await engine.generate([SHORT])
        await engine.pause(drain=False)
        await engine.load(list(new.state_dict().items()), 5)
        await engine.resume()
        try:
            return *await engine.generate([SHORT]), *await task
        finally:
            await engine.close()

    later, made = asyncio.run(change())
    assert later.log_probs == pytest.approx(log_probs(new, later, tokenizer.eos_token_id).numpy(), abs=1e-4)
    changed = made.token_versions.tolist().index(5)
    assert changed >= 3
    assert made.version == 0
    own = torch.tensor(made.log_probs)
    gaps = [(own - log_probs(decoder, made, tokenizer.eos_token_id)).abs() for decoder in (old, new)]
    assert gaps[0][:changed].max() < 1e-4
    assert gaps[1][changed:].max() > 1e-2  # with recomputed keys and values, they would agree
    assert gaps[0][changed:].max() > 1e-2  # but the weights are new
