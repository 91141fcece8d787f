"""--eval_size: which rows of the training data are held out, for every command that trains."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from openrlhf.config.commands import COMMANDS, SFTConfig
from openrlhf.config.in_memory import held
from openrlhf.config.parser import parse
from openrlhf.config.sections.data import DatasetFlags
from openrlhf.config.sections.training import BatchFlags
from openrlhf.data import row_cache
from openrlhf.data.prompts import load_prompts
from openrlhf.data.row_columns import MappedRows
from openrlhf.data.sources import hold_out, load_dataset_rows
from openrlhf.data.supervised import load_data
from openrlhf.errors import DataError
from openrlhf.types import LabelledRow, PairRow
from tests.data.test_supervised_data import FIELDS, ROWS
from tests.toy_data import write_rows

COUNT = 30
NUMBERS = [" ".join(words) for words in product(("one", "two", "three", "four", "five", "six"), repeat=2)][:COUNT]


@pytest.fixture
def numbers(tmp_path):
    """Return a function that writes files of numbered rows and loads them as records."""

    def load(*counts, **more):
        files = [
            write_rows(tmp_path / f"{place}.jsonl", [{"n": 100 * place + row} for row in range(count)])
            for place, count in enumerate(counts)
        ]
        return load_dataset_rows(",".join(files), split="train", **more)

    return load


def values(records):
    return [record.row["n"] for record in records]


@pytest.mark.parametrize(
    ("size", "held"), [(0.1, 2), (0.126, 3), (0.001, 1), (0.95, 19), (1, 1), (7, 7), (19, 19)], ids=str
)
def test_a_fraction_or_a_number_of_rows_is_held_out(size, held, numbers, capsys):
    train, evaluation = hold_out(numbers(20), size, seed=1)
    assert (len(train), len(evaluation)) == (20 - held, held)
    assert values(train) == sorted(values(train))
    assert values(evaluation) == sorted(values(evaluation))
    assert sorted(values(train) + values(evaluation)) == list(range(20))
    assert f"{held} of 20 rows are held out for evaluation (--eval_size {size})" in capsys.readouterr().err


def test_the_seed_alone_chooses_the_rows(numbers):
    first, again, other = (values(hold_out(numbers(50), 0.2, seed=seed)[1]) for seed in (42, 42, 43))
    assert first == again != other
    assert first == [5, 17, 20, 25, 27, 39, 45, 46, 47, 49]  # so a checkpoint resumes in later versions
    assert len(set(values(hold_out(numbers(50), 0.2, seed=42)[0])) & set(first)) == 0


def test_rows_of_every_dataset_and_only_of_those_in_use_are_held_out(numbers):
    train, evaluation = hold_out(numbers(40, 40, max_samples=30), 0.5, seed=1)
    assert sorted(values(train) + values(evaluation)) == list(range(30))
    train, evaluation = hold_out(numbers(40, 40), 0.5, seed=1)
    assert {value // 100 for value in values(evaluation)} == {value // 100 for value in values(train)} == {0, 1}


def test_a_row_that_mixing_repeats_is_in_one_part_only(numbers):
    mixed = numbers(4, 30, probs="0.5,0.5", seed=3)
    assert max(Counter(values(mixed)).values()) > 1
    train, evaluation = hold_out(mixed, 10, seed=3)
    assert set(values(train)) | set(values(evaluation)) == set(values(mixed))
    assert not set(values(train)) & set(values(evaluation))
    assert max(Counter(values(train)).values()) > 1  # mixing stays as it was
    assert len(values(evaluation)) == len(set(values(evaluation))) == 10


@pytest.mark.parametrize(
    ("count", "size", "complaint"),
    [
        (5, 5, "holds out 5 of 5 rows. Try: a fraction, such as --eval_size 0.1"),
        (5, 500, "holds out 500 of 5 rows"),
        (1, 0.5, "holds out 1 of 1 row. Try: --eval_dataset"),
    ],
)
def test_a_size_that_leaves_nothing_to_train_on_is_rejected(count, size, complaint, numbers):
    with pytest.raises(DataError, match=r"--eval_size \S+ leaves nothing to train on") as caught:
        hold_out(numbers(count), size, seed=1)
    assert complaint in str(caught.value)


def distinct(command):
    """Return rows of a command that differ in their input."""
    field = "prompt" if "prompt" in ROWS[command] else "input"
    return [ROWS[command] | {field: ROWS[command][field].replace("one", text)} for text in NUMBERS]


def tokens_of(row):
    match row:
        case PairRow():
            return tuple(row.chosen.input_ids)
        case LabelledRow():
            return tuple(row.tokens.input_ids)
    return tuple(row.input_ids)


@pytest.mark.parametrize("command", ROWS)
def test_no_command_trains_on_a_row_that_it_holds_out(command, tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", distinct(command))

    def load(seed=42, **flags):
        data = DatasetFlags(dataset=path, max_len=64, **flags)
        return load_data(command(data=data, fields=FIELDS[command], batches=BatchFlags(seed=seed)), tokenizer)

    everything = {tokens_of(row) for row in load().train}
    assert len(everything) == COUNT
    got, again, other = (load(seed, eval_size=0.2) for seed in (1, 1, 2))
    train, evaluation = ({tokens_of(row) for row in rows} for rows in (got.train, got.evaluation))
    assert (len(train), len(evaluation)) == (24, 6)
    assert train | evaluation == everything
    assert [tokens_of(row) for row in again.evaluation] == [tokens_of(row) for row in got.evaluation]
    assert {tokens_of(row) for row in other.evaluation} != evaluation


def test_prompts_are_held_out_and_numbered_in_each_part(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"input": text} for text in NUMBERS])
    flags = ["--pretrain", "m", "--prompt_data", path, "--remote_rm_url", "r.py"]
    config = parse(COMMANDS["train_ppo"], [*flags, "--eval_size", "4"], environ={})
    train, evaluation = load_prompts(config, tokenizer)
    assert sorted(prompt.text for prompt in (*train, *evaluation)) == sorted(NUMBERS)
    for prompts, count in ((train, 26), (evaluation, 4)):
        assert [prompt.index for prompt in prompts] == list(range(count))


def test_rows_in_memory_are_held_out_like_those_of_a_file(tmp_path, tokenizer):
    rows = distinct(SFTConfig)
    config = SFTConfig(fields=FIELDS[SFTConfig])

    def held_out(dataset):
        data = DatasetFlags(dataset=dataset, eval_size=5)
        return [tokens_of(row) for row in load_data(replace(config, data=data), tokenizer).evaluation]

    with held("30 rows", rows) as name:
        assert held_out(name) == held_out(write_rows(tmp_path / "rows.jsonl", rows))


def test_both_parts_come_from_the_cache_like_rows_in_memory(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", distinct(SFTConfig))
    config = SFTConfig(data=DatasetFlags(dataset=path, eval_size=0.3), fields=FIELDS[SFTConfig])
    in_memory = load_data(config, tokenizer)
    monkeypatch.setattr(row_cache, "MIN_CACHED", 1)
    made, mapped = load_data(config, tokenizer), load_data(config, tokenizer)
    for got in (made, mapped):
        for part in ("train", "evaluation"):
            ours, expected = getattr(got, part), getattr(in_memory, part)
            assert isinstance(ours, MappedRows)
            assert len(ours) == len(expected)
            for one, other in zip(ours, expected, strict=True):
                assert np.array_equal(one.input_ids, other.input_ids)


def test_messages_about_held_out_rows_say_so(tmp_path, tokenizer, capsys):
    rows = [{"input": text, "output": "two " * 9} for text in NUMBERS]
    data = DatasetFlags(dataset=write_rows(tmp_path / "rows.jsonl", rows), eval_size=0.5, max_len=12)
    load_data(SFTConfig(data=data, fields=FIELDS[SFTConfig]), tokenizer)
    cut = [line for line in capsys.readouterr().err.splitlines() if "rows longer than" in line]
    assert len(cut) == 2
    assert "rows.jsonl (held out): rows longer than" in cut[1]
