"""The index of samples: its results, what it reads again, and the cost."""

import json
import sqlite3
from dataclasses import replace

import pyarrow as pa
import pytest

from openrlhf.rl import sample_files
from openrlhf.rl.sample_files import write_samples
from openrlhf.types import Prompt
from openrlhf.view import records
from openrlhf.view.records import SampleRecords, parse_sample
from openrlhf.view.runs import find_runs
from openrlhf.view.sample_index import ORDERS, PAGE_SIZE, Query, SampleIndex, conditions
from openrlhf.view.token_texts import TokenTexts
from tests.samples import make_trajectory
from tests.view.made_runs import SEARCHES, TEXTS, make_run, record, write_step

RUN = 7


@pytest.fixture
def index(tmp_path):
    return SampleIndex(tmp_path / "index.sqlite")


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "made")


@pytest.fixture
def indexed(index, run_dir):
    """The index of the hand-made run: 3 steps, 3 prompts each, 4 samples of each prompt."""
    assert index.update(RUN, SampleRecords(run_dir / "rollouts")) == 36
    return index


def find(index, **query):
    return index.find(Query(RUN, **query))


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ({}, lambda row: True),
        ({"step_from": 2}, lambda row: row.step >= 2),
        ({"step_from": 2, "step_to": 2}, lambda row: row.step == 2),
        ({"reward_from": 0.5}, lambda row: row.reward >= 0.5),
        ({"reward_to": 0.1}, lambda row: row.reward <= 0.1),
        ({"length_from": 9}, lambda row: row.length >= 9),
        ({"finish": "length"}, lambda row: row.truncated),
        ({"finish": "stop"}, lambda row: not row.truncated),
        ({"prompt_index": 1, "step_to": 1}, lambda row: row.prompt_index == 1 and row.step == 1),
        ({"text": "word2"}, lambda row: "word2" in row.response),
        ({"text": "WORD2 a"}, lambda row: "word2" in row.response),
        ({"text": "wor"}, lambda row: True),
        ({"text": "sort 31"}, lambda row: True),
        ({"text": "word1 a3"}, lambda row: row.response == "word1 a3"),
        ({"text": "absent"}, lambda row: False),
        ({"text": "::"}, lambda row: False),
        ({"text": '"word1" OR ( NEAR'}, lambda row: False),
    ],
)
def test_filters_find_exactly_what_matches(indexed, query, matches):
    expected = [row for row in find(indexed).rows if matches(row)]
    found = find(indexed, **query)
    assert found.rows == expected
    assert (found.total, found.indexed, found.unreadable) == (len(expected), 36, 0)


@pytest.mark.parametrize(("text", "matches"), SEARCHES)
def test_words_of_any_language_are_found(index, tmp_path, text, matches):
    write_step(tmp_path, 1, [record(1, number, text) for number, text in enumerate(TEXTS)])
    index.update(RUN, SampleRecords(tmp_path / "rollouts"))
    assert [row.prompt_index for row in find(index, text=text).rows] == matches


def test_samples_of_other_runs_are_not_found(indexed):
    assert indexed.find(Query(RUN + 1)).total == 0


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("newest", lambda row: -row.step),
        ("oldest", lambda row: row.step),
        ("best", lambda row: -row.reward),
        ("worst", lambda row: row.reward),
        ("longest", lambda row: -row.length),
        ("shortest", lambda row: row.length),
    ],
)
def test_samples_are_sorted(indexed, order, key):
    keys = [key(row) for row in find(indexed, order=order).rows]
    assert keys == sorted(keys)


def test_pages_hold_every_sample_once(index, run_dir):
    write_step(run_dir, 9, [record(9, row, "a") for row in range(2 * PAGE_SIZE)])
    index.update(RUN, SampleRecords(run_dir / "rollouts"))
    for order in ORDERS:
        pages = [find(index, order=order, page=page).rows for page in range(4)]
        assert [len(page) for page in pages] == [PAGE_SIZE, PAGE_SIZE, 36, 0]
        assert len({row.id for page in pages for row in page}) == 2 * PAGE_SIZE + 36


def test_the_group_of_a_sample_is_its_prompt_in_its_step(indexed, run_dir):
    row = find(indexed, text="word1 a2", step_to=2).rows[0]
    group = indexed.group_of(row.id)
    samples = [SampleRecords(run_dir / "rollouts").load(place.file, place.place) for place in group]
    assert [sample.response for sample in samples] == [f"word1 a{number}" for number in range(4)]
    assert {sample.step for sample in samples} == {row.step}
    assert indexed.group_of(10**6) == []


