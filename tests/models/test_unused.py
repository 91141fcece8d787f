"""Modules that training on text does not reach stay frozen and get no adapters."""

import pytest
import torch

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.models.load import add_adapters, load_causal_lm
from tests.models.architectures import build


def frozen(model):
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_vision_stays_frozen_while_the_text_decoder_trains(capsys):
    model = build("gemma3")
    assert add_adapters(model, LoraFlags(), scalar=False) is model
    text = {name for name, _ in model.named_parameters() if "language_model" in name}
    assert frozen(model) == {name for name, _ in model.named_parameters()} - text
    assert capsys.readouterr().err == (
        "openrlhf: Gemma3ForConditionalGeneration: training on text does not update multi_modal_projector,"
        " vision_tower, so these modules are frozen\n"
    )


@pytest.mark.parametrize(("family", "part"), [("gemma3", "vision_tower"), ("fuyu", "vision"), ("hy_v4", "indexer")])
def test_frozen_modules_get_no_adapters(family, part):
    adapted = add_adapters(build(family), LoraFlags(lora_rank=2), scalar=False)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained
    assert not [name for name in trained if part in name]


def test_an_indexer_stays_frozen():
    model = build("deepseek_v32")
    add_adapters(model, LoraFlags(), scalar=False)
    assert frozen(model) == {name for name, _ in model.named_parameters() if ".indexer." in name} != set()


def test_modules_that_a_family_freezes_stay_frozen_after_loading(tmp_path, capsys):
    build("ernie4_5_moe").save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), ModelFlags(), device=torch.device("cpu"), packing=False)
    capsys.readouterr()
    add_adapters(model, LoraFlags(), scalar=False)
    assert frozen(model) == {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"}
    assert capsys.readouterr().err == ""


def test_a_text_model_is_trained_as_a_whole(capsys):
    model = build("llama")
    add_adapters(model, LoraFlags(), scalar=False)
    assert frozen(model) == set()
    assert capsys.readouterr().err == ""
