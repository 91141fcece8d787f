"""Tiny models and tokenizers, built when a test needs them; nothing is downloaded.

The tokenizer has one token per character, and the decoders have a few thousand parameters with random weights.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=.,:;?!'\"()[]{}<>|#_@"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
YARN = {  # GPT-OSS extends its positions this way; the default is for longer sequences
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIGS = {
    "llama": lambda **shape: LlamaConfig(**SHAPE | shape),
    "qwen2": lambda **shape: Qwen2Config(**SHAPE | shape),
    "qwen3": lambda **shape: Qwen3Config(**SHAPE | {"head_dim": 8} | shape),
    "mistral": lambda **shape: MistralConfig(**SHAPE | {"sliding_window": 4} | shape),
    "gemma2": lambda **shape: Gemma2Config(**SHAPE | {"head_dim": 8, "sliding_window": 4} | shape),
    "gemma3": lambda **shape: Gemma3TextConfig(**SHAPE | {"head_dim": 8, "sliding_window": 4} | shape),
    "granite": lambda **shape: GraniteConfig(**SHAPE | {"logits_scaling": 3.0} | shape),
    "cohere": lambda **shape: CohereConfig(**SHAPE | {"logit_scale": 0.3} | shape),
    "gpt2": lambda **shape: GPT2Config(**GPT2_SHAPE | NO_DROPOUT | shape),
    "mixtral": lambda **shape: MixtralConfig(**SHAPE | {"num_local_experts": 4, "sliding_window": None} | shape),
    "gpt_oss": lambda **shape: GptOssConfig(
        **SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4} | YARN | shape
    ),
    "qwen3_moe": lambda **shape: Qwen3MoeConfig(
        **SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8} | shape
    ),
}


def character_tokenizer(tokens: Sequence[str], *, eos: str, pad: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these tokens, numbered in order, one per character; unknown characters become `?`."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)


def make_tokenizer(*, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; EOS is </s>, and padding is <pad> or EOS itself."""
    special = ["</s>"] if pad_is_eos else ["</s>", "<pad>"]
    tokenizer = character_tokenizer([*special, *CHARACTERS], eos="</s>", pad=special[-1])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    folder: Path, kind: str = "llama", *, pad_is_eos: bool = False, seed: int = 0, sharp: bool = False, **shape: object
) -> str:
    """Write a model with random weights and its tokenizer into a folder; return its path.

    The logits of a sharp model are so far apart that greedy choices have no ties.
    """
    tokenizer = make_tokenizer(pad_is_eos=pad_is_eos)
    torch.manual_seed(seed)
    config = CONFIGS[kind](
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config)
    if sharp:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
