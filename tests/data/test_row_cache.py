"""Rows from the cache are those of a run in memory: in the same order, with the same reports and errors."""

import resource
import subprocess
from dataclasses import asdict, replace
from datetime import datetime

import datasets
import numpy as np
import pytest
from filelock import FileLock

from openrlhf.config.sections.data import (
    ConversationFlags,
    LabelledResponseFlags,
    PairFlags,
    StepFlags,
    TemplateFlags,
)
from openrlhf.config.sections.rl import PromptFlags
from openrlhf.data import row_cache, row_workers
from openrlhf.data.preference import labelled_rows, preference_rows
from openrlhf.data.process import step_rows
from openrlhf.data.prompts import prompt_rows
from openrlhf.data.report import Budget
from openrlhf.data.row_columns import MappedRows
from openrlhf.data.sft import sft_rows
from openrlhf.data.sources import load_dataset_rows
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import REWRITING, assistant, user, word_tokenizer
from tests.toy_data import write_rows
from tests.warm import warm_python

PLAIN = TemplateFlags(input_template="User: {}\nAssistant: ")
CHAT = TemplateFlags(apply_chat_template=True)
TEXTS = ["one", "two three", "", "four one two one two one two five six", "six", "be kind", "three two one", "é"]
ANSWERS = [{"input": text, "output": other} for text, other in zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)]
TURNS = [user("one"), assistant("two", reasoning="five"), user("three"), assistant("four", reasoning="six")]
PAIRS = [{"prompt": f"{text} ", "chosen": "one two", "rejected": other, "margin": 0.1} for text, other in
         zip(TEXTS, ["", "one", "one two", *TEXTS[3:]], strict=True)]  # fmt: skip
LABELLED = [{**row, "label": number % 2} for number, row in enumerate(ANSWERS)]
STEPS = [
    {"input": "one ки two ки", "label": ["+", "-"]},
    {"input": "one two three four five one two three ки", "label": ["+"]},
    {"input": "three", "label": []},
    {"input": "one ки " * 7, "label": ["-", "+"] * 3 + ["-"]},
]
LABELS = ["5", 5, 5.0, True, None, [1, {"a": [None, 0.1]}], {}, "é"]
PROMPTS = [{"input": text, "label": label, "datasource": text[:1] or "none"} for text, label in
           zip(TEXTS, LABELS, strict=True)]  # fmt: skip

# Kind of rows -> records, and the function that makes rows of them.
READERS = {
    "responses": (ANSWERS, lambda *data: sft_rows(*data, ConversationFlags(output_key="output"), PLAIN, 14)),
    "texts": (ANSWERS, lambda *data: sft_rows(*data, ConversationFlags(pretrain_mode=True), PLAIN, 14)),
    "turns": (
        [{"input": TURNS}, {"input": TURNS[:2]}, {"input": [user("one")]}, {"input": [*TURNS, *TURNS]}],
        lambda records, _: sft_rows(records, word_tokenizer(REWRITING), ConversationFlags(multiturn=True), CHAT, 24),
    ),
    "pairs": (
        PAIRS,
        lambda *data: preference_rows(*data, PairFlags(prompt_key="prompt"), PLAIN, 14, drop_long_prompts=True),
    ),
    "labelled": (LABELLED, lambda *data: labelled_rows(*data, LabelledResponseFlags(output_key="output"), PLAIN, 14)),
    "steps": (STEPS, lambda *data: step_rows(*data, StepFlags(placeholder_token="ки", reward_tokens=("+", "-")), 14)),
    "prompts": (PROMPTS, lambda *data: prompt_rows(*data, PromptFlags(label_key="label"), PLAIN, Budget(14))),
}


@pytest.fixture
def caching(monkeypatch):
    """Cache any number of rows, in parts of three records."""
    monkeypatch.setattr(row_cache, "MIN_CACHED", 1)
    monkeypatch.setattr(row_workers, "PART", 3)


@pytest.fixture
def load(tmp_path, tokenizer):
    """Return a function that loads rows of a kind from a file; without `repeat`, from the existing file."""

    def start(kind, *, repeat=1, rows=None):
        records, make = READERS[kind]
        if repeat:
            write_rows(tmp_path / "rows.jsonl", (rows or records) * repeat)
        return make(load_dataset_rows("rows.jsonl", split="train"), tokenizer)

    return start


