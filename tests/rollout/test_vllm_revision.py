"""vLLM loads a model at a revision of its hub.

The test has its own file, because vLLM keeps one set of process groups per process.
"""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.config.sections.model import LoadingFlags
from openrlhf.models.load import load_tokenizer
from openrlhf.types import Request, SamplingParams
from tests.hub_cache import FIRST, SECOND, offline_cache
from tests.rollout.vllm_engines import ATTENTION, build
from tests.tiny import make_model

PROMPT, LENGTH = (5, 6, 7), 6


def greedy(folder):
    """Return the most likely tokens after the prompt, by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.slow(seconds=8)
def test_vllm_generates_with_the_weights_of_the_revision(tmp_path, monkeypatch):
    hub = offline_cache(tmp_path, monkeypatch)
    first, second = (make_model(tmp_path / str(seed), seed=seed, sharp=True, **ATTENTION) for seed in (1, 2))
    hub.add("org/model", FIRST, first, tag="v1")
    hub.add("org/model", SECOND, second, tag="main")
    params = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, temperature=0.0)
    engine = build("org/model@v1", load_tokenizer("org/model@v1", LoadingFlags()), context_length=64)
    try:
        (completion,) = asyncio.run(engine.generate([Request(PROMPT, params)]))
    finally:
        asyncio.run(engine.close())
    assert completion.token_ids.tolist() == greedy(first) != greedy(second)
