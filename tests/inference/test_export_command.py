"""Exported models: merged ones give the outputs of base and adapter, GGUF files those of their model."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from peft import AutoPeftModelForCausalLM
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.inference.gguf.families import FAMILIES, interleave, rope_factors
from openrlhf.inference.gguf.verify import compare_logits
from tests.byte_models import LLAMA3, QWEN2, byte_level_tokenizer, make_byte_model, sentencepiece_tokenizer, split_by
from tests.commands import FAST, run_command
from tests.tiny import CONFIGS
from tests.toy_data import ANSWERS, PAIRS, answers, pairs, write_rows

PROMPT = torch.tensor([[5, 40, 7, 90, 12, 3, 55, 8]])
ARCHITECTURES = {"gemma3": "gemma3_text"}  # kind of a tiny model -> model type, where they differ
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def export(source, **flags):
    run_command("export", {"pretrain": source, "output_path": "./exported"} | flags)
    return Path("exported")


def fields(folder):
    """Return the metadata of a folder's GGUF file."""
    return {name: field.contents() for name, field in GGUFReader(folder / "model.gguf").fields.items()}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=PROMPT).logits


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "head_dim": 16}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma2", {"sliding_window": 256, "query_pre_attn_scalar": 8}),
        ("gemma3", {"sliding_window": 256, "query_pre_attn_scalar": 8}),
    ],
)
def test_a_reloaded_gguf_file_computes_what_its_model_computes(tmp_path, capfd, kind, shape):
    source = make_byte_model(tmp_path / "model", kind, **shape)
    folder = export(source, gguf="f32")
    assert "weights differ by at most 0.00%; reloaded, logits differ by 0.00%" in capfd.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(source)
    if kind != "mistral":  # a Llama, in GGUF
        reloaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", config=model.config)
        assert_close(logits(reloaded), logits(model), rtol=1e-4, atol=1e-4)
    assert fields(folder)["general.architecture"] == FAMILIES[ARCHITECTURES.get(kind, kind)].architecture


@pytest.mark.parametrize(("weights", "bound"), [("f16", 0.01), ("bf16", 0.05), ("q8_0", 0.1)])
def test_smaller_types_round_the_weights(tmp_path, weights, bound):
    source = make_byte_model(tmp_path / "model", num_hidden_layers=1)
    folder = export(source, gguf=weights)
    model = AutoModelForCausalLM.from_pretrained(source)
    stored = {tensor.name: tensor for tensor in GGUFReader(folder / "model.gguf").tensors}
    assert stored["blk.0.ffn_down.weight"].tensor_type.name == weights.upper()
    assert stored["output_norm.weight"].tensor_type.name == "F32"
    up = torch.from_numpy(dequantize(stored["blk.0.ffn_up.weight"].data, stored["blk.0.ffn_up.weight"].tensor_type))
    expected = model.model.layers[0].mlp.up_proj.weight
    assert 0 < (up - expected).abs().max() / expected.abs().max() < bound


def test_a_wrong_tensor_is_noticed(tmp_path):
    """Queries that are not interleaved, the classic mistake, change the logits by more than rounding explains."""
    model = AutoModelForCausalLM.from_pretrained(make_byte_model(tmp_path / "model"))
    expected = logits(model)[0]
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.q_proj.weight
        weight.copy_(interleave(weight, 4))
    with pytest.raises(RuntimeError, match="the logits of the GGUF file differ"):
        compare_logits(expected, logits(model)[0], "q8_0")


def test_llama_3_files_carry_the_factors_of_their_rotary_embeddings(tmp_path):
    source = make_byte_model(tmp_path / "model", rope_parameters=LLAMA_ROPE)
    stored = {tensor.name: tensor.data for tensor in GGUFReader(export(source, gguf="f16") / "model.gguf").tensors}
    scaled = AutoModelForCausalLM.from_pretrained(source).model.rotary_emb.inv_freq
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = torch.from_numpy(stored["rope_freqs.weight"].copy())
    assert_close(factors, plain / scaled)
    # Wavelengths of 6, 63, 628 and 6283 tokens: kept up to 64 / 4, stretched from 64 / 1, interpolated between.
    between = 64 / (2 * torch.pi * 10)
    assert factors.tolist() == pytest.approx([1, 1 / ((1 - (between - 1) / 3) / 8 + (between - 1) / 3), 8, 8])
    assert rope_factors(CONFIGS["llama"](vocab_size=8)) is None


