"""Engine and trainer agree after weights were sent, the same ones and changed ones, for every family of models."""

import asyncio
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.data.collate import Layout
from openrlhf.errors import RolloutError
from openrlhf.models.forward import Network
from openrlhf.models.plain import checkpoint_weights
from openrlhf.rl.samples import batch_trajectories
from openrlhf.rollout import vllm_layers
from openrlhf.rollout.vllm import VLLMEngine, VLLMSettings
from openrlhf.types import Prompt, Request, SamplingParams, Trajectory
from tests.tiny import make_model

pytestmark = pytest.mark.slow(seconds=4)
ATTENTION = {"head_dim": 32}  # vLLM's attention on CPU knows no smaller one
TWO_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 too
TIED = {"tie_word_embeddings": True}
EXPERTS = {  # padded for vLLM's kernels, and not
    "mixtral": ("mixtral", ATTENTION),
    "qwen3_moe": ("qwen3_moe", ATTENTION),
}
FAMILIES = {
    "llama": ("llama", ATTENTION),
    "qwen2, tied": ("qwen2", TWO_HEADS | TIED),
    "qwen3, tied": ("qwen3", ATTENTION | TIED),
    "gemma3": ("gemma3", ATTENTION | TIED),
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 2}),
    "mistral": ("mistral", ATTENTION | {"sliding_window": None}),
    "granite": ("granite", TWO_HEADS),
    "mixtral, tied": ("mixtral", ATTENTION | TIED),
    "qwen3_moe, tied": ("qwen3_moe", ATTENTION | TIED),
}


@contextmanager
def built(kind, shape, folder, tokenizer):
    """An engine and the network that is trained."""
    path = make_model(folder, kind, seed=3, **shape)
    network = Network(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    engine = VLLMEngine(VLLMSettings(path, "float32", 64, enforce_eager=True, seeded_requests=True), tokenizer)
    yield engine, network
    asyncio.run(engine.close())


def send(engine, network, version=1):
    return asyncio.run(engine.load(checkpoint_weights(network), version, verify=True))


@torch.no_grad()
def change(network, seed):
    """Every parameter moves by as much as it is large."""
    made = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        weight.add_(torch.randn(weight.shape, generator=made) * weight.abs().mean())


def gap(engine, network, tokenizer):
    """The largest difference of log-probs of sampled tokens; the trainer scores all samples in one batch."""
    asked = [
        Request(tuple(tokenizer(text)["input_ids"]), SamplingParams(max_tokens=12, seed=seed))
        for seed, text in enumerate(("a", "the cat", "1+1=", "x" * 20))
    ]
    made = asyncio.run(engine.generate(asked))
    items = []
    for request, completion in zip(asked, made, strict=True):
        prompt, answer = request.prompt_token_ids, completion.token_ids
        mask = (False,) * len(prompt) + (True,) * len(answer)
        log_probs = (0.0,) * len(prompt) + completion.log_probs
        items.append(Trajectory(Prompt(0, "", prompt), prompt + answer, mask, log_probs, 0.0, 0.0, False, 0))
    batch = batch_trajectories(items, Layout(packing=False, pad_id=0))
    with torch.no_grad():
        trained = network(batch, "log_probs").log_probs
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


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_those_that_were_sent(family, tmp_path, tokenizer):
    with built(*EXPERTS[family], tmp_path, tokenizer) as (engine, network):
        assert max(gaps_after_every_load(engine, network, tokenizer)) < 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_what_was_sent(family, tmp_path, tokenizer):
    with built(*FAMILIES[family], tmp_path, tokenizer) as (engine, network):
        assert max(gaps_after_every_load(engine, network, tokenizer)) < 1e-4


@pytest.fixture(scope="module")
def tied(tmp_path_factory, tokenizer):
    with built("llama", ATTENTION | TIED, tmp_path_factory.mktemp("tied"), tokenizer) as made:
        yield made


def test_a_head_that_is_the_embedding_is_sent_with_it(tied, tokenizer):
    assert max(gaps_after_every_load(*tied, tokenizer)) < 1e-4


def test_what_a_dense_model_computes_with_is_read_back(tied):
    engine, network = tied
    sent = send(engine, network)
    assert engine._steps._readable == sent.keys()


def test_a_matrix_that_does_not_take_effect_is_named(tied, tokenizer, monkeypatch):
    engine, network = tied
    send(engine, network)
    change(network, 9)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_layers, "_pack_shared_weights", lambda model: None)
        with pytest.raises(RolloutError, match=r"other ones \(1 tensors\): model\.embed_tokens\.weight"):
            send(engine, network)
    send(engine, network)
    assert gap(engine, network, tokenizer) < 1e-4
