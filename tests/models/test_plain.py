"""An engine receives the names and values that the merged plain model would be saved with."""

import copy

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.errors import RolloutError
from openrlhf.models.export import save_model, saved_tensors
from openrlhf.models.forward import Network
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model
from openrlhf.models.plain import checkpoint_places, checkpoint_weights, load_weights, plain_copy
from tests.models.architectures import build
from tests.tiny import make_model

CPU = torch.device("cpu")
KINDS = ["llama", "gpt2", "gemma2", "mixtral", "qwen3_moe"]
IDS = torch.arange(2, 20)[None]


def load(folder, kind="llama", **shape):
    name = make_model(folder / "base", kind, initializer_range=0.2, **shape)
    return load_causal_lm(name, ModelFlags(), device=CPU, packing=False)


def adapted(folder, kind="llama", targets=("all-linear",), **shape):
    """Return a network whose adapters are no longer at their initial values."""
    torch.manual_seed(5)
    model = add_adapters(load(folder, kind, **shape), LoraFlags(lora_rank=4, target_modules=targets), scalar=False)
    return disturbed(model)


def disturbed(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    return Network(model).eval()


def assert_as_saved(network, plain, folder):
    """Check that names and values are those of the file that the plain model saves."""
    plain.save_pretrained(folder)
    expected = load_file(folder / "model.safetensors")
    got = {name: tensor.clone() for name, tensor in checkpoint_weights(network)}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert_close(got[name], tensor, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_model_is_yielded_as_it_is_saved(tmp_path, kind, tied):
    model = load(tmp_path, kind, tie_word_embeddings=tied)
    assert_as_saved(Network(model), model, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_merged_without_changing_the_network(tmp_path, kind):
    network = adapted(tmp_path, kind)
    before = copy.deepcopy(network.state_dict())
    merged = copy.deepcopy(network.model).merge_and_unload()
    assert_close(merged(IDS).logits, network.model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert_as_saved(network, merged, tmp_path / "out")
    assert_close(network.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kwargs", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_other_kinds_of_adapters(tmp_path, kwargs):
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "embed_tokens"], task_type="CAUSAL_LM", **kwargs)
    network = disturbed(get_peft_model(load(tmp_path), config))
    assert_as_saved(network, copy.deepcopy(network.model).merge_and_unload(), tmp_path / "out")


def test_a_scalar_model_with_adapters(tmp_path):
    name = make_model(tmp_path / "base")
    scalar = load_scalar_model(name, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)
    network = disturbed(add_adapters(scalar, LoraFlags(lora_rank=4), scalar=True))
    assert_as_saved(network, copy.deepcopy(network.model).merge_and_unload(), tmp_path / "out")


def test_a_4_bit_weight_is_yielded_in_its_compute_precision(tmp_path):
    network = adapted(tmp_path, targets=("q_proj",))
    layer = network.decoder.model.layers[0].mlp
    packed = Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict({"weight": layer.down_proj.weight})
    layer.down_proj = packed.to(CPU)
    weight = dict(checkpoint_weights(network))["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(weight, dequantize_4bit(packed.weight.data, packed.weight.quant_state))
    inputs = torch.randn(3, 64)
    assert_close(inputs @ weight.T, packed(inputs), rtol=1e-3, atol=1e-3)
    assert not any("absmax" in name for name, _ in checkpoint_weights(network))


def test_a_4_bit_model_with_adapters(tmp_path):
    name = make_model(tmp_path / "base", initializer_range=0.2)
    model = load_causal_lm(name, ModelFlags(load_in_4bit=True), device=CPU, packing=False)
    network = disturbed(add_adapters(model, LoraFlags(lora_rank=4, target_modules=("q_proj",)), scalar=False))
    got = dict(checkpoint_weights(network))
    plain = AutoModelForCausalLM.from_pretrained(name)
    assert {name: tensor.shape for name, tensor in got.items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    own = plain_copy(network)
    assert_close(own.model(IDS).logits, network.model(input_ids=IDS).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [False, True])
def test_a_plain_copy_computes_the_same_and_takes_new_weights(tmp_path, kind, lora):
    network = adapted(tmp_path, kind, tie_word_embeddings=True) if lora else Network(load(tmp_path, kind)).eval()
    own = plain_copy(network).eval()
    assert own.model is own.decoder
    assert_close(own.model(IDS).logits, network.model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.2)
    assert (own.model(IDS).logits - network.model(input_ids=IDS).logits).abs().max() > 0.01
    places = checkpoint_places(own)
    assert places.keys() == {name for name, _ in checkpoint_weights(network)}
    list(load_weights(places, checkpoint_weights(network)))
    assert_close(own.model(IDS).logits, network.model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_that_joins_tensors_of_the_model_is_rejected():
    with pytest.raises(RolloutError, match=r"gate_up_proj\.weight is not part of a single tensor in memory"):
        checkpoint_places(Network(build("hrm_text")))


def test_weights_of_another_model_are_rejected(tmp_path):
    places = checkpoint_places(Network(load(tmp_path)))
    with pytest.raises(RolloutError, match=r"h.0.attn.*does not have"):
        list(load_weights(places, [("h.0.attn.weight", torch.zeros(1))]))


@pytest.mark.parametrize("lora", [False, True])
def test_averaged_tensors_are_those_that_are_saved(tmp_path, lora):
    network = adapted(tmp_path) if lora else Network(load(tmp_path, tie_word_embeddings=True))
    save_model(network, tmp_path / "plainly")
    save_model(network, tmp_path / "given", {name: tensor.clone() for name, tensor in saved_tensors(network)})
    (plainly,), (given,) = ([*(tmp_path / name).glob("*.safetensors")] for name in ("plainly", "given"))
    assert_close(load_file(given), load_file(plainly), rtol=0, atol=0)
