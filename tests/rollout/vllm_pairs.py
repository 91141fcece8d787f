"""A vLLM engine and the network that is trained: weights are sent to the engine, and log-probs must agree."""

import asyncio
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM

from openrlhf.agents.trajectory import join_turn
from openrlhf.data.collate import Layout
from openrlhf.models.forward import LogProbs, Network
from openrlhf.models.plain import checkpoint_weights
from openrlhf.rl.samples import batch_trajectories
from openrlhf.types import Prompt, Request, SamplingParams
from tests.rollout.vllm_engines import build
from tests.tiny import make_model


@contextmanager
def built(kind, shape, folder, tokenizer):
    """Build an engine and the network that is trained."""
    path = make_model(folder, kind, seed=3, **shape)
    network = Network(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    engine = build(path, tokenizer, context_length=64)
    yield engine, network
    asyncio.run(engine.close())


def send(engine, network, version=1):
    return asyncio.run(engine.load(checkpoint_weights(network), version, verify=True))


@torch.no_grad()
def change(network, seed):
    """Change every parameter by about its own size."""
    made = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        weight.add_(torch.randn(weight.shape, generator=made) * weight.abs().mean())


def gap(engine, network, tokenizer):
    """Return the largest difference of log-probs of sampled tokens; the trainer scores all samples in one batch."""
    asked = [
        Request(tuple(tokenizer(text)["input_ids"]), SamplingParams(max_tokens=12, seed=seed))
        for seed, text in enumerate(("a", "the cat", "1+1=", "x" * 20))
    ]
    made = asyncio.run(engine.generate(asked))
    pairs = zip(asked, made, strict=True)
    items = [join_turn(Prompt(0, "", request.prompt_token_ids), completion, 1000) for request, completion in pairs]
    batch = batch_trajectories(items, Layout(packing=False, pad_id=0))
    with torch.no_grad():
        trained = network(batch, LogProbs).log_probs
    return max(
        abs(own - drawn)
        for row, item in zip(trained.tolist(), items, strict=True)
        for own, drawn, acts in zip(row, item.rollout_log_probs, item.action_mask, strict=False)
        if acts
    )


def gaps_after_every_load(engine, network, tokenizer):
    found = [gap(engine, network, tokenizer)]  # as loaded from disk
    for version in range(1, 5):
        if version > 1:
            change(network, version)
        send(engine, network, version)
        found.append(gap(engine, network, tokenizer))
    return found
