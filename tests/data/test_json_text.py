"""JSON that other code would fail on is rejected with one kind of error."""

import json
import math

import pytest

from openrlhf.data.json_text import MAX_DEPTH, InvalidJSON, parse_json

INVALID = {
    "{": "Expecting property name enclosed in double quotes at line 1 column 2",
    "": "Expecting value at line 1 column 1",
    b"\xff": "'utf-8' codec can't decode byte 0xff",
    b'"\xed\xa0\x80"': "'utf-8' codec can't decode byte 0xed",  # half a pair in bytes, which json.loads accepts
    '"\ud800"': "'utf-8' codec can't encode character",
    r'"\ud800"': "a string contains half of a surrogate pair",
    r'{"\uDFFF": 1}': "a string contains half of a surrogate pair",
    "1" * 5000: "a number has thousands of digits",
    "[" * 100_000: "lists and objects nest deeper than 100 levels",
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1): "lists and objects nest deeper than 100 levels",
}


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[:20]))
def test_invalid_json_raises_a_single_kind_of_error(text):
    with pytest.raises(InvalidJSON) as caught:
        parse_json(text)
    assert INVALID[text] in str(caught.value)


@pytest.mark.parametrize("text", ["[NaN]", '{"a": -Infinity}', "1e999"])
def test_numbers_are_finite_on_request(text):
    parse_json(text)
    with pytest.raises(InvalidJSON, match="expected finite numbers"):
        parse_json(text, finite=True)


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        json.dumps([{"a": [1.5, None]}] * 500),
        r'"\ud83d\ude00 \\ud800"',  # a whole pair, and a backslash before letters
        '"é"',
        b'\xef\xbb\xbf{"n": 1}',
        '"é"'.encode("utf-16"),
        "1" * 4300,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_valid_json_is_read_like_the_standard_library_does(text):
    assert parse_json(text) == parse_json(text, finite=True) == json.loads(text)
    assert math.isnan(parse_json("NaN"))
