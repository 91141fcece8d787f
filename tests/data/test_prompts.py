"""Rows of a dataset as prompts: their text, tokens, label and source."""

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.config.sections.rl import PromptFlags
from openrlhf.data.prompts import load_prompts, prompt_budget, prompt_rows
from openrlhf.data.report import Budget
from openrlhf.data.rows import announce
from openrlhf.errors import DataError
from tests.tiny import make_tokenizer

RL = ["--pretrain", "m", "--prompt_data", "data.jsonl", "--remote_rm_url", "r.py"]


@pytest.fixture
def letters():
    return make_tokenizer()


def make_prompts(records, letters, budget=100, template=None, **flags):
    return announce(
        prompt_rows(records, letters, PromptFlags(**flags), template or TemplateFlags(), Budget(budget))
    ).rows


def test_plain_text_is_put_into_the_template(records, letters):
    rows = records({"input": "1+1"}, {"input": "2+2"})
    first, second = make_prompts(rows, letters, template=TemplateFlags(input_template="{}="))
    assert (first.index, first.text, first.label, first.datasource) == (0, "1+1=", "", "default")
    assert letters.decode(list(second.input_ids)) == "2+2="


def test_labels_and_sources_are_read(records, letters):
    rows = records({"q": "a", "answer": "4", "datasource": "sums"}, {"q": "b", "answer": "5", "datasource": "words"})
    prompts = make_prompts(rows, letters, input_key="q", label_key="answer")
    assert [(prompt.label, prompt.datasource) for prompt in prompts] == [("4", "sums"), ("5", "words")]


def test_a_missing_label_is_an_error(records, letters):
    with pytest.raises(DataError, match="answer"):
        make_prompts(records({"input": "a"}), letters, label_key="answer")


def test_messages_go_through_the_chat_template_up_to_the_answer(records, letters):
    rows = records({"input": [{"role": "user", "content": "hi"}]})
    (prompt,) = make_prompts(rows, letters, template=TemplateFlags(apply_chat_template=True))
    assert prompt.text == "<u>hi<a>"
    assert letters.decode(list(prompt.input_ids)) == "<u>hi<a>"


def test_text_becomes_a_users_message(records, letters):
    template = TemplateFlags(apply_chat_template=True, system_prompt="be kind")
    (prompt,) = make_prompts(records({"input": "hi"}), letters, template=template)
    assert prompt.text == "<s>be kind<u>hi<a>"


def test_long_prompts_are_dropped_and_counted(records, letters, capsys):
    (short,) = make_prompts(records({"input": "abcdefgh"}, {"input": "xy"}), letters, budget=3)
    assert (short.index, short.text) == (0, "xy")
    assert (
        "dropped 1 of 2 rows: 1 longer than the 3 tokens that --prompt_max_len 3 allows. Try: --prompt_max_len 8"
    ) in capsys.readouterr().err


def test_a_budget_that_drops_almost_every_prompt_is_rejected(records, letters):
    rows = records({"input": "a"}, *[{"input": "b" * length} for length in range(5, 24)])
    assert len(make_prompts(rows, letters, budget=5)) == 2
    for budget in (4, 1):
        with pytest.raises(DataError) as caught:
            make_prompts(rows, letters, budget=budget)
        assert "almost no rows would remain: 19 of 20 are dropped: 19 longer" in str(caught.value)
        assert "Try: --prompt_max_len 22, which keeps 95% of them" in str(caught.value)


def test_a_budget_that_drops_every_prompt_is_rejected(records, letters):
    tight = Budget(4, "--max_len", 16)
    with pytest.raises(DataError, match=r"0 of 1 rows .* 4 tokens that --max_len 20 allows.* Try: --max_len 21"):
        prompt_rows(records({"input": "abcde"}), letters, PromptFlags(), TemplateFlags(), tight)


def test_empty_prompts_are_dropped_and_counted(records, letters, capsys):
    (only,) = make_prompts(records({"input": ""}, {"input": "a"}), letters)
    assert (only.index, only.text) == (0, "a")
    assert "dropped 1 of 2 rows: 1 with an empty prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ("--prompt_max_len 20 --generate_max_len 12", Budget(20)),
        ("--max_len 32 --max_new_tokens 8", Budget(24, "--max_len", 8)),
        ("--prompt_max_len 20 --generate_max_len 12 --max_new_tokens 8", Budget(20)),
        ("--max_len 32", Budget(31, "--max_len", 1)),
    ],
)
def test_the_prompt_budget_leaves_tokens_for_a_response(flags, budget):
    assert prompt_budget(parse(COMMANDS["train_ppo"], [*RL, *flags.split()])) == budget


def test_prompts_follow_the_flags(records, letters):
    records({"input": "ab"}, {"input": "cd"}, {"input": "ef"})
    config = parse(
        COMMANDS["train_ppo"], [*RL, "--max_samples", "2", "--eval_dataset", "data.jsonl", "--eval_split", "train"]
    )
    assert [len(prompts) for prompts in load_prompts(config, letters)] == [2, 2]
    assert load_prompts(parse(COMMANDS["train_ppo"], RL), letters)[1] == []
