"""Rows are found in the cache only if nothing that determines them has changed."""

import json
from dataclasses import replace
from datetime import date, datetime

import datasets
import numpy as np
import pytest

from openrlhf.config.sections.data import ConversationFlags, LabelledResponseFlags, PairFlags, StepFlags, TemplateFlags
from openrlhf.data import row_key as row_key_module
from openrlhf.data.files import JsonArray
from openrlhf.data.preference import LabelledReader, PairReader
from openrlhf.data.process import StepReader, step_tokens
from openrlhf.data.prompts import PromptReader
from openrlhf.data.records import Records
from openrlhf.data.report import Budget
from openrlhf.data.row_key import row_key
from openrlhf.data.sft import open_reader
from openrlhf.data.sources import TableRows, load_dataset_rows
from openrlhf.data.templates import open_format
from tests.data.chat_words import MARKING, STABLE, word_tokenizer
from tests.toy_data import write_rows

BUDGET = Budget(100, "--max_len")
CHAT = TemplateFlags(apply_chat_template=True)
FIELDS = ConversationFlags(output_key="output")
ROWS = [{"input": "one", "output": "two"}, {"input": "three", "output": "four"}]


@pytest.fixture
def data(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return load_dataset_rows("rows.jsonl", split="train")


def sft_reader(*, tokenizer=None, fields=FIELDS, template=CHAT, max_len=100):
    return open_reader(tokenizer or word_tokenizer(), fields, template, max_len)


def test_equal_settings_give_the_same_key(data, tmp_path):
    write_rows(tmp_path / "copy.jsonl", ROWS)
    copy = load_dataset_rows("copy.jsonl", split="train")
    assert row_key(data, sft_reader(), BUDGET) == row_key(copy, sft_reader(), BUDGET)


@pytest.mark.parametrize(
    "changed",
    [
        {"max_len": 99},
        {"fields": replace(FIELDS, input_key="question")},
        {"fields": replace(FIELDS, output_key="answer")},
        {"fields": replace(FIELDS, multiturn=True)},
        {"fields": replace(FIELDS, pretrain_mode=True)},
        {"template": TemplateFlags()},
        {"template": TemplateFlags(input_template="Q: {}")},
        {"template": replace(CHAT, tokenizer_chat_template=MARKING)},
        {"template": replace(CHAT, system_prompt="be kind")},
        {"template": replace(CHAT, chat_template_kwargs='{"enable_thinking": false}')},
    ],
    ids=str,
)
def test_every_flag_that_rows_depend_on_is_in_the_key(changed, data):
    assert row_key(data, sft_reader(**changed), BUDGET) != row_key(data, sft_reader(), BUDGET)


def other_eos(tokenizer):
    tokenizer.eos_token = "six"


def added_token(tokenizer):
    tokenizer.add_tokens(["seven"])


def special_token(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "one"})


def split_special_tokens(tokenizer):
    tokenizer.split_special_tokens = True


