"""Checksums of checkpoints, and who may have written a pickle."""

import os
from types import SimpleNamespace

import pytest

from openrlhf.errors import BackendError
from openrlhf.training import manifest
from openrlhf.training.manifest import checkpoints_above, checksums, find_damage, must_be_private, write_manifest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with an empty file, one of several blocks, and one in a folder."""
    monkeypatch.setattr(manifest, "BLOCK", 100)
    made = tmp_path / "ckpt" / "global_step3"
    (made / "deepspeed").mkdir(parents=True)
    (made / "empty").touch()
    (made / "large").write_bytes(bytes(range(250)) * 3)
    (made / "deepspeed" / "shard.pt").write_bytes(b"pickle")
    write_manifest(made)
    for path in (made.parent, made, *made.rglob("*")):
        manifest.make_private(path)
    return made


def test_a_whole_folder_has_no_damage_and_may_grow(folder):
    (folder / "universal").mkdir()
    (folder / "universal" / "added").touch()
    assert find_damage(folder) is None


@pytest.mark.parametrize("place", [0, 99, 100, 749])
def test_every_flipped_bit_is_detected(place, folder):
    content = bytearray((folder / "large").read_bytes())
    content[place] ^= 1
    (folder / "large").write_bytes(content)
    assert find_damage(folder) == "large does not match its checksum"


def test_swapped_blocks_are_damage(folder):
    content = (folder / "large").read_bytes()
    (folder / "large").write_bytes(content[100:200] + content[:100] + content[200:])
    assert find_damage(folder) is not None


def test_a_folder_in_place_of_a_file_is_damage(folder):
    (folder / "large").unlink()
    (folder / "large").mkdir()
    assert find_damage(folder) == "large is missing"


def test_checksums_do_not_depend_on_the_number_of_threads(folder, monkeypatch):
    first = checksums(folder, ["empty", "large"])
    monkeypatch.setattr(manifest, "MOST_THREADS", 1)
    assert checksums(folder, ["empty", "large"]) == first


def test_pickles_of_this_user_are_loaded(folder):
    must_be_private(checkpoints_above(folder), folder)
    assert checkpoints_above(folder / "policy") == checkpoints_above(folder) == folder.parent


@pytest.mark.parametrize("name", [".", "..", "deepspeed", "deepspeed/shard.pt"])
@pytest.mark.parametrize("right", [0o020, 0o002], ids=["group", "others"])
def test_pickles_that_others_can_write_are_refused(name, right, folder):
    path = folder / name
    path.chmod(path.stat().st_mode | right)
    with pytest.raises(BackendError, match=rf"other users can write .* Try: chmod -R go-w {folder.parent}"):
        must_be_private(checkpoints_above(folder), folder)


def test_pickles_of_another_user_are_refused(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder / "deepspeed" / "shard.pt", 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(BackendError, match=r"belongs to user .* Try: chown"):
        must_be_private(checkpoints_above(folder), folder)


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o775, True), (0o755, False)])
def test_pickles_whose_folder_others_can_replace_are_refused(mode, refused, through_link, tmp_path, monkeypatch):
    if refused:
        monkeypatch.setattr(manifest, "is_private", lambda group: False)
    shared = tmp_path / "shared"
    root = shared / "run" / "ckpt"
    (root / "global_step1").mkdir(parents=True)
    for path in (tmp_path, shared / "run", root, root / "global_step1"):
        path.chmod(0o755)
    shared.chmod(mode)
    if through_link:  # a link elsewhere, to the folder
        (tmp_path / "link").symlink_to(root)
        root = tmp_path / "link"
    if refused:
        with pytest.raises(BackendError, match=rf"can write {shared} and thus replace .* Try: chmod go-w {shared}"):
            must_be_private(root, root / "global_step1")
    else:
        must_be_private(root, root / "global_step1")


def test_the_group_of_one_user_is_private(monkeypatch):
    def of(name, members):
        monkeypatch.setattr(manifest.grp, "getgrgid", lambda group: SimpleNamespace(gr_name=name, gr_mem=members))
        return manifest.is_private(1234)

    monkeypatch.setattr(manifest.pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me"))
    assert [of("me", []), of("me", ["me"]), of("users", []), of("me", ["you"])] == [True, True, False, False]
