"""For every model family, engine and trainer agree after each load of unchanged and changed weights."""

import pytest

from tests.rollout.vllm_engines import ATTENTION
from tests.rollout.vllm_pairs import built, gaps_after_every_load

pytestmark = pytest.mark.slow(seconds=4)
TWO_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 too
TIED = {"tie_word_embeddings": True}
EXPERTS = {  # padded for vLLM's kernels, and not
    "mixtral": ("mixtral", ATTENTION),
    "qwen3_moe": ("qwen3_moe", ATTENTION),
    "gpt_oss": ("gpt_oss", ATTENTION),
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


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_compute_with_the_weights_sent(family, tmp_path, tokenizer):
    with built(*EXPERTS[family], tmp_path, tokenizer) as (engine, network):
        assert max(gaps_after_every_load(engine, network, tokenizer)) < 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_with_the_weights_sent(family, tmp_path, tokenizer):
    with built(*FAMILIES[family], tmp_path, tokenizer) as (engine, network):
        assert max(gaps_after_every_load(engine, network, tokenizer)) < 1e-4