@pytest.mark.parametrize(
    ("pre_tokenizer", "pre"), [(None, "gpt-2"), (split_by(LLAMA3), "llama-bpe"), (split_by(QWEN2), "qwen2")]
)
def test_byte_level_tokenizers_give_the_same_tokens(tmp_path, pre_tokenizer, pre):
    tokenizer = byte_level_tokenizer(pre_tokenizer)
    folder = export(make_byte_model(tmp_path / "model", tokenizer=tokenizer), gguf="f16", skip_self_test=True)
    assert fields(folder)["tokenizer.ggml.pre"] == pre
    reloaded = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    text = "the cat's 12345 hats:\n\n  naïve ✓<|im_end|>\n"
    assert reloaded(text).input_ids == tokenizer(text).input_ids
    assert reloaded.eos_token_id == tokenizer.eos_token_id
    assert reloaded.chat_template == tokenizer.chat_template


def test_sentencepiece_tokenizers_give_the_same_tokens(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    folder = export(make_byte_model(tmp_path / "model", tokenizer=tokenizer), gguf="f16", skip_self_test=True)
    metadata = fields(folder)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # unknown, two control tokens, a byte
    reloaded = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    for text in ("the cat sat on that mat", "12 hats make 46", "café ✓"):
        assert reloaded(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids


@pytest.mark.slow(seconds=2)
def test_an_adapter_becomes_a_gguf_file_that_is_prompted_as_in_training(tmp_path, capfd):
    base = make_byte_model(tmp_path / "base")
    data = {"dataset": write_rows(tmp_path / "rows.jsonl", answers(16))}
    flags = FAST | ANSWERS | data | {"pretrain": base, "save_path": "adapter", "ckpt_path": "ckpt", "lora_rank": 4}
    run_command("train_sft", flags)
    folder = export("./adapter", gguf="f32")
    adapted = AutoPeftModelForCausalLM.from_pretrained("adapter")
    reloaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", config=adapted.config)
    assert_close(logits(reloaded), logits(adapted), rtol=1e-4, atol=1e-4)
    assert 'TEMPLATE """{{ .Prompt }}="""' in (folder / "Modelfile").read_text()
    card = (folder / "README.md").read_text()
    assert "ollama create exported -f Modelfile" in card
    assert "openrlhf train_sft" in card  # carried over


def test_a_replaced_export_is_announced(tmp_path, capfd):
    line = "--output_path exported has a model, which this run will replace. Try: another --output_path"
    source = make_byte_model(tmp_path / "model", num_hidden_layers=1)
    for flags, is_replaced in (({}, False), ({"gguf": "f16"}, False), ({}, True), ({"gguf": "f16"}, True)):
        export(source, **flags)
        assert (line in capfd.readouterr().err) == is_replaced


def test_models_for_transformers_are_merged_and_converted(tmp_path, models):
    data = {"dataset": write_rows(tmp_path / "rows.jsonl", pairs(16))}
    flags = FAST | PAIRS | data | {"pretrain": models(), "save_path": "rm", "ckpt_path": "ckpt", "lora_rank": 4}
    run_command("train_rm", flags)
    folder = export("./rm", param_dtype="fp16")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert "mean" in config
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto")
    assert model.score.weight.dtype == torch.float16
    again = export("./exported", output_path="./again", param_dtype="fp32")
    assert again == Path("exported")
    copy = AutoModelForSequenceClassification.from_pretrained("again")
    assert torch.equal(copy.score.weight, model.score.weight.float())


REFUSED = [  # kind, tokenizer, shape, part of the message
    ("granite", byte_level_tokenizer, {}, "models of the family granite"),
    ("llama", None, {}, "a tokenizer of the type WordLevel"),
    ("llama", lambda: byte_level_tokenizer(split_by("unheard of")), {}, "how llama.cpp splits text"),
    ("llama", byte_level_tokenizer, {"rope_parameters": LLAMA_ROPE | {"rope_type": "dynamic"}}, "of type dynamic"),
    ("llama", byte_level_tokenizer, {"spare": -1}, "but the model has"),
]


@pytest.mark.parametrize(("kind", "tokenizer", "shape", "part"), REFUSED)
def test_models_that_a_file_cannot_express_are_rejected(tmp_path, models, capfd, kind, tokenizer, shape, part):
    source = make_byte_model(tmp_path / "model", kind, tokenizer=tokenizer(), **shape) if tokenizer else models()
    with pytest.raises(SystemExit) as stop:
        export(source, gguf="f16")
    assert stop.value.code == 2
    assert part in capfd.readouterr().err
    assert not Path("exported").exists()
