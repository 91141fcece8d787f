"""Tokens and target masks of a marked text, truncation and EOS."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizer

from openrlhf.data.tokens import Marked, check_tokenizer, encode
from openrlhf.errors import ConfigError
from tests.data.chat_words import decode_row, merging_tokenizer, word_tokenizer


class Slow(PreTrainedTokenizer):
    """The smallest tokenizer that is not fast."""

    vocab_size = 0

    def get_vocab(self):
        return {}

    def _tokenize(self, text, **kwargs):
        return list(text)


def test_ids_and_mask_match_hand_computation(tokenizer):
    row = encode(Marked("one two", ((4, 7),)), tokenizer, 10).row
    assert row.input_ids.tolist() == [7, 3, 8, 0]
    assert row.target_mask.tolist() == [False, False, True, True]
    assert row.input_ids.dtype == np.int32


def test_mask_equals_upstreams_mask_shifted_by_one(tokenizer):
    # upstream aligns the mask to the predicting position, [0, 1, 1, 1, 0]; ours is one later, on the token itself
    row = encode(Marked("one two three", ((4, 13),)), tokenizer, 10).row
    assert row.input_ids.tolist() == [7, 3, 8, 3, 9, 0]
    assert row.target_mask.tolist() == [False, False, True, True, True, True]


def test_mask_of_two_turns_equals_upstreams(tokenizer):
    # upstream's mask at the predicting position is [0, 1, 0, 1, 1, 0]
    row = encode(Marked("one two three", ((4, 7), (8, 13))), tokenizer, 6).row
    assert row.target_mask.tolist() == [False, False, True, False, True, True]


def test_a_token_that_straddles_the_boundary_belongs_to_the_response():
    row = encode(Marked("cabc", ((2, 4),)), merging_tokenizer(), 10).row
    assert row.input_ids.tolist() == [4, 7, 4, 0]  # c, ab, c, EOS
    assert row.target_mask.tolist() == [False, True, True, True]


def test_a_first_token_that_begins_in_the_prompt_is_noticed():
    tokenizer = merging_tokenizer()
    assert encode(Marked("cab", ((2, 3),)), tokenizer, 10).joins_prompt
    for text, spans in (("cab", ((1, 3),)), ("cab", ((0, 3),)), ("cab", ()), ("acab", ((1, 2), (3, 4)))):
        assert not encode(Marked(text, spans), tokenizer, 10).joins_prompt


def test_trailing_newlines_are_removed_and_eos_is_appended_as_an_id(tokenizer):
    assert decode_row(encode(Marked("one two\n\n", ((4, 9),)), tokenizer, 10).row) == ("one two<eos>", "two<eos>")


def test_existing_eos_is_not_doubled(tokenizer):
    row = encode(Marked("one two <eos>\n", ((4, 14),)), tokenizer, 10).row
    assert decode_row(row) == ("one two <eos>", "two <eos>")


def test_eos_after_unlearned_text_is_not_learned(tokenizer):
    assert decode_row(encode(Marked("one two three", ((4, 7),)), tokenizer, 10).row) == ("one two three<eos>", "two")


def test_a_truncated_row_ends_in_an_eos_that_is_not_learned(tokenizer):
    encoded = encode(Marked("one two three four", ((4, 18),)), tokenizer, 4)
    assert encoded.row.input_ids.tolist() == [7, 3, 8, 0]
    assert encoded.row.target_mask.tolist() == [False, False, True, False]
    assert (encoded.length, encoded.learns_eos) == (8, True)
    assert encoded.prompt_length == 2


def test_a_row_of_exactly_the_limit_is_not_truncated(tokenizer):
    assert decode_row(encode(Marked("one two", ((4, 7),)), tokenizer, 4).row)[0] == "one two<eos>"


def test_the_prompt_is_measured_before_truncation(tokenizer):
    encoded = encode(Marked("one two three four", ((14, 18),)), tokenizer, 3)
    assert encoded.prompt_length == 6
    assert not encoded.row.target_mask.any()


def test_without_a_prompt_everything_but_the_first_token_is_learned(tokenizer):
    encoded = encode(Marked("one two", ((0, 7),)), tokenizer, 10)
    assert encoded.prompt_length == 0
    assert encoded.row.target_mask.tolist() == [False, True, True, True]


def test_no_special_token_is_added(tokenizer):
    tokenizer.add_bos_token = True
    assert encode(Marked("one", ((0, 3),)), tokenizer, 10).row.input_ids.tolist() == [7, 0]


def test_an_empty_text_is_a_single_eos(tokenizer):
    assert encode(Marked("", ()), tokenizer, 10).row.input_ids.tolist() == [0]


def test_a_slow_tokenizer_is_rejected():
    with pytest.raises(ConfigError, match=r"^Slow is a slow tokenizer: expected a fast one"):
        check_tokenizer(Slow(eos_token="<eos>"))


def test_a_tokenizer_without_eos_is_rejected():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no EOS token"):
        check_tokenizer(tokenizer)
