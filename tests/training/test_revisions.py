"""Models and datasets at a revision of their hub: what is loaded, recorded and merged; hub_cache.py has the hub."""

import json
import sys
from types import SimpleNamespace

import datasets
import pytest
import torch
from safetensors.torch import load_file

from openrlhf.config.sections.model import LoadingFlags, ModelFlags
from openrlhf.data.sources import load_dataset_rows
from openrlhf.errors import ConfigError, DataError
from openrlhf.models.load import load_causal_lm, load_scalar_model, load_tokenizer, read_config
from tests.commands import FAST, run_command
from tests.hub_cache import FIRST, SECOND, offline_cache
from tests.toy_data import ANSWERS, answers, write_rows

CPU = torch.device("cpu")
MISSING = "3" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return offline_cache(tmp_path, monkeypatch)


@pytest.fixture
def two_models(hub, models):
    """Two commits of org/model, with different weights, shapes and tokenizers; the main branch is at the second."""
    hub.add("org/model", FIRST, models(seed=1), tag="v1")
    hub.add("org/model", SECOND, models(seed=2, intermediate_size=48, pad_is_eos=True), tag="main")


@pytest.fixture
def two_datasets(hub, tmp_path):
    """Two commits of org/data, with different rows; the main branch is at the second."""
    for commit, tag in ((FIRST, "v1"), (SECOND, "main")):
        folder = tmp_path / f"data_{tag}"
        (folder / "part").mkdir(parents=True)
        write_rows(folder / "train.jsonl", [{"text": f"whole of {tag}"}])
        write_rows(folder / "part" / "train.jsonl", [{"text": f"part of {tag}"}])
        hub.add("org/data", commit, folder, tag=tag, kind="datasets")


def texts(name, revisions=None):
    return sorted(record.row["text"] for record in load_dataset_rows(name, split="train", revisions=revisions))


@pytest.mark.usefixtures("two_models")
@pytest.mark.parametrize(("revision", "width"), [("@v1", 64), (f"@{FIRST}", 64), ("@main", 48), ("", 48)])
def test_config_weights_and_tokenizer_are_of_the_revision(revision, width):
    name, loading = f"org/model{revision}", LoadingFlags()
    assert read_config(name, loading).intermediate_size == width
    assert load_tokenizer(name, loading).pad_token == ("<pad>" if width == 64 else "</s>")
    for model in (
        load_causal_lm(name, loading, device=CPU, packing=False),
        load_scalar_model(name, loading, device=CPU, packing=False, head_prefix="score", new_head=True),
    ):
        assert model.model.layers[0].mlp.up_proj.weight.shape == (width, 32)


@pytest.mark.usefixtures("two_models")
def test_a_revision_that_cannot_be_found_is_an_error():
    for load in (read_config, load_tokenizer):
        with pytest.raises(ConfigError, match=rf"^cannot load the \w+ org/model@{MISSING}: "):
            load(f"org/model@{MISSING}", ModelFlags())


def test_modelscope_is_asked_for_the_revision(models, monkeypatch):
    """The package is not installed; only the arguments that it would receive are tested."""
    asked = []

    def snapshot_download(name, **more):
        asked.append((name, more))
        return models(seed=1)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=snapshot_download))
    for name in ("org/model@v1", "org/model"):
        assert read_config(name, LoadingFlags(use_ms=True)).intermediate_size == 64
    assert asked == [("org/model", {"revision": "v1"}), ("org/model", {})]


@pytest.mark.usefixtures("two_datasets")
def test_rows_are_of_the_revision():
    assert texts("org/data", "v1") == texts("org/data", FIRST) == ["part of v1", "whole of v1"]
    assert texts("org/data", "main") == ["part of main", "whole of main"]
    assert texts("org/data@part", "v1") == ["part of v1"]
    with pytest.raises(DataError, match=rf"^org/data: cannot be loaded at revision {MISSING}: "):
        texts("org/data", MISSING)


@pytest.mark.usefixtures("two_datasets")
def test_revisions_belong_to_the_hub_names_in_order(tmp_path):
    here = write_rows(tmp_path / "here.jsonl", [{"text": "here"}])
    assert texts(f"{here},org/data@part,{here},org/data", "v1,main") == sorted(
        ["here", "here", "part of v1", "part of main", "whole of main"]
    )


@pytest.mark.usefixtures("hub")
def test_another_cached_version_does_not_replace_a_revision(tmp_path):
    """`datasets` falls back to the newest version that it prepared earlier, regardless of the requested revision."""
    prepared = tmp_path / "datasets" / "org___data" / "default" / "0.0.0" / SECOND
    table = datasets.Dataset.from_list([{"text": "another version"}])
    splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=1, dataset_name="data")})
    info = datasets.DatasetInfo(features=table.features, splits=splits, dataset_name="data", config_name="default")
    prepared.mkdir(parents=True)
    info.write_to_directory(str(prepared))
    with datasets.arrow_writer.ArrowWriter(path=str(prepared / "data-train.arrow"), features=table.features) as writer:
        writer.write({"text": "another version"})
        writer.finalize()
    assert texts("org/data") == ["another version"]
    with pytest.raises(DataError, match=r"^org/data: cannot be loaded at revision v1: "):
        texts("org/data", "v1")


@pytest.mark.slow(seconds=6)
@pytest.mark.usefixtures("two_models")
def test_a_run_records_its_commits_and_its_adapter_merges_into_the_same_base(hub, tmp_path, capsys):
    folder = tmp_path / "answers"
    folder.mkdir()
    write_rows(folder / "train.jsonl", answers(16))
    hub.add("org/answers", FIRST, folder, tag="v2", kind="datasets")
    data = {"dataset": "org/answers", "dataset_revision": "v2", "eval_dataset": "org/answers", "device": "cpu"}
    paths = {"save_path": "./adapter", "ckpt_path": "./checkpoints"}
    run_command(
        "train_sft",
        FAST | ANSWERS | data | paths | {"pretrain": "org/model", "revision": "v1", "lora_rank": 2, "eval_steps": 1},
    )
    recorded = json.loads((tmp_path / "adapter" / "run" / "config.json").read_text())
    assert recorded["hub_commits"] == {"org/model@v1": FIRST, "org/answers": FIRST}
    assert recorded["flags"]["pretrain"] == "org/model@v1"
    assert recorded["flags"]["eval_revision"] == "v2"
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/model", FIRST)
    capsys.readouterr()
    run_command("lora_combiner", {"model_path": "org/model", "lora_path": "./adapter", "output_path": "./merged"})
    assert f"merging into org/model@{FIRST}, the revision that adapter was trained on" in capsys.readouterr().err
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged["model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
