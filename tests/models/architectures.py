"""A tiny model of every causal-LM family that the installed Transformers can build from a config.

`build("llama")` is a decoder of some ten thousand fp32 parameters with fixed random weights. The weights are
large, and scalings such as `logit_scale` differ from their defaults: a token that sees another sequence, or a head that
is not finished as the model does it, changes log-probs far more than rounding does.
"""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
EOS, PAD, BOS = 0, 1, 2

# A field's tiny value, by its name: families share most names.
NAMES: tuple[tuple[Any, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size shape_vocab_size pronunciation_vocab_size"),
    (EOS, "eos_token_id"),
    (PAD, "pad_token_id"),
    (BOS, "bos_token_id"),
    # width, depth, positions
    (32, "hidden_size n_embd d_model emb_dim word_embed_proj_dim embedding_size lru_width dim_model"),
    (32, "input_embedding_size output_embedding_size out_hidden_size text_hidden_size hidden_size_global"),
    (48, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner ffn_hidden_size"),
    (48, "feed_forward_size intermediate_size_mlp dense_intermediate_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers depth"),
    (2, "num_decoder_layers"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
    (128, "original_max_position_embeddings"),
    # attention
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads"),
    (8, "head_dim dim_head d_head v_head_dim qk_nope_head_dim attention_head_size kv_channels"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank query_pre_attn_scalar"),
    (4, "qk_rope_head_dim rotary_dim"),
    (6, "sliding_window window_size attention_window_size attention_chunk_size local_attention sliding_window_size"),
    (True, "is_decoder"),
    # selection of keys: so few that some are left out
    (8, "index_head_dim"),
    (16, "index_n_heads"),  # with few heads many scores are exactly zero, and ties are broken at random
    (2, "index_topk_blocks index_block_size"),
    (4, "index_topk"),
    # experts
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_experts_per_token"),
    (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (16, "moe_shared_expert_intermediate_size"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group"),
    (1, "first_k_dense_replace num_dense_layers"),
    (0.0, "router_jitter_noise input_jitter_noise"),
    # state-space, linear-attention and convolution layers
    (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads n_mamba_heads linear_num_value_heads"),
    (8, "linear_num_heads mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (4, "linear_num_key_heads mamba_dt_rank time_step_rank mamba_chunk_size chunk_size block_size"),
    (2, "mamba_n_groups mamba_ngroups n_groups"),
    (64, "mamba_d_ssm"),
    # multipliers, all different from their defaults
    (0.4, "logit_scale"),
    (3.0, "logits_scaling logits_mup_width_multiplier attn_logit_softcapping"),
    (0.3, "lm_head_multiplier"),
    (2.0, "final_logit_softcapping logits_soft_cap output_logit_soft_cap"),
    (8, "dim_model_base"),
    (1.5, "embedding_multiplier"),
    (0.7, "residual_multiplier"),
    # random weights
    (0.2, "initializer_range init_std embed_init_std embedding_initializer_range"),
)
SIZES: dict[str, Any] = {name: value for value, names in NAMES for name in names.split()}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {"per_layer_config": {"1": {"head_dim": 16}}, "hidden_size_per_layer_input": 8}
QWEN4 = {
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

# Fields that need a particular value, by family.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 16},
    "cohere_compass_text": {**TWO_KINDS, "rope_parameters": dict.fromkeys(TWO_KINDS["layer_types"], MROPE)},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 2.0}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "o_groups": 2,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {**TWO_KINDS},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "got_ocr2": {"vision_config": {"mlp_dim": 48, "output_channels": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {**TWO_KINDS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mellum": {**TWO_KINDS},
    "minimax_m3_vl_text": {
        "index_n_heads": 2,
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "ministral": {**TWO_KINDS},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 16}},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"hidden_size": 128, "autocast_kernel_dtype": "float32"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Families of AutoModelForCausalLM without a tiny model, and why.
UNBUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm; gemma3n_text is the decoder",
    "gemma4_assistant": "a draft model that reads another model's hidden states",
    "gemma4_unified_assistant": "a draft model that reads another model's hidden states",
    "musicgen": "generates audio codes, not text",
    "musicgen_melody": "generates audio codes, not text",
}

FAMILIES: tuple[str, ...] = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNBUILT)


def build(family: str, *, attention: str | None = None, **fields: Any) -> PreTrainedModel:
    """Build a tiny model in evaluation mode (default: the attention that Transformers chooses) with config `fields`."""
    config = tiny_config(family, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    _vary_constants(model)
    return model.eval()


def tiny_config(family: str, **fields: Any) -> PretrainedConfig:
    return shrink(CONFIG_MAPPING[family], SPECIAL.get(family, {}) | fields)


def shrink(kind: type[PretrainedConfig], special: dict[str, Any]) -> PretrainedConfig:
    """Return a config with a tiny value for each field with a known name, one layer of each kind and no dropout."""
    given = kind().to_dict()
    fields = {name: SIZES[name] for name in given if name in SIZES}
    fields |= {name: 0.0 for name, value in given.items() if isinstance(value, float) and _drops(name)}
    if "qk_rope_head_dim" in given:  # latent attention: rotary embeddings see only this part of a head
        fields |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    fields |= _layer_kinds(given) | special
    for name in kind.sub_configs:
        if given.get(name) is not None:
            sub = kind.sub_configs[name]
            sub = CONFIG_MAPPING[given[name]["model_type"]] if sub.__name__ == "AutoConfig" else sub
            fields[name] = shrink(sub, special.get(name, {}))
    return kind(**fields)


def _drops(name: str) -> bool:
    return name.endswith(("dropout", "pdrop", "layerdrop", "dropout_p", "dropout_prob"))


def _layer_kinds(given: dict[str, Any]) -> dict[str, Any]:
    """Return config fields for one layer of each kind; empty for families with a single kind of layer."""
    kinds = {
        name: list(dict.fromkeys(value)) for name, value in given.items() if name.endswith("layer_types") and value
    }
    if not kinds:
        return {}
    depth = max(2, *(len(some) for some in kinds.values()))
    fields: dict[str, Any] = {name: (some * depth)[:depth] for name, some in kinds.items()}
    return fields | {name: depth for name in LAYERS if name in given}


def _vary_constants(model: PreTrainedModel) -> None:
    """Add noise to biases and norms, which start as zeros or ones, so that a computation that omits one is detected.

    Step sizes of state-space layers start so large that a state fades within a few tokens; trained ones are small.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-4.0, -1.0)
            elif parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter += 0.1 * torch.randn_like(parameter)
