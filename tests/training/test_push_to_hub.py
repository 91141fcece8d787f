"""Uploads to a hub, against a server with its endpoints: complete, repeatable, and without the records of a run."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from openrlhf.config.sections.export import HubFlags
from openrlhf.errors import HubError
from openrlhf.training.hub import push_folder
from tests.commands import free_port, run_command
from tests.hub_server import TOKEN, HubServer
from tests.toy_data import ANSWERS, answers, write_rows


@pytest.fixture
def hub(monkeypatch):
    """Start a hub, with its token in the environment."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol for large files
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


@pytest.fixture
def sft(tmp_path, train):
    """Return a function that trains a model inside its checkpoint folder, as the default flags do."""
    data = write_rows(tmp_path / "rows.jsonl", answers(16))
    return lambda **flags: train("train_sft", dataset=data, ckpt_path="./out/ckpt", save_steps=1, **ANSWERS, **flags)


def model_files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def test_a_finished_model_is_uploaded_without_the_records_of_its_run(hub, sft, capfd):
    ran = sft(push_to_hub="org/name", hub_private=True)
    assert (ran.save_path / "run" / "metrics.jsonl").exists()
    assert (ran.save_path / "ckpt" / "global_step1").exists()
    assert hub.files["org/name"] == model_files(ran.save_path)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= hub.files["org/name"].keys()
    assert hub.private["org/name"]
    assert f"uploaded {ran.save_path.name} to {hub.url}/org/name" in capfd.readouterr().err
    assert all(TOKEN.encode() not in path.read_bytes() for path in ran.save_path.rglob("*") if path.is_file())


def test_a_failed_upload_keeps_the_model_and_can_be_repeated(hub, sft, capfd):
    hub.failing = "/commit/"
    with pytest.raises(SystemExit) as stop:
        sft(push_to_hub="name")
    assert stop.value.code == 1
    error = capfd.readouterr().err
    assert "the upload to name failed: 400 the disk of the hub is full. The model is complete in out" in error
    assert "Try: openrlhf export --pretrain out --push_to_hub name" in error
    hub.failing = None
    run_command("export", {"pretrain": "out", "push_to_hub": "name"})
    assert hub.files["someone/name"] == model_files("out")
    assert not hub.private["someone/name"]


def test_a_failed_upload_of_a_large_file_says_why(hub, sft, capfd):
    hub.failing = "/upload/"
    with pytest.raises(SystemExit) as stop:
        sft(push_to_hub="name")
    assert stop.value.code == 1
    error = capfd.readouterr().err
    assert "the upload to name failed: Error while uploading 'model.safetensors' to the Hub: 400" in error
    assert "The model is complete in out. Try: openrlhf export --pretrain out --push_to_hub name" in error


def test_a_hub_without_xet_gets_a_command_that_does_not_use_it(hub, sft, monkeypatch, capfd):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)  # the stand-in has no such endpoint
    with pytest.raises(SystemExit):
        sft(push_to_hub="name")
    assert "Try: HF_HUB_DISABLE_XET=1 openrlhf export --pretrain out --push_to_hub name" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["org/name", "name"])
def test_a_private_model_is_not_uploaded_to_a_public_repository(hub, name, tmp_path, capfd):
    hub.files = {"org/name": {}, "someone/name": {}}
    hub.private = dict.fromkeys(hub.files, False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:  # before anything is loaded
        run_command("export", {"pretrain": tmp_path, "push_to_hub": name, "hub_private": True})
    assert stop.value.code == 2
    assert f"--hub_private: {name} exists and is public. Try: another --push_to_hub" in capfd.readouterr().err
    with pytest.raises(HubError, match="exists and is public, so nothing was uploaded"):  # made public in the meantime
        push_folder(tmp_path, HubFlags(push_to_hub=name, hub_private=True))
    assert not any(hub.files.values())
    hub.private = dict.fromkeys(hub.files, True)
    (tmp_path / "README.md.old").write_text("an edited card")
    run_command("export", {"pretrain": tmp_path, "push_to_hub": name, "hub_private": True})
    assert [*hub.files["org/name"], *hub.files["someone/name"]] == ["config.json"]


def test_a_wrong_token_is_noticed_before_training(hub, sft, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SystemExit) as stop:
        sft(push_to_hub="org/name")
    assert stop.value.code == 2
    assert "the hub does not accept this machine's token. Try: hf auth login" in capfd.readouterr().err
    assert not Path("out").exists()


def test_without_a_network_the_run_is_saved_and_says_how_to_upload(hub, sft, monkeypatch, capfd):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(SystemExit):
        sft(push_to_hub="org/name")
    error = capfd.readouterr().err
    assert "the hub cannot be reached now" in error
    assert "Try: openrlhf export --pretrain out --push_to_hub org/name" in error
    assert (Path("out") / "model.safetensors").exists()


def test_links_that_lead_out_of_the_folder_are_not_uploaded(hub, tmp_path):
    """A folder of someone else could name files of this user, which would then be public."""
    (tmp_path / "key").write_text("secret")
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "copy.json").symlink_to("config.json")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1f").write_text("weights")
    (folder / "model.safetensors").symlink_to("../../blobs/1f")  # as in the hub's cache
    (folder / "notes.txt").symlink_to(tmp_path / "key")
    flags = HubFlags(push_to_hub="name")
    with pytest.raises(HubError, match=r"notes\.txt leads out of the folder, to .*key, so nothing") as stop:
        push_folder(folder, flags)
    assert stop.value.try_this.startswith("a copy of the file in its place")  # another attempt would fail again
    assert not hub.files
    (folder / "run").mkdir()
    (folder / "notes.txt").rename(folder / "run" / "notes.txt")
    (folder / "*").write_text("a name, not a pattern")
    push_folder(folder, flags)
    assert hub.files["someone/name"].keys() == {"*", "config.json", "copy.json", "model.safetensors"}
