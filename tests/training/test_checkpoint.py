"""Checkpoints and exported models appear complete or not at all; rotation deletes old ones."""

import os

import pytest

from openrlhf.errors import BackendError
from openrlhf.training.checkpoint import (
    GIB,
    exporting,
    newest,
    point_latest,
    read_state,
    rotate,
    step_folder,
    write_state,
    writing,
)


class OneProcess:
    """A single process; counts its barriers."""

    process = 0
    waits = 0

    def barrier(self):
        self.waits += 1


class SecondRank(OneProcess):
    process = 1


def write_together(ranks, folder, fill):
    with writing(folder, ranks) as aside:
        fill(aside)


def export_together(ranks, folder, fill):
    with exporting(folder, ranks) as aside:
        fill(aside)


def save(root, step, *, age=0, content="x", hf=False):
    """Write a finished checkpoint of a step; a larger `age` makes it older."""
    folder = step_folder(root, step)
    write_together(OneProcess(), folder, lambda temporary: write_files(temporary, step, content))
    point_latest(root, step)
    made = [folder]
    if hf:
        export_together(
            OneProcess(), folder.with_name(f"{folder.name}_hf"), lambda temporary: write_model(temporary, content)
        )
        made.append(folder.with_name(f"{folder.name}_hf"))
    for path in made:
        os.utime(path, (1e9 - age, 1e9 - age))
    return folder


def write_files(temporary, step, content="x"):
    (temporary / "weights").write_text(content)
    write_state(temporary, {"step": step})


def write_model(temporary, content="x"):
    (temporary / "config.json").write_text("{}")
    (temporary / "model.safetensors").write_text(content)


def list_names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_complete_or_not_at_all(tmp_path):
    folder = save(tmp_path, 3)
    assert list_names(tmp_path) == ["global_step3", "latest"]
    assert list_names(folder) == ["state.json", "weights"]
    assert read_state(folder) == {"step": 3}
    assert newest(tmp_path) == folder


def test_a_crash_while_writing_keeps_the_older_checkpoint(tmp_path):
    older = save(tmp_path, 3)

    def crash(temporary):
        write_files(temporary, 6)
        raise KeyboardInterrupt

    for _ in range(2):  # the second attempt finds the remains of the first
        with pytest.raises(KeyboardInterrupt):
            write_together(OneProcess(), step_folder(tmp_path, 6), crash)
        assert not step_folder(tmp_path, 6).exists()
        assert newest(tmp_path) == older
    assert newest(tmp_path) == older
    assert save(tmp_path, 6) == newest(tmp_path)
    assert list_names(tmp_path) == ["global_step3", "global_step6", "latest"]


def test_writing_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3, content="old")
    folder = save(tmp_path, 3, content="new")
    assert (folder / "weights").read_text() == "new"
    assert list_names(tmp_path) == ["global_step3", "latest"]


def test_only_the_first_rank_makes_and_moves_the_folder(tmp_path):
    second = SecondRank()
    filled = []
    write_together(second, step_folder(tmp_path, 1), filled.append)
    assert filled == [tmp_path / ".global_step1.writing"]
    assert list(tmp_path.iterdir()) == []
    assert second.waits == 3


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None


def test_latest_may_name_a_deleted_checkpoint(tmp_path):
    older = save(tmp_path, 9)
    save(tmp_path, 10)
    point_latest(tmp_path, 11)
    assert newest(tmp_path) == tmp_path / "global_step10"  # ordered by number, not alphabetically
    (tmp_path / "global_step10" / "state.json").unlink()
    assert newest(tmp_path) == older


def test_latest_wins_over_the_highest_number(tmp_path):
    save(tmp_path, 100)
    fresh = save(tmp_path, 2)
    assert newest(tmp_path) == fresh


def test_other_folders_are_not_checkpoints(tmp_path):
    (tmp_path / "global_step_best").mkdir()
    (tmp_path / "global_step5_hf").mkdir()
    assert newest(tmp_path) is None


def test_rotation_limits_the_number_of_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, age=10 - step, hf=True)
    rotate(tmp_path, keep=2, max_gib=float("inf"))
    assert list_names(tmp_path) == ["global_step3", "global_step3_hf", "global_step4", "global_step4_hf", "latest"]
    rotate(tmp_path, keep=2, max_gib=float("inf"))
    assert len(list_names(tmp_path)) == 5


def test_rotation_by_size_counts_model_folders(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, age=10 - step, content=1000 * "x", hf=True)
    rotate(tmp_path, keep=9, max_gib=6500 / GIB)
    assert len(list_names(tmp_path)) == 7
    rotate(tmp_path, keep=9, max_gib=4500 / GIB)
    assert list_names(tmp_path) == ["global_step2", "global_step2_hf", "global_step3", "global_step3_hf", "latest"]


def test_rotation_works_for_model_folders_without_checkpoints(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"global_step{step}_hf").mkdir()
    rotate(tmp_path, keep=1, max_gib=float("inf"))
    assert list_names(tmp_path) == ["global_step3_hf"]


def test_rotation_never_deletes_the_newest(tmp_path):
    save(tmp_path, 7)
    rotate(tmp_path, keep=0, max_gib=0)
    assert newest(tmp_path) == tmp_path / "global_step7"


def test_rotation_deletes_an_earlier_runs_checkpoints_with_higher_steps(tmp_path):
    save(tmp_path, 100, age=50)
    save(tmp_path, 5, age=1)
    rotate(tmp_path, keep=1, max_gib=float("inf"))
    assert list_names(tmp_path) == ["global_step5", "latest"]


def test_rotation_keeps_other_files(tmp_path):
    (tmp_path / "global_step_best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2):
        save(tmp_path, step, age=10 - step)
    rotate(tmp_path, keep=1, max_gib=float("inf"))
    assert list_names(tmp_path) == ["global_step2", "global_step_best", "latest", "notes.txt"]


def test_an_export_keeps_other_files_of_the_folder(tmp_path):
    folder = tmp_path / "out"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "metrics.jsonl").write_text("{}")
    export_together(OneProcess(), folder, write_model)
    assert list_names(folder) == ["config.json", "model.safetensors", "runs"]
    assert (folder / "runs" / "metrics.jsonl").read_text() == "{}"
    assert list_names(tmp_path) == ["out"]


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


def test_adapters_beside_a_model_keep_it_complete(tmp_path):
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


def test_a_text_file_appears_complete_or_not_at_all(tmp_path):
    point_latest(tmp_path, 1)
    point_latest(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert list_names(tmp_path) == ["latest"]


def test_a_broken_state_file_gives_one_line(tmp_path):
    (tmp_path / "state.json").write_text("{")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BackendError, match=f"the checkpoint {folder} cannot be read: ") as caught:
            read_state(folder)
        assert "\n" not in str(caught.value)