def other_rules(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = None


def other_template(tokenizer):
    tokenizer.chat_template = MARKING


CHANGES = [other_eos, added_token, special_token, split_special_tokens, other_rules, other_template]


@pytest.mark.parametrize("change", CHANGES)
def test_every_property_of_the_tokenizer_is_in_the_key(change, data):
    tokenizer = word_tokenizer()
    before = row_key(data, sft_reader(tokenizer=tokenizer), BUDGET)
    change(tokenizer)
    assert row_key(data, sft_reader(tokenizer=tokenizer), BUDGET) != before is not None


def readers():
    """Return readers of all kinds that differ in one setting each."""
    tokenizer, form = word_tokenizer(), open_format(word_tokenizer(), CHAT)
    pair = PairReader(form, PairFlags(), 100, drop_long_prompts=True)
    labelled = LabelledReader(form, LabelledResponseFlags(output_key="output"), 100)
    fields = StepFlags(placeholder_token="ки", reward_tokens=("+", "-"))
    step = StepReader(tokenizer, fields, step_tokens(tokenizer, fields), 100)
    prompt = PromptReader(form, "input", None, BUDGET)
    return [
        pair,
        replace(pair, drop_long_prompts=False),
        replace(pair, fields=PairFlags(prompt_key="prompt")),
        replace(pair, form=replace(form, input_template="{}")),
        replace(pair, form=replace(form, chat=None)),
        labelled,
        replace(labelled, fields=LabelledResponseFlags(output_key="output", label_key="good")),
        replace(labelled, max_len=99),
        step,
        replace(step, fields=replace(fields, reward_tokens=("-", "+"))),
        replace(step, fields=replace(fields, placeholder_token="six")),
        prompt,
        replace(prompt, label_key="label"),
        replace(prompt, budget=Budget(50)),
        replace(prompt, budget=replace(BUDGET, more=1)),
    ]


def test_all_readers_have_different_keys(data):
    keys = {row_key(data, reader, BUDGET) for reader in readers()}
    assert len(keys) == len(readers())
    assert None not in keys


def test_the_content_and_the_order_of_the_data_are_in_the_key(data, tmp_path):
    write_rows(tmp_path / "edited.jsonl", [ROWS[0], {**ROWS[1], "output": "five"}])
    write_rows(tmp_path / "a.jsonl", ROWS)
    write_rows(tmp_path / "b.jsonl", [{"input": "five", "output": "six"}])
    tried = [
        data,
        load_dataset_rows("edited.jsonl", split="train"),
        load_dataset_rows("a.jsonl", split="train", max_samples=1),
        load_dataset_rows("a.jsonl,b.jsonl", split="train"),
        load_dataset_rows("b.jsonl,a.jsonl", split="train"),
        load_dataset_rows("a.jsonl,b.jsonl", split="train", probs="0.5,0.5", seed=1),
        load_dataset_rows("a.jsonl,b.jsonl", split="train", probs="0.5,0.5", seed=4),
    ]
    assert len({row_key(records, sft_reader(), BUDGET) for records in tried}) == len(tried)


@pytest.mark.parametrize("kind", ["lines", "array", "table", "shuffled"])
def test_only_the_rows_in_use_are_in_the_key(kind, tmp_path):
    def key(rows, used):
        if kind == "lines":
            write_rows(tmp_path / "rows.jsonl", rows)
        elif kind == "array":
            (tmp_path / "rows.json").write_text(json.dumps(rows))
        source = {"lines": "rows.jsonl", "array": "rows.json"}.get(kind)
        if source is not None:
            return row_key(load_dataset_rows(source, split="train", max_samples=used), sft_reader(), BUDGET)
        table = datasets.Dataset.from_list(rows)
        table = table.select([0, 1, 2]) if kind == "table" else table.select([1, 0, 2])
        order = np.stack([np.zeros(used, np.int64), np.arange(used)], axis=1)
        return row_key(Records([TableRows("table", table)], order), sft_reader(), BUDGET)

    third, other = {"input": "five", "output": "six"}, {"input": "seven", "output": "eight"}
    assert key([*ROWS, third], 2) == key([*ROWS, other], 2)
    assert key([*ROWS, third], 3) != key([*ROWS, other], 3)
    assert key([*ROWS, third], 2) != key([*ROWS[::-1], third], 2)


def test_the_code_is_in_the_key(data, monkeypatch):
    before = row_key(data, sft_reader(), BUDGET)
    monkeypatch.setattr(row_key_module, "version", lambda name: "0.1")
    assert row_key(data, sft_reader(), BUDGET) != before


def test_tables_are_distinguished_by_the_contents_of_their_rows():
    table = datasets.Dataset.from_list(ROWS)
    same = datasets.Dataset.from_list(ROWS)
    tables = [
        table,
        table.select([0]),
        table.select([1, 0]),
        table.rename_column("input", "question"),
        table.map(lambda row: {"input": row["input"] + "!"}),
        table.with_format(columns=["input"]),
        datasets.Dataset.from_list([{"number": 1}]),
        datasets.Dataset.from_list([{"number": 1.0}]),
    ]
    digests = [TableRows("table", one).digest(len(one)) for one in tables]
    assert TableRows("other", same).digest(2) == digests[0]
    assert len({*digests}) == len(tables)
    assert None not in digests
    assert TableRows("table", table.with_transform(lambda rows: rows)).digest(2) is None


def test_items_of_a_python_caller_need_an_exact_text():
    items = [[{"a": 1}], [{"a": 1.0}], [{"a": True}], [{"a": "1"}], [{"a": None}], [{"a": [1]}], [{"b": 1}], []]
    assert len({JsonArray("items", item).digest(len(item)) for item in items}) == len(items)
    for inexact in ({"a": (1,)}, {1: "a"}, {"a": datetime(2024, 1, 1)}):
        assert JsonArray("items", [{"a": 1}, inexact]).digest(2) is None


def test_templates_with_a_date_have_another_key_each_day(data, monkeypatch):
    class Tomorrow(date):
        @classmethod
        def today(cls):
            return cls(2100, 1, 1)

    reader = sft_reader(tokenizer=word_tokenizer(STABLE + "{{ strftime_now('%d %b %Y') }}"))
    today, undated = row_key(data, reader, BUDGET), row_key(data, sft_reader(), BUDGET)
    monkeypatch.setattr(row_key_module, "date", Tomorrow)
    assert row_key(data, reader, BUDGET) != today is not None
    assert row_key(data, sft_reader(), BUDGET) == undated


@pytest.mark.parametrize("text", ["{{ strftime_now('%H:%M') }}", "{{ ['one', 'two'] | random }}", "{{ lipsum() }}"])
@pytest.mark.parametrize("given", ["by the tokenizer", "by a flag"])
def test_templates_that_render_differently_each_time_are_not_cached(text, given, data):
    if given == "by a flag":
        reader = sft_reader(template=replace(CHAT, tokenizer_chat_template=STABLE + text))
    else:
        reader = sft_reader(tokenizer=word_tokenizer(STABLE + text))
    assert row_key(data, reader, BUDGET) is None


def test_tokenizers_of_other_packages_are_not_cached(data):
    tokenizer = word_tokenizer()
    tokenizer.__class__ = type("TheirTokenizer", (type(tokenizer),), {"__module__": "transformers_modules.theirs"})
    assert row_key(data, sft_reader(tokenizer=tokenizer), BUDGET) is None