def contents(loaded):
    """Return everything that is known about rows, in a form that can be compared."""
    report = replace(loaded.report, budget=None)
    return (
        [values(asdict(row)) for row in loaded.rows],
        asdict(report),
        loaded.soft_labels,
        [str(finding) for finding in loaded.report.all_findings()],
    )


def values(value):
    """Replace arrays by their type and items, which also tells apart 1, 1.0 and True."""
    if isinstance(value, dict):
        return {key: values(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return type(value), value


def cached_files(tmp_path):
    return sorted(path.suffix for path in (tmp_path / "cache").rglob("*") if path.suffix in (".arrow", ".json", ".tmp"))


@pytest.mark.parametrize("kind", READERS)
def test_rows_are_the_same_in_memory_made_for_the_cache_and_mapped_from_it(kind, load, tmp_path, monkeypatch):
    in_memory = contents(load(kind, repeat=3))
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(row_cache, "MIN_CACHED", 1)
    monkeypatch.setattr(row_workers, "PART", 5)
    made = load(kind, repeat=3)
    assert isinstance(made.rows, MappedRows)
    assert cached_files(tmp_path) == [".arrow", ".json"]
    monkeypatch.setattr(row_cache, "make_parts", None)  # nothing is rebuilt
    assert contents(made) == contents(load(kind, repeat=3)) == in_memory
    assert in_memory[1]["dropped"]  # the reports are not empty


def test_mapped_rows_are_a_sequence_of_views(caching, load):
    rows = load("responses", repeat=4).rows
    assert not rows[0].input_ids.flags.owndata
    assert not rows[0].input_ids.flags.writeable
    assert [row.input_ids.tolist() for row in rows[2:-1:2]] == [row.input_ids.tolist() for row in list(rows)[2:-1:2]]
    assert rows[-1].input_ids.tolist() == rows[len(rows) - 1].input_ids.tolist()
    assert rows[1:4][1:] == rows[2:4] != rows[2:5]
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("kind", ["turns", "prompts"])
def test_workers_make_the_same_rows(kind, caching, load, monkeypatch):
    monkeypatch.setattr(row_workers, "num_workers", lambda _: 0)
    alone = contents(load(kind, repeat=5))
    monkeypatch.setattr(row_workers, "num_workers", lambda _: 2)
    monkeypatch.setattr(row_workers, "make_part", None)  # not by this process
    monkeypatch.setattr(row_cache, "FOLDER", "made_by_workers")
    assert contents(load(kind, repeat=5)) == alone


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([*STEPS, *STEPS, {"input": "one ки", "label": [0.5]}, {"input": 5}], "row 9, .*: expected tokens, as in ear"),
        ([*STEPS, *STEPS, {"input": 5}, "text"], "row 9, .*'input': expected text, got the number 5"),
        ([*STEPS, *STEPS, "text", {"input": 5}], "row 9: expected an object with fields, got the text 'text'"),
    ],
)
def test_an_error_names_the_first_bad_row(rows, error, workers, caching, load, tmp_path, monkeypatch):
    monkeypatch.setattr(row_workers, "num_workers", lambda _: workers)
    with pytest.raises(DataError, match=f"^rows.jsonl, {error}"):
        load("steps", rows=rows)
    assert cached_files(tmp_path) == []


def test_rows_of_a_worker_that_dies_are_made_here(caching, load, monkeypatch, capsys):
    monkeypatch.setattr(row_workers, "num_workers", lambda _: 1)
    monkeypatch.setattr(row_workers, "python_command", lambda code: ["false"])
    assert len(load("responses", repeat=5).rows) == 25
    assert capsys.readouterr().err.count("a worker process failed (") == 1


def test_a_dataset_with_almost_no_fitting_rows_is_rejected_each_time(caching, load):
    rows = [ANSWERS[0]] + [{"input": "one " * 20, "output": "two"}] * 20
    for _ in range(2):
        with pytest.raises(DataError, match=r"almost no rows would remain: 20 of 21 are dropped: 20 with a prompt"):
            load("responses", rows=rows)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("suffix", [".arrow", ".json"])