# Records that grow, are replaced, or are broken


def test_only_new_records_are_read(indexed, run_dir):
    source = SampleRecords(run_dir / "rollouts")
    assert indexed.update(RUN, source) == 0
    with (run_dir / "rollouts" / "step_000003.jsonl").open("a") as file:
        file.write(json.dumps(record(3, 0, "late")) + "\n")
    write_step(run_dir, 4, [record(4, 0, "later")])
    assert indexed.update(RUN, source) == 2
    assert find(indexed, text="late").total == 2


def test_an_update_can_be_stopped(index, run_dir):
    index.stop()
    assert index.update(RUN, SampleRecords(run_dir / "rollouts")) == 0
    assert find(index).total == 0


def test_an_incomplete_line_is_read_when_it_is_complete(index, run_dir):
    path = run_dir / "rollouts" / "step_000001.jsonl"
    lines = path.read_text()
    path.write_text(lines[:-10])
    source = SampleRecords(run_dir / "rollouts")
    assert index.update(RUN, source) == 35
    with path.open("a") as file:
        file.write(lines[-10:])
    assert index.update(RUN, source) == 1
    assert find(index).total == 36


def test_moved_and_replaced_files_are_forgotten(indexed, run_dir):
    folder = run_dir / "rollouts"
    (folder / "step_000003.jsonl").rename(run_dir / "aside.jsonl")
    (folder / "step_000002.jsonl").unlink()
    write_step(run_dir, 2, [record(2, 0, "changed")])
    indexed.update(RUN, SampleRecords(folder))
    assert find(indexed).total == 13
    assert find(indexed, step_from=2).rows[0].response == "changed"
    assert find(indexed, text="word1", step_from=2).total == 0


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        json.dumps(record(1, 10**30, "x")),
        json.dumps(record(1, 0, "x") | {"reward": None}),
        json.dumps(record(1, 0, "x") | {"action_mask": 5}),
        json.dumps(record(1, 0, "x") | {"prompt": {"index": 0}}),
        json.dumps(record(1, 0, "") | {"input_ids": [-1], "action_mask": [True]}),
        json.dumps(record(1, 0, "") | {"input_ids": [2**70], "action_mask": [True]}),
    ],
)
def test_a_broken_record_is_counted_and_left_out(index, run_dir, broken):
    write_step(run_dir, 1, [record(1, 0, "good"), broken, record(1, 1, "fine")])
    index.update(RUN, SampleRecords(run_dir / "rollouts"))
    found = find(index, step_to=1)
    assert [row.response for row in found.rows] == ["good", "fine"]
    assert found.unreadable == 1


def test_unusual_values_are_kept(index, run_dir):
    row = record(1, 0, "odd", reward=float("nan")) | {"response": "a \ud800 b \x00 c"}
    write_step(run_dir, 1, [row | {"prompt": row["prompt"] | {"label": {"answer": [1]}}}])
    index.update(RUN, SampleRecords(run_dir / "rollouts"))
    (found,) = find(index, step_to=1).rows
    assert (found.reward, found.response) == (None, "a \ufffd b \x00 c")
    assert parse_sample((run_dir / "rollouts" / "step_000001.jsonl").read_bytes()).label == '{"answer": [1]}'


# Real records


def test_samples_of_a_real_run_have_turns_tokens_and_log_probs(index, agent_run):
    (run,) = find_runs([agent_run])
    assert index.update(RUN, SampleRecords(run.rollouts)) == 64
    rows = find(index).rows
    assert {row.turns for row in rows} == {2}
    place = index.group_of(rows[0].id)[0]
    sample = SampleRecords(run.rollouts).load(place.file, place.place)
    texts = TokenTexts(run).decode(sample.ids)
    assert "".join(texts) == sample.response
    environment = [text for text, acts in zip(texts, sample.actions, strict=True) if not acts]
    assert "".join(environment) == "again!"
    assert len(sample.advantages) == len(sample.engine) == len(sample.ids)
    assert sample.length == sum(sample.actions) < len(sample.ids)


def test_without_a_tokenizer_on_this_machine_there_are_no_texts(tmp_path):
    run_dir = make_run(tmp_path / "made", flags={"save_path": "~no-such-user/model"})
    for path in (tmp_path / "made").glob("tokenizer*"):
        path.unlink()
    (run,) = find_runs([run_dir])
    assert TokenTexts(run).decode([3, 4]) is None
    (tmp_path / "made" / "tokenizer.json").write_text("{")
    assert TokenTexts(run).decode([3, 4]) is None


