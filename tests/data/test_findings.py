"""Likely mistakes in data that loads without an error."""

import pytest

from openrlhf.config.sections.data import PairFlags, TemplateFlags
from openrlhf.data.findings import (
    formatted_twice,
    lost_text,
    messages_as_text,
    missing_labels,
    unknown_field,
    unused_prompt,
)
from tests.data.chat_words import word_tokenizer
from tests.tiny import character_tokenizer, make_tokenizer

PLAIN = TemplateFlags(input_template="User: {}")
CHAT = TemplateFlags(apply_chat_template=True)


def test_a_tokenizer_that_drops_characters_is_reported_with_the_resulting_text():
    tokenizer = character_tokenizer(["</s>", "?", " ", *"sort0123456789>:"], eos="</s>", pad="</s>")
    tokenizer.unk_token = "?"
    finding = lost_text(["User: sort 7737>", "sort 12>"], tokenizer)
    assert "'User: sort 7737>' becomes 'sr: sort 7737>', in 1 of the first 2 texts" in finding.problem
    assert finding.problem.endswith("lost characters: U e")
    assert finding.try_this


@pytest.mark.parametrize("text", ["one two\nthree", "Two  SPACES, and: (signs)!", "", "<eos> in the text"])
def test_text_that_survives_the_tokenizer_is_not_reported(text):
    assert lost_text([text], make_tokenizer()) is None


def test_lost_characters_are_shown_as_written():
    assert lost_text(["Öl für 5 €"], make_tokenizer()).problem.endswith("lost characters: Ö ü €")


def test_words_that_the_tokenizer_does_not_know_are_lost():
    assert lost_text(["one two", "User: one\n"], word_tokenizer()) is None
    assert "in 1 of the first 2 texts" in lost_text(["one two", "one hundred"], word_tokenizer()).problem


def test_a_prompt_field_without_its_flag_is_reported():
    rows = [{"prompt": "one", "chosen": "two", "rejected": "three"}]
    assert unused_prompt(rows, PairFlags()).try_this == "--prompt_key prompt"
    assert unused_prompt(rows, PairFlags(prompt_key="prompt")) is None


def test_a_field_that_no_row_has_is_reported():
    rows = [{"instruction": "add", "input": "2"}, {"instruction": "add"}]
    assert unknown_field(rows, ["instruction,input"]) is None
    assert unknown_field(rows, ["instruction", "inputs"]).problem == "none of the first 2 rows has a field 'inputs'"
    assert unknown_field(rows, ["instructions,input"]).try_this == "check its spelling"
    assert unknown_field(rows, ["instruction,inputs"]).try_this == "leave it out if no row has it"
    assert unknown_field([{"a,b": "one"}], ["a,b"]) is None  # a field with a comma in its name
    assert unknown_field([], ["instruction"]) is None


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "two"},
        {"prompt": "one", "chosen": "Human: one Assistant: two"},  # the response contains the prompt
        {"prompt": "one", "chosen": [{"role": "user"}, {"role": "assistant"}]},
        {"prompt": None, "chosen": "two"},
    ],
)
def test_pairs_that_contain_their_prompt_are_not_reported(row):
    assert unused_prompt([row], PairFlags()) is None


def test_labels_that_the_reward_would_not_receive_are_reported():
    rows = [{"question": "2 + 3", "answer": "5"}, {"question": "2 + 4", "answer": ""}]
    assert missing_labels(rows, None).try_this == "--label_key answer"
    assert missing_labels([{"question": "2 + 3"}], None) is None
    assert "1 of the first 2 rows have an empty label in the field 'answer'" in missing_labels(rows, "answer").problem
    assert missing_labels(rows[:1], "answer") is None
    assert missing_labels([{"answer": 0}], "answer") is None  # zero is a label


def test_text_that_is_already_a_formatted_chat_is_reported():
    text = ["<|im_start|>user\nhi<|im_end|>"]
    assert formatted_twice(text, PLAIN).try_this == "--input_template ''"
    assert "without --apply_chat_template" in formatted_twice(text, CHAT).try_this
    assert formatted_twice(text, TemplateFlags(input_template=None)) is None
    assert formatted_twice(["hi"], PLAIN) is None


def test_message_lists_stored_as_text_are_reported():
    assert messages_as_text(['[{"role": "user", "content": "hi"}]'])
    assert messages_as_text(["[1, 2]", "[{x}]"]) is None
