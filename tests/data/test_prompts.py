"""Rows of a dataset as prompts: their text, tokens, label and source."""

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.config.sections.data import Template
from openrlhf.config.sections.rl import Prompts
from openrlhf.data.prompts import load_eval_prompts, load_prompts, prompt_budget, prompt_rows
from openrlhf.errors import DataError
from tests.tiny import make_tokenizer

RL = ["--pretrain", "m", "--prompt_data", "data.jsonl", "--remote_rm_url", "r.py"]


@pytest.fixture
def letters():
    return make_tokenizer()


def made(records, letters, budget=100, template=None, **flags):
    return prompt_rows(records, letters, Prompts(**flags), template or Template(), budget)


def test_plain_text_in_its_template(records, letters):
    rows = records({"input": "1+1"}, {"input": "2+2"})
    first, second = made(rows, letters, template=Template(input_template="{}="))
    assert (first.index, first.text, first.label, first.datasource) == (0, "1+1=", "", "default")
    assert letters.decode(list(second.input_ids)) == "2+2="


def test_labels_and_sources(records, letters):
    rows = records({"q": "a", "answer": "4", "datasource": "sums"}, {"q": "b", "answer": "5", "datasource": "words"})
    prompts = made(rows, letters, input_key="q", label_key="answer")
    assert [(prompt.label, prompt.datasource) for prompt in prompts] == [("4", "sums"), ("5", "words")]


def test_a_label_that_is_missing_is_an_error(records, letters):
    with pytest.raises(DataError, match="answer"):
        made(records({"input": "a"}), letters, label_key="answer")


def test_messages_through_the_chat_template_up_to_the_answer(records, letters):
    rows = records({"input": [{"role": "user", "content": "hi"}]})
    (prompt,) = made(rows, letters, template=Template(apply_chat_template=True))
    assert prompt.text == "<u>hi<a>"
    assert letters.decode(list(prompt.input_ids)) == "<u>hi<a>"


def test_text_becomes_a_users_message(records, letters):
    template = Template(apply_chat_template=True, system_prompt="be kind")
    (prompt,) = made(records({"input": "hi"}), letters, template=template)
    assert prompt.text == "<s>be kind<u>hi<a>"


def test_long_prompts_keep_their_end_and_a_line_says_how_many(records, letters, capsys):
    long, short = made(records({"input": "abcdefgh"}, {"input": "xy"}), letters, budget=3)
    assert letters.decode(list(long.input_ids)) == "fgh"
    assert long.text == "abcdefgh"
    assert letters.decode(list(short.input_ids)) == "xy"
    assert "1 of 2 prompts are longer than 3 tokens and keep their end" in capsys.readouterr().err


def test_empty_prompts_are_dropped_and_counted(records, letters, capsys):
    (only,) = made(records({"input": ""}, {"input": "a"}), letters)
    assert (only.index, only.text) == (0, "a")
    assert "dropped 1 of 2 rows: 1 an empty prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ("--prompt_max_len 20 --generate_max_len 12", 20),
        ("--max_len 32 --max_new_tokens 8", 24),
        ("--max_len 32", 31),
    ],
)
def test_a_prompt_leaves_room_for_a_response(flags, budget):
    assert prompt_budget(parse(COMMANDS["train_ppo"], [*RL, *flags.split()])) == budget


def test_prompts_by_the_flags(records, letters):
    records({"input": "ab"}, {"input": "cd"}, {"input": "ef"})
    config = parse(
        COMMANDS["train_ppo"], [*RL, "--max_samples", "2", "--eval_dataset", "data.jsonl", "--eval_split", "train"]
    )
    assert len(load_prompts(config, letters)) == 2
    assert len(load_eval_prompts(config, letters)) == 2
    assert load_eval_prompts(parse(COMMANDS["train_ppo"], RL), letters) == []