# 100,000 samples


@pytest.mark.slow(seconds=5)
def test_100000_samples_are_read_once_and_queried_through_indexes(index, tmp_path, monkeypatch):
    line = json.dumps(record(1, 0, "a b"))
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in range(1, 101):
        text = line.replace('"step": 1,', f'"step": {step},')
        rows = (text.replace('"index": 0', f'"index": {number // 8}') for number in range(1000))
        (folder / f"step_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    parsed = []
    monkeypatch.setattr(records, "parse_sample", lambda line, parse=parse_sample: parsed.append(0) or parse(line))
    assert index.update(RUN, SampleRecords(folder)) == len(parsed) == 100_000
    assert index.update(RUN, SampleRecords(folder)) == 0
    parsed.clear()
    assert find(index, page=1000).total == 100_000
    group = index.group_of(find(index, step_from=50, step_to=50).rows[0].id)
    assert [place.file for place in group] == ["step_000050.jsonl"] * 8
    assert [SampleRecords(folder).load(place.file, place.place).step for place in group] == [50] * 8
    assert len(parsed) == 8, "lists are answered from the index, and a group reads its own records"
    assert index.path.stat().st_size < 100 * 2**20, "tokens stay in the record"

    query = Query(RUN, step_from=10, step_to=90, reward_from=0.1)
    with sqlite3.connect(index.path) as database:
        for order, terms in ORDERS.items():
            where, values = conditions(replace(query, order=order))
            plan = database.execute(
                f"EXPLAIN QUERY PLAN SELECT id FROM samples WHERE {where} ORDER BY {terms} LIMIT 50", values
            ).fetchall()
            assert all("USING" in row[3] and "INDEX" in row[3] for row in plan if "samples" in row[3]), (order, plan)


def write_parquet(folder, step, responses):
    """Write the record of a step as the trainer does, with rows of 1 + 3 tokens and two of them in a row group."""
    prompt = Prompt(3, "sort 31>", (1,), label={"answer": [1]})
    items = [
        make_trajectory(prompt, (1, 5, 6, 7), (0, 1, 0, 1), (0, -0.5, 0, -0.25), 0.5, extra_logs={"exact": 1.0})
        for _ in responses
    ]
    values = pa.array([[0, 1.5, 0, 2.5]] * len(items), pa.list_(pa.float32()))
    steps, texts = pa.array([step] * len(items)), pa.array(responses)
    columns = {"step": steps, "response": texts, "advantages": values, "old_log_probs": values}
    folder.mkdir(exist_ok=True)
    write_samples(folder / f"step_{step:06d}.parquet", items, columns)


def test_parquet_files_are_indexed_and_read_row_by_row(index, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "GROUP_TOKENS", 8)
    folder = tmp_path / "rollouts"
    responses = [f"answer {number}" for number in range(5)]
    write_parquet(folder, 1, responses)
    write_step(tmp_path, 2, [record(2, 0, "of an older version")])
    records = SampleRecords(folder)
    assert [sample.sample.response for sample in records.read("step_000001.parquet")] == responses
    assert [sample.sample.response for sample in records.read("step_000001.parquet", 3)] == responses[3:]
    for place, response in enumerate(responses):
        assert records.load("step_000001.parquet", place).response == response
    sample = records.load("step_000001.parquet", 0)
    assert (sample.step, sample.prompt_index, sample.label, sample.extra) == (1, 3, '{"answer": [1]}', {"exact": 1.0})
    assert (sample.ids, sample.actions, sample.length, sample.turns) == ([5, 6, 7], [True, False, True], 2, 2)
    assert (sample.advantages, sample.engine) == ([1.5, 0, 2.5], [-0.5, 0, -0.25])
    assert index.update(RUN, records) == 6
    assert index.update(RUN, records) == 0
    write_parquet(folder, 3, responses[:2])
    assert index.update(RUN, records) == 2
    assert index.find(Query(RUN, text="answer")).total == 7
    assert records.load("step_000001.parquet", 99) is None
    assert records.load("step_000009.parquet", 0) is None


def test_a_damaged_parquet_file_does_not_hide_the_others(index, tmp_path):
    folder = tmp_path / "rollouts"
    write_parquet(folder, 1, ["one"])
    write_parquet(folder, 2, ["two"])
    (folder / "step_000001.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(OSError, match=r"step_000001\.parquet cannot be read"):
        index.update(RUN, SampleRecords(folder))
    assert index.find(Query(RUN)).total == 1
    assert SampleRecords(folder).load("step_000001.parquet", 0) is None
