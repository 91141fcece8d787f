"""Folders of checkpoints and models appear complete or not at all, even if several processes write them."""

import errno
import os
import tempfile

import pytest

from openrlhf.errors import DiskError
from openrlhf.training.atomic_folder import Ranks, exporting, writing


class OneProcess(Ranks):
    """A single process; counts its barriers."""

    waits = 0

    def barrier(self):
        self.waits += 1


class SecondRank(OneProcess):
    """Process 1 of two; process 0 sends it numbers, and always reports success."""

    process = 1
    num_processes = 2

    def agree(self, number):
        return 0


def write_together(ranks, folder, fill):
    with writing(folder, ranks) as aside:
        fill(aside)


def export_together(ranks, folder, fill):
    with exporting(folder, ranks) as aside:
        fill(aside)


def write_model(temporary, content="x"):
    (temporary / "config.json").write_text("{}")
    (temporary / "model.safetensors").write_text(content)


def list_names(root):
    return sorted(path.name for path in root.iterdir())


def test_only_the_first_rank_makes_and_moves_the_folder(tmp_path):
    second = SecondRank()
    filled = []
    write_together(second, tmp_path / "global_step1", filled.append)
    assert filled == [tmp_path / ".global_step1.writing-000000000000"]  # process 0 chose the number
    assert list(tmp_path.iterdir()) == []
    assert second.waits == 1


def test_an_export_keeps_other_files_of_the_folder(tmp_path):
    folder = tmp_path / "out"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "metrics.jsonl").write_text("{}")
    export_together(OneProcess(), folder, write_model)
    assert list_names(folder) == ["config.json", "model.safetensors", "runs"]
    assert (folder / "runs" / "metrics.jsonl").read_text() == "{}"
    assert list_names(tmp_path) == ["out"]


def test_an_export_reaches_a_folder_on_another_disk(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        (tmp_path / "out").symlink_to(disk)
        export_together(OneProcess(), tmp_path / "out", lambda aside: (aside / "config.json").write_text("{}"))
        assert os.listdir(disk) == ["config.json"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("marker", ["config.json", "adapter_config.json"])
def test_a_partially_written_model_is_not_complete(tmp_path, marker):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "templates").write_text("a file where the export has a folder")

    def write_all(temporary):
        (temporary / "templates").mkdir()
        for name in (marker, "a.json", "z.json"):
            (temporary / name).write_text("{}")

    with pytest.raises(NotADirectoryError):
        export_together(OneProcess(), folder, write_all)
    assert not (folder / marker).exists()


def test_a_failed_export_does_not_leave_the_older_config(tmp_path):
    folder = tmp_path / "out"
    export_together(OneProcess(), folder, write_model)
    (folder / "templates").write_text("a file where the export has a folder")

    def write_all(temporary):
        (temporary / "templates").mkdir()
        write_model(temporary, "new")

    with pytest.raises(NotADirectoryError):
        export_together(OneProcess(), folder, write_all)
    assert not (folder / "config.json").exists()


def test_a_crash_while_exporting_keeps_the_older_model(tmp_path):
    folder = tmp_path / "out"
    export_together(OneProcess(), folder, write_model)

    def crash(temporary):
        write_model(temporary, "new")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk"):
        export_together(OneProcess(), folder, crash)
    assert (folder / "model.safetensors").read_text() == "x"
    export_together(OneProcess(), folder, lambda temporary: write_model(temporary, "new"))
    assert (folder / "model.safetensors").read_text() == "new"


def test_new_shards_are_not_hidden_by_an_older_single_file(tmp_path):
    folder = tmp_path / "out"
    export_together(OneProcess(), folder, write_model)

    def shards(temporary):
        for name in ("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
            (temporary / name).write_text("{}")

    export_together(OneProcess(), folder, shards)
    assert list_names(folder) == ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_adding_adapters_to_a_models_folder_keeps_the_model_complete(tmp_path):
    folder = tmp_path / "base"
    export_together(OneProcess(), folder, write_model)
    export_together(OneProcess(), folder, lambda temporary: (temporary / "adapter_config.json").write_text("{}"))
    assert list_names(folder) == ["adapter_config.json", "config.json", "model.safetensors"]


def test_exported_folders_replace_older_ones(tmp_path):
    def templates(temporary):
        (temporary / "additional_chat_templates").mkdir()
        (temporary / "additional_chat_templates" / "tool.jinja").write_text("new")

    folder = tmp_path / "out"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "old.jinja").write_text("old")
    export_together(OneProcess(), folder, templates)
    assert list_names(folder / "additional_chat_templates") == ["tool.jinja"]


@pytest.mark.parametrize("write", [write_together, export_together])
def test_a_full_disk_is_one_error_and_leaves_nothing(write, tmp_path):
    def fill(temporary):
        (temporary / "weights").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary / "weights"))

    with pytest.raises(DiskError, match="No space left on device"):
        write(OneProcess(), tmp_path / "out", fill)
    assert list_names(tmp_path) == []
