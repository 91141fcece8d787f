"""Models without weights become the same models once their weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.errors import BackendError
from openrlhf.models.deferred import deferred_weights
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model
from tests.models.architectures import build
from tests.tiny import make_model

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"kind": "llama", "tie_word_embeddings": True},
    "gemma3": {},  # a buffer that scales the embeddings
    "gpt2": {},
    "mixtral": {},  # experts that are renamed and joined
    "qwen3_moe": {"mlp_only_layers": [0]},
    "gpt_oss": {},
}


def load(folder: Path, *, defer: bool) -> Any:
    return load_causal_lm(str(folder), ModelFlags(), device=CPU, packing=False, defer=defer)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_filled_model_equals_one_that_was_loaded_whole(name: str, lora: bool, tmp_path: Path) -> None:
    make_model(tmp_path, **{"kind": name} | MODELS[name])
    found: list[Any] = []
    for defer in (False, True):
        torch.manual_seed(0)
        model = load(tmp_path, defer=defer)
        files = deferred_weights(model)
        assert bool(files.names) == defer
        if defer:
            assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) < 1000
        adapted = add_adapters(model, LoraFlags(lora_rank=4), scalar=False) if lora else model
        files.fill(list(adapted.parameters()))
        files.must_be_used_up()
        found.append(adapted)
    whole, filled = found
    assert_same_tensors(dict(filled.named_parameters()), dict(whole.named_parameters()))
    assert_same_tensors(dict(filled.named_buffers()), dict(whole.named_buffers()))
    assert filled.config.to_dict() == whole.config.to_dict()
    assert filled.training == whole.training
    ids = torch.arange(2, 12)[None]
    assert torch.equal(filled(ids).logits, whole(ids).logits)


def assert_same_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    make_model(tmp_path / "one")
    whole = load(tmp_path / "one", defer=False)
    whole.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    model = load(tmp_path / "many", defer=True)
    files = deferred_weights(model)
    assert len(set(files.files.values())) > 2
    files.fill(model.parameters())
    assert_same_tensors(model.state_dict(), whole.state_dict())


def load_scalar(folder: Path, *, defer: bool) -> Any:
    torch.manual_seed(0)
    new_head = folder.name == "language"
    flags = {"device": CPU, "packing": False, "head_prefix": "score", "new_head": new_head, "defer": defer}
    return load_scalar_model(str(folder), ModelFlags(), **flags)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["language", "scalar"])
def test_a_scalar_head_is_the_same_whether_new_or_saved(name: str, lora: bool, tmp_path: Path) -> None:
    make_model(tmp_path / "language")
    load_scalar(tmp_path / "language", defer=False).save_pretrained(tmp_path / "scalar")
    found: list[Any] = []
    for defer in (False, True):
        model = load_scalar(tmp_path / name, defer=defer)
        files = deferred_weights(model)
        assert bool(files.names) == defer
        adapted = add_adapters(model, LoraFlags(lora_rank=4 if lora else 0), scalar=True)
        files.fill(list(adapted.parameters()))
        files.must_be_used_up()
        found.append(adapted)
    assert_same_tensors(found[1].state_dict(), found[0].state_dict())


def test_files_with_other_tensors_are_loaded_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path, "mixtral")
    whole = load(tmp_path, defer=False)
    file = tmp_path / "model.safetensors"
    first = {name: tensor for name, tensor in whole.state_dict().items() if ".layers.0." in name}
    others = {name: tensor for name, tensor in load_file(file).items() if ".layers.0." not in name}
    save_file(first | others, file, {"format": "pt"})  # only the experts of the first layer are joined, as in memory
    model = load(tmp_path, defer=True)
    assert not deferred_weights(model).names
    assert_same_tensors(dict(model.named_parameters()), dict(whole.named_parameters()))
    assert "is loaded as a whole in each process" in capsys.readouterr().err


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe", "phimoe", "ernie4_5_moe", "jamba"]
)
def test_experts_of_other_families_are_put_together(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    whole, model = (load(tmp_path, defer=defer) for defer in (False, True))
    files = deferred_weights(model)
    assert any(len(parts) > 1 for parts in files.parts.values())
    files.fill(model.parameters())
    assert_same_tensors(model.state_dict(), whole.state_dict())


def test_a_parameter_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    make_model(tmp_path)
    model = load(tmp_path, defer=True)
    model.lm_head.weight = nn.Parameter(torch.zeros(3, 3))
    files = deferred_weights(model)
    files.fill(model.parameters())
    with pytest.raises(BackendError, match=r"1 parameter not loaded, such as lm_head\.weight"):
        files.must_be_used_up()
