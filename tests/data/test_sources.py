"""Datasets from files, folders and lists of them: splits, caps, mixing and row numbers."""

import collections
import importlib.util

import datasets
import huggingface_hub.constants
import pytest

from openrlhf.config.in_memory import held
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.sources import load_dataset_rows
from openrlhf.errors import ConfigError, DataError, MissingExtraError
from tests.toy_data import write_rows


def numbers(count, start=0):
    return [{"n": start + number} for number in range(count)]


def read(spec, split="train", **more):
    return [record.row["n"] for record in load_dataset_rows(spec, split=split, **more)]


def origins(spec, **more):
    return [str(record.place) for record in load_dataset_rows(spec, split="train", **more)]


@pytest.fixture(autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_tables_and_arrays_give_rows_with_row_numbers(suffix):
    table = datasets.Dataset.from_list(numbers(3))
    if suffix == "json":
        table.to_json("data.json", lines=False)
    else:
        getattr(table, f"to_{suffix}")(f"data.{suffix}")
    assert read(f"data.{suffix}") == [0, 1, 2]
    assert origins(f"data.{suffix}")[2] == f"data.{suffix}, row 3"


def test_an_arrow_file_is_read(tmp_path):
    datasets.Dataset.from_list(numbers(3)).save_to_disk("saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert read(str(file)) == [0, 1, 2]


def test_json_lines_keep_their_line_numbers_past_blank_lines(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"n": 1}\n\n{"n": 2}\r\n{"n": 3}')
    assert read("data.jsonl") == [1, 2, 3]
    assert origins("data.jsonl") == ["data.jsonl, row 1", "data.jsonl, row 3", "data.jsonl, row 4"]


def test_json_of_one_object_over_several_lines_is_one_row(tmp_path):
    (tmp_path / "data.json").write_text('{\n  "n": 7\n}')
    assert read("data.json") == [7]


def test_json_lines_in_a_json_file_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "data.json").write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n')
    assert read("data.json") == [1, 2]


def test_rows_of_different_types_are_unchanged(tmp_path):
    write_rows(tmp_path / "data.jsonl", [{"n": "text"}, {"n": 1}, {"n": [1, None]}])
    assert read("data.jsonl") == ["text", 1, [1, None]]


def test_keys_that_arrow_fills_with_null_are_removed():
    rows = [{"m": [{"role": "user", "name": "x"}, {"role": "assistant"}], "margin": None}, {"m": [], "margin": 1.0}]
    datasets.Dataset.from_list(rows).to_parquet("data.parquet")
    first, _ = load_dataset_rows("data.parquet", split="train")
    assert first.row == {"m": [{"role": "user", "name": "x"}, {"role": "assistant"}], "margin": None}


def test_empty_cells_are_null_and_na_is_text(tmp_path):
    (tmp_path / "data.csv").write_text("n,label\nNA,1\n,0\nNone,1\n")
    assert read("data.csv") == ["NA", None, "None"]
    assert [record.row["label"] for record in load_dataset_rows("data.csv", split="train")] == [1, 0, 1]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_saved_dict_gives_the_requested_split(split):
    table = datasets.Dataset.from_list(numbers(4))
    datasets.DatasetDict({"train": table, "validation": table.select([3])}).save_to_disk("saved")
    assert read("saved", split) == {"train": [0, 1, 2, 3], "validation": [3]}[split]
    assert read("saved", split, max_samples=2) == {"train": [0, 1], "validation": [3]}[split]


@pytest.mark.parametrize("split", ["train", "validation", "n"])
def test_a_saved_dataset_and_a_file_without_splits_are_read_whole(split, tmp_path):
    datasets.Dataset.from_list(numbers(3)).save_to_disk("saved")
    write_rows(tmp_path / "data.jsonl", numbers(3))
    assert read("saved", split) == read("data.jsonl", split) == [0, 1, 2]


def test_a_folder_of_files_may_have_splits_and_inner_folders(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    write_rows(tmp_path / "folder" / "train.jsonl", numbers(2))
    write_rows(tmp_path / "folder" / "test.jsonl", numbers(1, start=9))
    write_rows(tmp_path / "folder" / "inner" / "data.jsonl", numbers(1, start=5))
    assert read("folder", "test") == [9]
    assert read("folder@inner") == [5]


def test_an_at_sign_in_a_path_is_part_of_it(tmp_path):
    (tmp_path / "me@home").mkdir()
    write_rows(tmp_path / "me@home" / "data.jsonl", numbers(1))
    assert read("me@home/data.jsonl") == [0]


def test_datasets_are_concatenated_and_rows_keep_their_origin(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbers(3))
    write_rows(tmp_path / "b.jsonl", numbers(3, start=10))
    assert read("a.jsonl, b.jsonl") == [0, 1, 2, 10, 11, 12]
    assert origins("a.jsonl,b.jsonl")[4] == "b.jsonl, row 2"


def test_max_samples_applies_to_each_dataset_and_to_the_total(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbers(3))
    write_rows(tmp_path / "b.jsonl", numbers(9, start=10))
    assert read("b.jsonl", max_samples=2) == [10, 11]
    assert read("a.jsonl,b.jsonl", max_samples=4) == [0, 1, 2, 10]
    mixed = read("a.jsonl,b.jsonl", probs="0.5,0.5", max_samples=4)
    assert len(mixed) == 4
    assert not {14, 15} & set(mixed)


def test_mixing_matches_datasets_interleave_and_depends_on_the_seed(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbers(5))
    write_rows(tmp_path / "b.jsonl", [{"n": 10 + number, "more": "text"} for number in range(40)])
    got = read("a.jsonl,b.jsonl", probs="0.3,0.7", seed=7)
    tables = [datasets.Dataset.from_list(numbers(5)), datasets.Dataset.from_list(numbers(40, start=10))]
    want = datasets.interleave_datasets(tables, probabilities=[0.3, 0.7], seed=7, stopping_strategy="all_exhausted")
    assert got == list(want["n"])
    assert got == read("a.jsonl,b.jsonl", probs="0.3,0.7", seed=7)
    assert got != read("a.jsonl,b.jsonl", probs="0.3,0.7", seed=8)
    assert set(got) == {*range(5), *range(10, 50)}
    assert max(collections.Counter(got).values()) > 1


def test_rows_keep_their_origin_after_mixing(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbers(3))
    write_rows(tmp_path / "b.jsonl", numbers(3, start=10))
    for record in load_dataset_rows("a.jsonl,b.jsonl", split="train", probs="0.5,0.5"):
        file, first = ("b.jsonl", 10) if record.row["n"] >= 10 else ("a.jsonl", 0)
        assert str(record.place) == f"{file}, row {record.row['n'] - first + 1}"


def test_a_dataset_with_probability_zero_is_skipped(tmp_path, capsys):
    write_rows(tmp_path / "a.jsonl", numbers(3))
    write_rows(tmp_path / "b.jsonl", numbers(3, start=10))
    assert read("a.jsonl,b.jsonl", probs="1.0,0.0") == [0, 1, 2]
    assert "1 of 2 datasets have probability 0" in capsys.readouterr().err


def test_probabilities_must_match_the_datasets(tmp_path):
    write_rows(tmp_path / "a.jsonl", numbers(3))
    with pytest.raises(ConfigError, match=r"^expected one probability per dataset \(1\), got 2$"):
        read("a.jsonl", probs="0.5,0.5")


BAD_FILES = {
    "broken.jsonl": (b'{"n": 1}\n\n{"n": \n', "broken.jsonl, line 3: broken JSON: Expecting value at column 7"),
    "broken.json": (b'[{"n": 1},\n{"n" 2}]', "broken.json, line 2: broken JSON: Expecting ':' delimiter at column 6"),
    "bytes.jsonl": (b'{"n": "\xff"}', "bytes.jsonl, line 1: cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "digits.jsonl": (
        b'{"n": 1}\n{"n": ' + b"7" * 5000 + b"}",
        "digits.jsonl, line 2: cannot be read: a number has thousands of digits",
    ),
    "deep.jsonl": (
        b'{"n": ' + b"[" * 100_000,
        "deep.jsonl, line 1: cannot be read: lists and objects nest deep",
    ),
    "deep.json": (b"[" * 101 + b"]" * 101, "deep.json: cannot be read: lists and objects nest deeper than 100 levels"),
    "half.jsonl": (
        rb'{"n": "\ud83d"}',
        "half.jsonl, line 1: cannot be read: a string contains half of a surrogate pair",
    ),
    "empty.jsonl": (b"", "empty.jsonl is empty"),
    "empty.csv": (b"", "empty.csv is empty"),
    "blank.jsonl": (b"\n  \n", "blank.jsonl is empty"),
    "header.csv": (b"a,b\n", "header.csv: cannot be loaded: it has no rows"),
    "nothing.json": (b"[]", "nothing.json is empty"),
    "number.jsonl": (b"3\n", "number.jsonl, row 1: expected an object with fields, got the number 3"),
    "torn.parquet": (b"PAR1 and then nothing that belongs here", "torn.parquet: cannot be loaded: "),
    "torn.arrow": (b"nothing that belongs here", "torn.arrow: cannot be loaded: "),
    "notes.txt": (b"hello", "notes.txt: unknown format: expected .json, .jsonl, .csv, .parquet, .arrow, got .txt"),
    "script.py": (b"", "script.py is a dataset script, which `datasets` no longer runs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_gives_one_line(name, tmp_path, capfd):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(load_dataset_rows(name, split="train"))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all", "nowhere.parquet"])
def test_a_missing_dataset_is_reported(name):
    with pytest.raises(DataError, match=f"^{name}: no such file or folder$"):
        read(name)


def test_the_error_for_a_missing_split_lists_the_splits():
    datasets.DatasetDict({"train": datasets.Dataset.from_list(numbers(2))}).save_to_disk("saved")
    with pytest.raises(DataError, match=r"^saved has no split 'test', only 'train'$"):
        read("saved", "test")


def test_empty_folders_and_dataset_scripts_are_rejected(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("")
    with pytest.raises(DataError, match=r"^bare: cannot be loaded: .*doesn't contain any data files$"):
        read("bare")
    with pytest.raises(DataError, match=r"^scripted is a dataset script"):
        read("scripted")


def test_an_unreachable_hub_gives_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"^org/name: cannot be loaded: Couldn't reach 'org/name' on the Hub") as caught:
        read("org/name")
    assert "\n" not in str(caught.value)


def test_missing_modelscope_gives_the_install_command():
    assert importlib.util.find_spec("modelscope") is None
    with pytest.raises(MissingExtraError, match=r"^--use_ms needs modelscope.*pip install modelscope$"):
        read("org/name", loading=LoadingFlags(use_ms=True))


def test_an_empty_dataset_list_is_rejected():
    with pytest.raises(ConfigError, match=r"does not name a dataset"):
        read(" , ")


@pytest.mark.parametrize("broken", [{"n": "a\ud800"}, {"n": [{"content": "\udfff"}]}])
def test_half_of_a_surrogate_pair_in_a_list_is_an_error(broken):
    """No tokenizer accepts such text; a JSON file with it is also rejected."""
    with (
        held("3 rows", [*numbers(2), broken]) as name,
        pytest.raises(DataError, match=r"^in memory \(3 rows\), row 3: a string contains half of a surrogate pair"),
    ):
        load_dataset_rows(name, split="train")
