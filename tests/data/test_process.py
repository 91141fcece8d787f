"""Rows with a label per step, for process reward models."""

import numpy as np
import pytest

from openrlhf.config.sections.data import StepFlags
from openrlhf.data.process import step_rows, step_tokens
from openrlhf.data.rows import announce
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import merging_tokenizer, word_tokenizer

TEXT = "one two ки three ки"


def read(records, *, max_len=100, placeholder="ки", reward_tokens=("+", "-"), tokenizer=None):
    fields = StepFlags(placeholder_token=placeholder, reward_tokens=reward_tokens)
    return announce(step_rows(records, tokenizer or word_tokenizer(), fields, max_len))


def test_hard_labels_match_hand_computation(records):
    steps = read(records({"input": TEXT, "label": ["+", "-"]}))
    (row,) = steps.rows
    assert not steps.soft_labels
    assert row.input_ids.tolist() == [7, 3, 8, 3, 20, 3, 9, 3, 20]
    assert row.step_places.tolist() == [4, 8]
    assert row.step_labels.tolist() == [0.0, 1.0]
    assert row.step_labels.dtype == np.float32


def test_soft_labels_are_probabilities(records):
    steps = read(records({"input": TEXT, "label": [0.25, 1]}))
    assert steps.soft_labels
    assert steps.rows[0].step_labels.tolist() == [0.25, 1.0]


def test_without_reward_tokens_a_label_is_a_token_of_the_vocabulary(records):
    steps = read(records({"input": TEXT, "label": ["+", "six"]}), reward_tokens=())
    assert steps.rows[0].step_labels.tolist() == [21.0, 12.0]


def test_labels_are_truncated_with_the_text(records, capsys):
    steps = read(
        records({"input": TEXT, "label": ["+", "-"]}, {"input": "one two three ки", "label": ["+"]}), max_len=6
    )
    (row,) = steps.rows
    assert row.input_ids.tolist() == [7, 3, 8, 3, 20, 3]
    assert row.step_labels.tolist() == [0.0]
    assert "dropped 1 of 2 rows: 1 whose first step ends past --max_len 6" in capsys.readouterr().err


def test_a_text_without_a_step_is_dropped(records):
    with pytest.raises(DataError, match=r"0 of 1 rows can be used: 1 without a step$"):
        read(records({"input": "one", "label": []}))


def test_labels_written_into_the_text_are_read(records):
    steps = read(records({"input": "one + ки two ки", "label": "one + - two +"}))
    assert steps.rows[0].step_labels.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("label", ["+-", "one two + four -", "one two + three ки", "one two + three + more", "+"])
def test_a_labelled_text_that_differs_from_the_input_is_rejected(records, label):
    with pytest.raises(DataError, match=r"^data.jsonl, row 1, field 'label': expected a list with one label per step"):
        read(records({"input": TEXT, "label": label}))


def test_ambiguous_labels_in_the_text_are_rejected(records):
    with pytest.raises(DataError, match=r"expected a list with one label per step"):
        read(records({"input": "one ки", "label": "one ++"}), reward_tokens=("+", "++"))


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        (["+"], r"expected as many labels as placeholders 'ки' \(2\), got 1"),
        (["+", "six"], r"expected one of --reward_tokens \+ - as label, got 'six'"),
        ([0.5, 1.5], "expected a probability from 0 to 1, got 1.5"),
        ([0.5, 10**400], "expected a probability from 0 to 1, got 10{39}"),
        (["+", 0.5], "expected tokens, as in earlier labels, got probabilities"),
        ([0.5, "+"], "expected probabilities, as in earlier labels, got tokens"),
        (["+", None], "expected a token or a probability as label, got null"),
        (7, "expected a list with one label per step, got the number 7"),
    ],
)
def test_the_error_for_mismatched_labels_names_the_row(records, label, complaint):
    with pytest.raises(DataError, match=f"^data.jsonl, row 1, field 'label': {complaint}$"):
        read(records({"input": TEXT, "label": label}))


def test_rows_may_not_mix_hard_and_soft_labels(records):
    with pytest.raises(DataError, match=r"^data.jsonl, row 2, field 'label': expected tokens, as in earlier labels"):
        read(records({"input": TEXT, "label": ["+", "-"]}, {"input": TEXT, "label": [0.5, 0.5]}))


def test_probabilities_need_two_reward_tokens(records):
    with pytest.raises(ConfigError, match=r"^data.jsonl, row 1: labels are probabilities: expected exactly two"):
        read(records({"input": TEXT, "label": [0.5, 0.5]}), reward_tokens=("+", "-", "six"))


def test_placeholder_and_reward_tokens_must_be_single_tokens():
    tokenizer = word_tokenizer()
    tokens = step_tokens(tokenizer, StepFlags(placeholder_token="ки", reward_tokens=("+", "-")))
    assert (tokens.placeholder_id, tokens.reward_ids) == (20, (21, 22))
    with pytest.raises(
        ConfigError, match=r"^--placeholder_token 'ки ки': expected exactly one token of this tokenizer, got 3$"
    ):
        step_tokens(tokenizer, StepFlags(placeholder_token="ки ки", reward_tokens=("+", "-")))
    with pytest.raises(ConfigError, match=r"^--reward_tokens 'one two': expected exactly one token"):
        step_tokens(tokenizer, StepFlags(placeholder_token="ки", reward_tokens=("+", "one two")))


def test_the_error_explains_placeholders_that_merge_with_neighbouring_text(records):
    message = r"field 'input': the tokenizer merges 1 of 2 placeholders 'b' with the text around"
    with pytest.raises(DataError, match=message):
        read(
            records({"input": "cb ab", "label": ["a", "c"]}),
            placeholder="b",
            reward_tokens=("a", "c"),
            tokenizer=merging_tokenizer(),
        )


def test_a_step_without_text_is_an_error(records):
    with pytest.raises(DataError, match=r"^data.jsonl, row 1: the first step is empty"):
        read(records({"input": "ки one ки", "label": ["+", "+"]}))