@pytest.mark.parametrize("damage", [flip, cut, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_damaged_files_are_made_again(damage, suffix, caching, load, tmp_path):
    whole = contents(load("pairs"))
    (path,) = (tmp_path / "cache").rglob(f"*{suffix}")
    damage(path)
    assert contents(load("pairs")) == whole
    assert cached_files(tmp_path) == [".arrow", ".json"]


def test_the_file_of_a_killed_process_is_removed(caching, load, tmp_path):
    load("responses")
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    path.with_suffix(".1234.tmp").touch()
    path.unlink()
    load("responses")
    assert cached_files(tmp_path) == [".arrow", ".json"]


def test_rows_stay_in_memory_if_the_folder_cannot_be_made(caching, load, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file")
    assert isinstance(load("responses").rows, list)
    folder = tmp_path / "cache" / "openrlhf_rows"
    why = f"rows are kept in memory, because they cannot be cached in {folder}: Not a directory"
    assert capsys.readouterr().err.splitlines() == [f"openrlhf: rows.jsonl: {why}"]


def test_rows_stay_in_memory_if_the_disk_is_full(caching, load, tmp_path, capsys):
    whole = contents(load("prompts", repeat=50))
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    path.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        loaded = load("prompts", repeat=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(loaded) == whole
    assert capsys.readouterr().err.count("rows are kept in memory") == 1
    assert cached_files(tmp_path) == [".json"]


def test_a_process_does_not_wait_forever_for_another(caching, load, tmp_path, monkeypatch, capsys):
    load("responses")
    (path,) = (tmp_path / "cache").rglob("*.arrow")
    path.unlink()
    monkeypatch.setattr(row_cache, "WAIT_S", 0)
    with FileLock(path.with_suffix(".lock")):
        assert isinstance(load("responses").rows, list)
    assert capsys.readouterr().err.count("rows are kept in memory") == 1


def test_a_file_that_changes_while_it_is_read_is_not_cached(caching, load, tmp_path, monkeypatch, capsys):
    def edit_and_make(*arguments):
        (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("six", "two"))
        return row_workers.make_parts(*arguments)

    monkeypatch.setattr(row_cache, "make_parts", edit_and_make)
    assert isinstance(load("responses").rows, list)
    assert "the data changed while it was read" in capsys.readouterr().err
    assert cached_files(tmp_path) == []


def test_labels_that_json_would_change_stay_in_memory(caching, tokenizer, capsys):
    times = [{"input": "one", "label": datetime(2024, 1, day + 1)} for day in range(5)]
    datasets.Dataset.from_list(times).to_parquet("times.parquet")
    loaded = READERS["prompts"][1](load_dataset_rows("times.parquet", split="train"), tokenizer)
    assert [prompt.label for prompt in loaded.rows] == [row["label"] for row in times]
    assert "rows are kept in memory" in capsys.readouterr().err


def test_a_table_is_read_like_its_single_rows(caching, tokenizer):
    messages = [{"input": [user("one"), {**assistant("two"), "name": None}], "extra": None}] * 7
    table = datasets.Dataset.from_list([*messages, {"input": [user("one")], "extra": 1}])
    table.to_parquet("table.parquet")
    records = load_dataset_rows("table.parquet", split="train")
    assert records.read_all() == list(records)
    turns = records.part(2, 5)
    assert turns.read_all() == list(turns) == list(records)[2:5]


PROGRAM = """
from pathlib import Path
import datasets
from openrlhf.data import row_cache
from openrlhf.data.sources import load_dataset_rows
from tests.data.chat_words import word_tokenizer
from tests.data.test_row_cache import READERS
datasets.config.HF_DATASETS_CACHE = Path("cache")
row_cache.MIN_CACHED = 1
loaded = READERS["responses"][1](load_dataset_rows("rows.jsonl", split="train"), word_tokenizer())
print(len(loaded.rows), sum(int(row.input_ids.sum()) for row in loaded.rows), type(loaded.rows).__name__)
"""


@pytest.mark.slow(seconds=3)
def test_several_processes_share_one_file(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ANSWERS * 500)
    started = [subprocess.Popen([*warm_python(), "-c", PROGRAM], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate()[0] for process in started}
    assert len(printed) == 1
    assert printed.pop().split()[0::2] == ["2500", "MappedRows"]
    assert cached_files(tmp_path) == [".arrow", ".json"]


def test_soft_labels_without_two_reward_tokens_are_rejected_at_their_first_row(caching, tokenizer, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"input": "one ки", "label": [0.5]}] * 9)
    records = load_dataset_rows("rows.jsonl", split="train")
    with pytest.raises(ConfigError, match=r"^rows.jsonl, row 1: labels are probabilities: expected exactly two"):
        step_rows(records, tokenizer, StepFlags(placeholder_token="ки"), 14)
