"""Sizes from config.json alone: those of the real model, its adapters, and the active part of a mixture."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.errors import ConfigError
from openrlhf.models.load import add_adapters
from openrlhf.plan.shapes import read_shape, shape_of
from tests.tiny import CONFIGS
from tools.scale_page import SHAPES

VOCABULARY = 100


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_adapters_are_those_of_the_real_model(kind):
    settings = CONFIGS[kind](vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(settings)
    shape = shape_of(settings)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = add_adapters(model, LoraFlags(lora_rank=4), scalar=False)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert 4 * sum(shape.adapters.values()) == trained


def test_a_scalar_head_replaces_that_of_the_vocabulary():
    settings = CONFIGS["llama"](vocab_size=VOCABULARY)
    settings.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(settings)
    shape = shape_of(CONFIGS["llama"](vocab_size=VOCABULARY), scalar=True)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.head == 0


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen/Qwen2.5-1.5B", 1.54, 1.54),
        ("Qwen/Qwen2.5-7B", 7.62, 7.07),  # the input embedding is looked up
        ("meta-llama/Llama-3.1-70B", 70.55, 69.5),
        ("Qwen/Qwen3-235B-A22B", 235.09, 21.57),
        ("deepseek-ai/DeepSeek-V3", 671.03, 36.62),
    ],
)
def test_well_known_models(name, billions, active):
    shape = shape_of(SHAPES[name])
    assert round(shape.parameters / 1e9, 2) == billions
    assert round(shape.active / 1e9, 2) == active


def test_only_the_config_is_read_and_no_random_numbers_are_drawn(tmp_path):
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    shape = read_shape(str(tmp_path), ModelFlags())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert shape.layers == 2


def test_latent_attention_caches_few_numbers():
    assert shape_of(SHAPES["deepseek-ai/DeepSeek-V3"]).cached == 512 + 64


def write_config(folder, **changed):
    settings = CONFIGS["llama"](vocab_size=VOCABULARY).to_dict() | changed
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def test_attention_that_config_json_names_is_not_loaded(tmp_path):
    """Transformers would download it, but `plan` runs no code from a hub."""
    name = write_config(tmp_path, attn_implementation="kernels-community/flash-attn2")
    assert read_shape(name, ModelFlags()).parameters > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": None},
        {"hidden_size": "64"},
        {"vocab_size": -5},
        {"vocab_size": 10**18},
        {"rope_parameters": {"rope_type": "no-such"}},
    ],
)
def test_impossible_sizes_give_one_error(changed, tmp_path):
    with pytest.raises(ConfigError, match="cannot load the model"):
        read_shape(write_config(tmp_path, **changed), ModelFlags())


def test_a_config_that_nests_too_deeply_gives_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match="cannot load the model"):
        read_shape(str(tmp_path), ModelFlags())
