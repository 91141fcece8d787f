import numpy as np
import pytest
from transformers import PreTrainedTokenizer

from openrlhf.data.tokens import Marked, check_tokenizer, encode
from openrlhf.errors import ConfigError
from tests.data.chat_words import merging_tokenizer, spoken, word_tokenizer


class Slow(PreTrainedTokenizer):
    """The smallest tokenizer that is not fast."""

    vocab_size = 0

    def get_vocab(self):
        return {}

    def _tokenize(self, text, **kwargs):
        return list(text)


def test_ids_and_mask_of_a_prompt_of_two_and_a_response_of_three(tokenizer):
    row = encode(Marked("one two", ((4, 7),)), tokenizer, 10).row
    assert row.input_ids.tolist() == [7, 3, 8, 0]
    assert row.target_mask.tolist() == [False, False, True, True]
    assert row.input_ids.dtype == np.int32


def test_upstream_mask_of_prompt_two_in_five_tokens_moved_to_the_token(tokenizer):
    # aligned to the predicting position it is [0, 1, 1, 1, 0]; ours stands one place later, on the token itself
    row = encode(Marked("one two three", ((4, 13),)), tokenizer, 10).row
    assert row.input_ids.tolist() == [7, 3, 8, 3, 9, 0]
    assert row.target_mask.tolist() == [False, False, True, True, True, True]


def test_upstream_mask_of_two_turns(tokenizer):
    # ranges (2,2) and (4,4) at the predicting position are [0, 1, 0, 1, 0]
    row = encode(Marked("one two three", ((4, 7), (8, 13))), tokenizer, 5).row
    assert row.target_mask.tolist() == [False, False, True, False, True]


def test_a_token_that_straddles_the_boundary_belongs_to_the_response():
    row = encode(Marked("cabc", ((2, 4),)), merging_tokenizer(), 10).row
    assert row.input_ids.tolist() == [4, 7, 4, 0]  # c, ab, c, EOS
    assert row.target_mask.tolist() == [False, True, True, True]


def test_trailing_newlines_go_and_eos_is_appended_as_an_id(tokenizer):
    assert spoken(encode(Marked("one two\n\n", ((4, 9),)), tokenizer, 10).row) == ("one two<eos>", "two<eos>")


def test_eos_that_is_there_is_not_doubled(tokenizer):
    assert spoken(encode(Marked("one two <eos>\n", ((4, 14),)), tokenizer, 10).row) == ("one two <eos>", "two <eos>")


def test_eos_behind_text_that_is_not_learned_is_not_learned(tokenizer):
    assert spoken(encode(Marked("one two three", ((4, 7),)), tokenizer, 10).row) == ("one two three<eos>", "two")


def test_a_cut_row_ends_in_eos(tokenizer):
    encoded = encode(Marked("one two three four", ((4, 18),)), tokenizer, 4)
    assert encoded.row.input_ids.tolist() == [7, 3, 8, 0]
    assert encoded.row.target_mask.tolist() == [False, False, True, True]
    assert encoded.prompt_length == 2


def test_a_row_of_exactly_the_limit_is_whole(tokenizer):
    assert spoken(encode(Marked("one two", ((4, 7),)), tokenizer, 4).row)[0] == "one two<eos>"


def test_the_prompt_is_measured_before_the_cut(tokenizer):
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


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"^Slow is a slow tokenizer: expected a fast one"):
        check_tokenizer(Slow(eos_token="<eos>"))


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no EOS token"):
        check_tokenizer(tokenizer)
