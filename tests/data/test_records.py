"""Reading fields of a row; errors name file, row, field and flag."""

import pytest

from openrlhf.data.records import Place, Record, describe
from openrlhf.errors import DataError


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (["question", "answer"], "the row has 'question', 'answer'. Try: --input_key question or answer"),
        (["the question"], "the row has 'the question'. Try: --input_key 'the question'"),
        (["a", "b", "c", "d"], "the row has 'a', 'b', 'c', 'd'. Try: --input_key a or b or c"),
        ([], "the row has none"),
    ],
)
def test_the_error_for_a_wrong_key_lists_the_fields_and_the_flag(fields, complaint):
    record = Record(dict.fromkeys(fields, "x"), Place("data.jsonl", 1))
    with pytest.raises(DataError) as caught:
        record.text("input", "--input_key")
    assert str(caught.value) == f"data.jsonl, row 1: no field 'input'; {complaint}"


def test_a_number_instead_of_text_names_file_row_and_field(records):
    _, record = records({"chosen": "one"}, {"chosen": 17})
    with pytest.raises(DataError, match=r"^data.jsonl, row 2, field 'chosen': expected text, got the number 17$"):
        record.text("chosen", "--chosen_key")


def test_null_reads_as_empty_text(records):
    (record,) = records({"chosen": None})
    assert record.text("chosen", "--chosen_key") == ""


@pytest.mark.parametrize("value", ["much", True, [1]])
def test_a_margin_must_be_a_number(records, value):
    (record,) = records({"margin": value})
    with pytest.raises(DataError, match=r"^data.jsonl, row 1, field 'margin': expected a number, got .*$"):
        record.number("margin", default=0.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (2.5, "the number 2.5"),
        ("x" * 50, f"the text '{'x' * 40}'..."),
        ([1, 2], "a list of 2"),
        ({"from": "gpt"}, "an object with from"),
        ({}, "an object with no keys"),
        (object(), "a object"),
    ],
)
def test_values_are_described_in_a_few_words(value, words):
    assert describe(value) == words
