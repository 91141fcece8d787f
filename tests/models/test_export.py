import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.data.collate import pack, pad
from openrlhf.models.export import save_model
from openrlhf.models.forward import Network, Scores
from openrlhf.models.heads import separate_pad_from_eos
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model, load_tokenizer
from openrlhf.models.plain import checkpoint_weights
from openrlhf.types import TokenRow
from tests.tiny import make_model

CPU = torch.device("cpu")
TEXTS = ["a good answer", "no", "a much longer answer than the other two"]


def load_network(name):
    return Network(load_causal_lm(str(name), ModelFlags(), device=CPU, packing=False))


def load_scalar(name, prefix="score", **how):
    return Network(
        load_scalar_model(str(name), ModelFlags(), device=CPU, packing=False, head_prefix=prefix, **how)
    ).eval()


def rows(tokenizer):
    """Return the texts as rows, each with EOS."""
    ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in TEXTS]
    return [TokenRow(np.array(row, dtype=np.int32), np.arange(len(row)) > 0) for row in ids]


def ours(network, tokenizer, lay=pack):
    with torch.no_grad():
        return network(lay(rows(tokenizer)), Scores).scores


def train_a_reward_model(base, folder, prefix="score"):
    """Do what train_rm does before and after training: load, separate padding from EOS, set the prefix, save."""
    tokenizer = load_tokenizer(str(base), ModelFlags())
    torch.manual_seed(1)
    network = load_scalar(base, prefix, new_head=True)
    separate_pad_from_eos(network.decoder, tokenizer)
    network.decoder.config.update({"value_head_prefix": prefix, "mean": 0.5, "std": 2.0})
    with torch.no_grad():
        network.scalar_head.weight.normal_()
    save_model(network, folder)
    tokenizer.save_pretrained(folder)
    return network, tokenizer


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_a_saved_reward_model_scores_equally_here_and_in_plain_transformers(tmp_path, pad_is_eos):
    base = make_model(tmp_path / "base", pad_is_eos=pad_is_eos, initializer_range=0.2)
    network, _ = train_a_reward_model(base, tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    expected = ours(network, tokenizer)
    assert expected.std() > 0.1
    again = load_scalar(tmp_path / "rm")
    assert_close(ours(again, tokenizer), expected)
    assert_close(ours(again, tokenizer, lambda rows: pad(rows, tokenizer.pad_token_id)), expected)

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", num_labels=1).eval()
    for side in ("right", "left"):
        batch = tokenizer.pad(
            {"input_ids": [row.input_ids.tolist() for row in rows(tokenizer)]}, padding_side=side, return_tensors="pt"
        )
        with torch.no_grad():
            scores = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(-1)
        assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert (config["mean"], config["std"], config["value_head_prefix"]) == (0.5, 2.0, "score")


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_renamed_head_is_saved_and_loaded(tmp_path, kind):
    base = make_model(tmp_path / "base", kind, initializer_range=0.2)
    network, tokenizer = train_a_reward_model(base, tmp_path / "rm", prefix="value_head")
    names = load_file(tmp_path / "rm" / "model.safetensors").keys()
    assert "value_head.weight" in names
    assert "score.weight" not in names
    again = load_scalar(tmp_path / "rm")  # the name in the config overrides the flag
    assert_close(ours(again, tokenizer), ours(network, tokenizer))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "qwen3_moe"])
def test_an_exported_model_is_the_same_in_plain_transformers(tmp_path, kind):
    network = load_network(make_model(tmp_path / "base", kind, initializer_range=0.2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.1)
    save_model(network, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(2, 20)[None]
    assert_close(plain(ids).logits, network.model(ids).logits)
    if kind in ("mixtral", "qwen3_moe"):
        names = load_file(tmp_path / "out" / "model.safetensors").keys()
        assert any(".experts.3." in name for name in names)  # one by one, as on the hub


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_yielded_once(tmp_path, tied):
    network = load_network(make_model(tmp_path / "base", tie_word_embeddings=tied))
    names = [name for name, _ in checkpoint_weights(network)]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is not tied
    assert "model.embed_tokens.weight" in names
    with torch.no_grad():
        network.decoder.get_input_embeddings().weight.add_(1.0)
    save_model(network, tmp_path / "out")
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is not tied
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(2, 20)[None]
    assert_close(plain(ids).logits, network.model(ids).logits)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
def test_saved_adapters_give_equal_outputs_under_peft(tmp_path, targets):
    base = make_model(tmp_path / "base", initializer_range=0.2)
    lora = LoraFlags(lora_rank=4, target_modules=targets)
    model = add_adapters(load_causal_lm(base, ModelFlags(), device=CPU, packing=False), lora, scalar=False)
    network = Network(model).eval()
    ids = torch.arange(2, 20)[None]
    untrained = model(input_ids=ids).logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    save_model(network, tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").glob("*.safetensors")) == ["adapter_model.safetensors"]
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert (again(input_ids=ids).logits - untrained).abs().max() > 0.01


def test_saved_adapters_of_a_reward_model_include_its_head(tmp_path):
    base = make_model(tmp_path / "base", initializer_range=0.2)
    scalar = load_scalar(base, new_head=True).decoder
    network = Network(add_adapters(scalar, LoraFlags(lora_rank=4), scalar=True)).eval()
    tokenizer = load_tokenizer(base, ModelFlags())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    save_model(network, tmp_path / "adapter")
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    again = Network(PeftModel.from_pretrained(plain, tmp_path / "adapter")).eval()
    assert_close(ours(again, tokenizer), ours(network, tokenizer))
