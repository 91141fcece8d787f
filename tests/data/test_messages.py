"""Messages, tool calls and tools in the formats that datasets use."""

import pytest

from openrlhf.config.sections.data import TemplateFlags
from openrlhf.data.messages import read_messages, read_text, read_tools
from openrlhf.data.templates import open_chat
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import TOOLS, assistant, user, word_tokenizer

CALL = '{"name": "two", "arguments": {"x": 1}}'
SHAREGPT = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "one"},
    {"from": "function_call", "value": CALL},
    {"from": "observation", "value": "three"},
    {"from": "gpt", "value": "four"},
]


def read(records, value, **more):
    (record,) = records({"input": value})
    return read_messages(record, "input", "--input_key", **more)


def test_text_becomes_a_message_of_the_given_role(records):
    assert read(records, "one", speaker="user") == [user("one")]
    assert read(records, None, speaker="assistant") == [assistant("")]


def test_texts_of_several_fields_are_joined(records):
    rows = ({"a": "one", "b": "two"}, {"a": "one", "b": ""}, {"a": "one", "b": None}, {"a": "one"})
    assert [read_text(record, "a,b", "--input_key") for record in records(*rows)] == ["one\ntwo", *["one"] * 3]
    (record,) = records({"a": "one", "b": "two"})
    assert read_messages(record, "a, b", "--prompt_key", speaker="user") == [user("one\ntwo")]
    with pytest.raises(DataError, match="no field 'c'"):
        read_text(record, "c,b", "--input_key")
    with pytest.raises(ConfigError, match="--input_key ',' names no field"):
        read_text(record, ",", "--input_key")
    (odd,) = records({"a,b": "three"})  # a field with a comma in its name
    assert read_text(odd, "a,b", "--input_key") == "three"


def test_a_single_message_needs_no_list(records):
    assert read(records, {"from": "gpt", "value": "two"}, speaker="assistant") == [assistant("two")]


def test_messages_keep_their_keys_except_nulls(records):
    got = read(records, [{"role": "user", "content": "one", "name": None}, assistant("two", reasoning="three")])
    assert got == [user("one"), assistant("two", reasoning="three")]


def test_text_parts_are_joined(records):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read(records, [{"role": "user", "content": parts}]) == [user("one two")]


def test_sharegpt_roles_and_calls_are_converted(records):
    got = read(records, SHAREGPT)
    assert [message["role"] for message in got] == ["system", "user", "assistant", "tool", "assistant"]
    assert got[2]["tool_calls"] == [{"type": "function", "function": {"name": "two", "arguments": {"x": 1}}}]
    assert got[2]["content"] == ""


def test_a_call_that_is_not_json_stays_text(records):
    assert read(records, [{"from": "function_call", "value": "two(1)"}]) == [assistant("two(1)")]
    assert read(records, [{"from": "function_call", "value": "[1]"}]) == [assistant("[1]")]


def test_calls_are_passed_as_structure_or_text_as_the_template_supports(records):
    (record,) = records({"input": SHAREGPT, "tools": '[{"name": "five"}]'})
    for template, call in ((TOOLS, "call two "), (None, CALL)):
        chat = open_chat(word_tokenizer(), TemplateFlags(apply_chat_template=True, tokenizer_chat_template=template))
        text = chat.render(chat.conversation(record, read_messages(record, "input", "--input_key"))).text
        assert f"<assistant> {call} <eos>\n<tool> three <eos>\n<assistant> four <eos>" in text
        assert text.startswith("<tool> five \n<system>" if template else "<system> be kind")


def test_calls_in_messages_are_never_lost(records):
    calls = [{"type": "function", "function": {"name": "two", "arguments": {}}}]
    (record,) = records({"input": [user("one"), {"role": "assistant", "content": None, "tool_calls": calls}]})
    for template, call in ((TOOLS, "call two "), (None, '{"name": "two", "arguments": {}}')):
        chat = open_chat(word_tokenizer(), TemplateFlags(apply_chat_template=True, tokenizer_chat_template=template))
        text = chat.render(chat.conversation(record, read_messages(record, "input", "--input_key"))).text
        assert text.endswith(f"<assistant> {call} <eos>\n")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (3, "expected a message list, got the number 3"),
        ("one", "expected a message list, got the text 'one'"),
        (["one"], "expected a message with role and content, got the text 'one'"),
        (
            [{"content": "one"}],
            "expected a message with role and content (or from and value), got an object with cont",
        ),
        ([{"role": "user", "content": 4}], "expected text as a message's content, got the number 4"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "expected text in every part of a message's content, got an object with type",
        ),
        ([{"from": "bird", "value": "one"}], "unknown role 'bird': expected one of human, user, gpt"),
        ([{"from": ["bird"], "value": "one"}], "unknown role ['bird']: expected one of human, user, gpt"),
        ([{"role": "assistant", "tool_calls": [1]}], "expected a list of objects as tool_calls, got a list of 1"),
        ([{"from": "human", "value": 4}], "expected text as a message's content, got the number 4"),
    ],
)
def test_the_error_for_an_invalid_conversation_names_row_and_field(records, value, complaint):
    with pytest.raises(DataError) as caught:
        read(records, value)
    assert str(caught.value).startswith(f"data.jsonl, row 1, field 'input': {complaint}")


@pytest.mark.parametrize("tools", [[{"name": "two"}], '[{"name": "two"}]', ['{"name": "two"}']])
def test_tools_may_be_a_list_or_json(records, tools):
    (record,) = records({"tools": tools})
    assert read_tools(record) == [{"name": "two"}]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_rows_without_tools_give_none(records, tools):
    without, record = records({}, {"tools": tools})
    assert read_tools(without) is None
    assert read_tools(record) is None


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ("two", "expected JSON, got the text 'two'"),
        (7, "expected a list of tool descriptions, got the number 7"),
        ([7], "expected a list of tool descriptions, got the number 7"),
    ],
)
def test_invalid_tools_are_an_error(records, tools, complaint):
    (record,) = records({"tools": tools})
    with pytest.raises(DataError) as caught:
        read_tools(record)
    assert str(caught.value).startswith(f"data.jsonl, row 1, field 'tools': {complaint}")
