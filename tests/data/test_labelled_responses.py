"""Rows of single responses with a label, for KTO."""

import pytest

from openrlhf.config.sections.data import LabelledResponseFlags, TemplateFlags
from openrlhf.data.preference import labelled_rows, mismatch_rows
from openrlhf.data.rows import announce
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import assistant, decode_row, user, word_tokenizer

PLAIN = TemplateFlags(input_template="User: {} ")
CHAT = TemplateFlags(apply_chat_template=True)


def read(records, *, template=PLAIN, max_len=100, output_key="output", input_key="input"):
    fields = LabelledResponseFlags(input_key=input_key, output_key=output_key)
    return announce(labelled_rows(records, word_tokenizer(), fields, template, max_len)).rows


def row(prompt, response, label=1):
    return {"input": prompt, "output": response, "label": label}


def test_plain_rows_match_hand_computation(records):
    (got,) = read(records(row("one", "two")))
    assert got.tokens.input_ids.tolist() == [5, 3, 7, 3, 8, 0]
    assert got.tokens.target_mask.tolist() == [False] * 4 + [True] * 2
    assert got.prompt_length == 4
    assert got.label is True


def test_messages_may_be_in_one_field(records):
    data = records({"messages": [user("one"), assistant("two")], "label": False})
    (got,) = read(data, template=CHAT, output_key=None, input_key="messages")
    assert decode_row(got.tokens)[1] == "two <eos>"
    assert got.label is False


@pytest.mark.parametrize(("label", "expected"), [(1, True), (0, False), (True, True), (False, False), (1.0, True)])
def test_labels_may_have_any_supported_type(records, label, expected):
    (got,) = read(records(row("one", "two", label)))
    assert got.label is expected


@pytest.mark.parametrize(
    ("label", "got"),
    [(2, "the number 2"), (0.5, "the number 0.5"), ("yes", "the text 'yes'"), (None, "null"), (-1, "the number -1")],
)
def test_the_error_for_an_invalid_label_names_the_row(records, label, got):
    message = rf"^data.jsonl, row 2, field 'label': expected 0, 1, true or false, got {got}$"
    with pytest.raises(DataError, match=message):
        read(records(row("one", "two"), row("one", "two", label)))


def test_the_error_for_a_missing_label_lists_the_fields(records):
    message = r"^data.jsonl, row 1: no field 'label'; the row has 'input', 'output'. Try: --label_key input or output$"
    with pytest.raises(DataError, match=message):
        read(records({"input": "one", "output": "two"}))


def test_long_prompts_are_dropped(records, capsys):
    assert len(read(records(row("one", "two"), row("one one one", "two")), max_len=8)) == 1
    assert "1 with a prompt of 6 tokens or more (--max_len 8)" in capsys.readouterr().err


def test_plain_rows_need_an_output_key(records):
    with pytest.raises(ConfigError, match=r"--output_key"):
        read(records(row("one", "two")), output_key=None)


def test_mismatched_pairs_use_the_next_response_and_wrap_around(records):
    rows = read(records(row("one", "two"), row("three", "four four"), row("five", "six")))
    got = mismatch_rows(rows, 100)
    assert [decode_row(item) for item in got] == [
        ("User: one four four<eos>", "four four<eos>"),
        ("User: three six<eos>", "six<eos>"),
        ("User: five two<eos>", "two<eos>"),
    ]


def test_mismatched_pairs_are_truncated_and_end_in_eos(records):
    rows = read(records(row("one", "two"), row("three", "four four")))
    assert decode_row(mismatch_rows(rows, 6)[0]) == (
        "User: one four<eos>",
        "four",
    )  # the EOS of a cut response is not learned
    assert decode_row(rows[1].tokens)[0] == "User: three four four<eos>"  # the row itself is untouched


def test_a_single_row_is_paired_with_itself(records):
    (only,) = read(records(row("one", "two")))
    assert decode_row(mismatch_rows([only], 100)[0]) == decode_row(only.tokens)
    assert mismatch_rows([], 100) == []
