"""Merged models give the outputs of base and adapter in plain Transformers and PEFT."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.errors import ConfigError
from openrlhf.models.merge import merge_adapter
from tests.commands import FAST, run_command
from tests.tiny import make_model
from tests.toy_data import ANSWERS, PAIRS, answers, pairs, write_rows

LORA = {"lora_rank": 4, "lora_alpha": 32}


@pytest.fixture
def adapter(tmp_path, models):
    """Return a function that trains an adapter and returns its folder."""

    def make(command, rows, pretrain=None, **flags):
        data = {"dataset": write_rows(tmp_path / "rows.jsonl", rows)}
        paths = {"pretrain": pretrain or models(), "save_path": "adapter", "ckpt_path": "adapter_ckpt"}
        run_command(command, FAST | LORA | data | paths | flags)
        return "./adapter"

    return make


def merge(base, adapter, **flags):
    run_command("lora_combiner", {"model_path": base, "lora_path": adapter, "output_path": "merged", **flags})
    return Path("merged")


def batch(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text + tokenizer.eos_token for text in ("abc=", "a longer one", "xyz")]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}


@torch.no_grad()
def logits(model, folder):
    return model.eval()(**batch(folder)).logits


def test_a_language_model_is_merged(adapter, models):
    folder = adapter("train_sft", answers(64), **ANSWERS)
    merged = merge(models(), folder, param_dtype="fp32")
    found = logits(AutoModelForCausalLM.from_pretrained(merged), merged)
    base = AutoModelForCausalLM.from_pretrained(models())
    before = logits(base, merged)
    assert_close(found, logits(PeftModel.from_pretrained(base, folder), merged), rtol=1e-5, atol=1e-5)
    assert (found - before).abs().max() > 1e-2
    assert not any(path.name.startswith("adapter") for path in merged.iterdir())


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_a_reward_model_is_merged_with_its_statistics(adapter, tmp_path, pad_is_eos, prefix):
    """The merged model keeps a padding token that training had to add, and the name of the head."""
    base = make_model(tmp_path / "base", pad_is_eos=pad_is_eos)
    held_out = write_rows(tmp_path / "held_out.jsonl", pairs(16, seed=1))
    flags = PAIRS | {"eval_dataset": held_out, "value_head_prefix": prefix}
    folder = adapter("train_rm", pairs(64), pretrain=base, **flags)
    merged = merge(base, folder, is_rm=True, param_dtype="fp32")
    config = json.loads((merged / "config.json").read_text())
    assert config["value_head_prefix"] == prefix
    assert config["std"] > 0
    assert {"mean", "pad_token_id"} <= config.keys()

    renamed = {} if prefix == "score" else {"key_mapping": {rf"^{prefix}\.": "score."}}
    found = logits(AutoModelForSequenceClassification.from_pretrained(merged, **renamed), merged)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    plain.resize_token_embeddings(max(len(tokenizer), plain.config.vocab_size), mean_resizing=False)
    plain.config.pad_token_id = tokenizer.pad_token_id
    assert_close(found, logits(PeftModel.from_pretrained(plain, folder), merged), rtol=1e-5, atol=1e-5)
    assert found.std() > 0


def test_a_merged_reward_model_can_score(adapter, models):
    merged = merge(models(), adapter("train_rm", pairs(32), **PAIRS), is_rm=True, param_dtype="fp32")
    rows = write_rows(Path("answers.jsonl"), answers(4))
    run_command(
        "batch_inference", {"eval_task": "rm", "pretrain": f"./{merged}", "dataset": rows, "output_path": "out.jsonl"}
    )
    assert len(Path("out.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_an_adapter_trained_on_a_4_bit_base_is_merged_into_the_plain_base(adapter, models):
    folder = adapter("train_sft", answers(32), load_in_4bit=True, **ANSWERS)
    merged = merge(models(), folder, param_dtype="fp32")
    wearing = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models()), folder)
    found = logits(AutoModelForCausalLM.from_pretrained(merged), merged)
    assert_close(found, logits(wearing, merged), rtol=1e-5, atol=1e-5)
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_saved_dtype_follows_the_flag(adapter, models, flag, dtype):
    merged = merge(models(), adapter("train_sft", answers(16), **ANSWERS), param_dtype=flag)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def error_line(capfd, *arguments, **flags):
    with pytest.raises(SystemExit) as stop:
        merge(*arguments, **flags)
    assert stop.value.code == 2
    assert not Path("merged").exists()
    return capfd.readouterr().err


def test_wrong_inputs_are_reported(adapter, models, capfd, tmp_path):
    folder = adapter("train_sft", answers(16), **ANSWERS)
    others = {"shallow": {"num_hidden_layers": 1}, "narrow": {"hidden_size": 16}}
    assert "is the adapter of a language model. Try: without --is_rm" in error_line(capfd, models(), folder, is_rm=True)
    for name, shape in others.items():
        assert "does not fit" in error_line(capfd, make_model(tmp_path / name, **shape), folder)
    assert "expected a local folder with an adapter_config.json" in error_line(capfd, models(), "org/adapter")
    assert "has no adapter_config.json" in error_line(capfd, models(), models())
    assert "is the same as --model_path" in error_line(capfd, models(), folder, output_path=models())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "adapter_config.json cannot be read"),
        ("[" * 100_000, "adapter_config.json cannot be read"),
        ("[1]", "adapter_config.json is not a JSON object"),
        ({"r": "x"}, "does not fit"),
        ({"target_modules": "(("}, "does not fit"),
        ({"base_model_name_or_path": 5}, "does not fit"),
        ({"task_type": ["x"]}, "does not fit"),
        (
            {"target_modules": ["q_proj"], "megatron_config": {"a": 1}, "megatron_core": "this"},
            "does not start with a valid prefix",
        ),
    ],
    ids=["cut", "deep", "list", "rank", "pattern", "base", "task", "module"],
)
def test_a_hostile_adapter_config_gives_one_error(text, complaint, models, tmp_path):
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["none"]}
    content = text if isinstance(text, str) else json.dumps(settings | text)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        merge_adapter(models(), tmp_path, is_rm=False, dtype=torch.float32)


def test_a_base_of_another_name_is_reported(adapter, models, capfd):
    folder = adapter("train_sft", answers(16), **ANSWERS)
    capfd.readouterr()
    merge(models(), folder)
    assert "was trained on" not in capfd.readouterr().err
    merge(models(seed=5), folder)
    line = f"adapter was trained on {models()}, and is merged into {models(seed=5)}: the result is right only if both"
    assert line in capfd.readouterr().err


def test_the_adapter_of_a_reward_model_needs_is_rm(adapter, models, capfd):
    folder = adapter("train_rm", pairs(16), **PAIRS)
    assert "is the adapter of a reward model. Try: --is_rm" in error_line(capfd, models(), folder)
