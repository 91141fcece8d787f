"""How a reward model with another tokenizer finds the steps of a sample."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf.data.retokenization import Retokenizer
from openrlhf.types import Prompt
from tests.samples import make_trajectory
from tests.tiny import character_tokenizer, make_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), ("ab", "#"), ("#", "c")]


def byte_tokenizer():
    """Return a tokenizer of bytes and a few longer tokens: `ab`, `ab#` and `#c`."""
    vocabulary = {token: number for number, token in enumerate(["</s>", *BYTES, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def letter_tokenizer():
    """Return a tokenizer with one token per character, including `#`, and another EOS."""
    return character_tokenizer(["<end>", "?", *"#abcdxyz好é"], eos="<end>", pad="<end>")


POLICY, OWN = byte_tokenizer(), letter_tokenizer()
TEXTS = Retokenizer(POLICY, OWN, shared=False)


def sample(*tokens):
    ids = tuple(POLICY.convert_tokens_to_ids(list(tokens)))
    assert None not in ids
    return make_trajectory(Prompt(0, "", ids[:1]), ids, (False,) + (True,) * (len(ids) - 1))


def byte_tokens(text):
    """Return the bytes of a text as one token each, which the tokenizer itself would merge."""
    to_byte_token = {piece: piece for piece in BYTES}
    (pieces,) = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]]
    return [to_byte_token[piece] for piece in pieces]


def ends(item, mark="#"):
    row = TEXTS.ids(item)
    found = np.flatnonzero(row == OWN.convert_tokens_to_ids(mark))
    return TEXTS.places(item, row, found)


CASES = {
    "token by token": (["x", "#", "y", "#"], [1, 3]),
    "inside a longer token": (["x", "ab#", "y", "#c", "d"], [1, 3]),
    "as its tokenizer would not": (["x", "a", "b", "#", "y", "#", "c"], [3, 5]),
    "after characters of several tokens": (byte_tokens("x好é#好#é"), [6, 10]),
    "before EOS": (["x", "#", "</s>"], [1]),
    "nowhere": (["x", "y"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_ends_in_the_token_that_ends_its_marker(case):
    tokens, expected = CASES[case]
    assert ends(sample(*tokens)) == expected


def test_a_marker_of_several_tokens_ends_with_the_last():
    assert ends(sample(*byte_tokens("x好y好")), mark="好") == [3, 7]


def test_eos_maps_to_the_eos_of_the_other_vocabulary():
    item = sample("x", "y", "</s>")
    row = TEXTS.ids(item)
    assert row[-1] == OWN.eos_token_id
    assert TEXTS.places(item, row, [0, 2]) == [0, 2]


def test_a_shared_vocabulary_keeps_token_ids():
    tokenizer = make_tokenizer()
    item = sample("x", "#")
    assert Retokenizer(tokenizer, tokenizer, shared=True).ids(item).tolist() == list(item.input_ids)
    assert Retokenizer(tokenizer, tokenizer, shared=True).places(item, np.zeros(2, np.int32), [1]) == [1]
