"""Rows for SFT: plain text, chats, every turn or the last one, pretraining."""

import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from openrlhf.config.sections.data import ConversationFlags, TemplateFlags
from openrlhf.data.rows import announce
from openrlhf.data.sft import sft_rows
from openrlhf.errors import ConfigError, DataError
from tests.data.chat_words import (
    MARKING,
    OPENING,
    REWRITING,
    STABLE,
    assistant,
    decode_row,
    merging_tokenizer,
    user,
    word_tokenizer,
)

PLAIN = TemplateFlags(input_template="User: {}\nAssistant: ")
CHAT = TemplateFlags(apply_chat_template=True)
TURNS = [user("one"), assistant("two", reasoning="five"), user("three"), assistant("four", reasoning="six")]


def read(records, *, template=PLAIN, tokenizer=None, max_len=100, **fields):
    fields = ConversationFlags(**fields)
    return announce(sft_rows(records, tokenizer or word_tokenizer(), fields, template, max_len)).rows


def test_plain_rows_match_hand_computation(records):
    (row,) = read(records({"input": "one", "output": "two\n"}), output_key="output")
    assert row.input_ids.tolist() == [5, 3, 7, 4, 6, 3, 8, 0]  # User:, blank, one, newline, Assistant:, blank, two, EOS
    assert row.target_mask.tolist() == [False] * 6 + [True] * 2


def test_plain_rows_are_tokenised_in_one_call(records):
    template = TemplateFlags(input_template=None)
    (row,) = read(
        records({"input": "ca", "output": "bc"}), output_key="output", template=template, tokenizer=merging_tokenizer()
    )
    assert row.input_ids.tolist() == [4, 7, 4, 0]
    assert row.target_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("template", "answers", "found"),
    [("{}: ", "bbc", True), ("{}:", "bbc", False), ("{}: ", "bcc", False), ("{}:b", "bbb", False)],
    ids=["joined", "no space", "few", "no space at the end"],
)
def test_a_template_whose_space_becomes_part_of_the_response_is_reported(template, answers, found, records):
    letters = ["<eos>", "<pad>", "a", "b", "c", ":", " ", " b"]
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [(" ", "b")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="<eos>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    rows = records(*({"input": "a", "output": answer} for answer in answers))
    fields, flags = ConversationFlags(output_key="output"), TemplateFlags(input_template=template)
    reported = [str(one) for one in sft_rows(rows, tokenizer, fields, flags, 64).report.findings]
    joined = [line for line in reported if "ends in a space" in line]
    assert bool(joined) == found
    if found:
        assert "joins with the first word of the response in 2 of 3 rows" in joined[0]
        assert joined[0].endswith("Try: --input_template $'{}:', here and in every later command")


def test_plain_rows_need_an_output_key(records):
    with pytest.raises(ConfigError, match=r"the response needs its own field. Try: --output_key output"):
        read(records({"input": "one"}))
    with pytest.raises(ConfigError, match=r"Try: --output_key answer or 'final answer', or --apply_chat_template"):
        read(records({"input": "one", "answer": "two", "final answer": "two"}))
    with pytest.raises(ConfigError, match=r"the response needs its own field. Try: --apply_chat_template$"):
        read(records({"input": [{"role": "user", "content": "one"}], "source": "here"}))


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"input": "one", "output": "two"}, {"output_key": "output"}),
        ({"input": [user("one")], "output": [assistant("two")]}, {"output_key": "output"}),
        ({"input": [user("one")], "output": "two"}, {"output_key": "output"}),
        ({"input": [user("one"), assistant("two")]}, {}),
        ({"chat": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, {"input_key": "chat"}),
    ],
)
@pytest.mark.parametrize("chat_template", [STABLE, MARKING, REWRITING])
def test_chat_rows_may_have_any_supported_shape(records, row, fields, chat_template):
    (got,) = read(records(row), template=CHAT, tokenizer=word_tokenizer(chat_template), **fields)
    assert decode_row(got) == ("<user> one <eos>\n<assistant> two <eos>", "two <eos>")


def test_chat_learns_the_last_message_only(records):
    (row,) = read(records({"input": TURNS}), template=CHAT)
    assert decode_row(row)[1] == "four <eos>"


def test_multiturn_learns_every_assistant_turn(records):
    (row,) = read(records({"input": TURNS}), template=CHAT, multiturn=True)
    text, learned = decode_row(row)
    assert text == "<user> one <eos>\n<assistant> two <eos>\n<user> three <eos>\n<assistant> four <eos>"
    assert learned == "two <eos>four <eos>"


def test_multiturn_with_an_output_appends_it(records):
    (row,) = read(records({"input": TURNS[:3], "output": "six"}), template=CHAT, multiturn=True, output_key="output")
    assert decode_row(row)[1] == "two <eos>six <eos>"


def test_unanswered_messages_at_the_end_are_dropped(records):
    (row,) = read(records({"input": [*TURNS[:2], user("six")]}), template=CHAT, multiturn=True)
    assert decode_row(row) == ("<user> one <eos>\n<assistant> two <eos>", "two <eos>")


def test_rewritten_history_splits_a_conversation_into_its_turns(records, capsys):
    data = records({"input": TURNS}, {"input": TURNS[:2]})
    rows = read(data, template=CHAT, tokenizer=word_tokenizer(REWRITING), multiturn=True)
    assert [decode_row(row) for row in rows] == [
        ("<user> one <eos>\n<assistant> <think> five two <eos>", "<think> five two <eos>"),
        (
            "<user> one <eos>\n<assistant> two <eos>\n<user> three <eos>\n<assistant> <think> six four <eos>",
            "<think> six four <eos>",
        ),
        ("<user> one <eos>\n<assistant> <think> five two <eos>", "<think> five two <eos>"),
    ]
    stderr = capsys.readouterr().err
    assert stderr.count("the chat template rewrites earlier turns: split 1 conversation into one sample per") == 1


def test_turns_that_do_not_fit_are_dropped_and_counted(records, capsys):
    data = records({"input": TURNS})
    (row,) = read(data, template=CHAT, tokenizer=word_tokenizer(REWRITING), multiturn=True, max_len=16)
    assert decode_row(row)[1] == "<think> five two <eos>"
    assert "dropped 1 turn with a prompt of 14 tokens or more (--max_len 16)" in capsys.readouterr().err


def test_the_error_for_an_unusable_template_names_the_row(records):
    for multiturn in (False, True):
        with pytest.raises(DataError, match=r"^data.jsonl, row 1: the chat template starts a response"):
            read(records({"input": TURNS}), template=CHAT, tokenizer=word_tokenizer(OPENING), multiturn=multiturn)


def test_multiturn_keeps_the_turns_that_fit_and_truncates_the_rest(records):
    (row,) = read(records({"input": TURNS}), template=CHAT, multiturn=True, max_len=15)
    assert len(row.input_ids) == 15
    assert decode_row(row)[1] == "two <eos>"


def test_pretraining_learns_all_but_the_first_token_and_adds_no_eos(records):
    (row,) = read(records({"input": "one two\n"}), pretrain_mode=True)
    assert row.input_ids.tolist() == [7, 3, 8, 4]
    assert row.target_mask.tolist() == [False, True, True, True]


def test_pretraining_truncates_without_eos_and_drops_rows_without_targets(records, capsys):
    (row,) = read(records({"input": "one two three"}, {"input": ""}, {"input": "one"}), pretrain_mode=True, max_len=3)
    assert row.input_ids.tolist() == [7, 3, 8]
    assert "dropped 2 of 3 rows: 2 with fewer than two tokens" in capsys.readouterr().err


def test_dropped_rows_are_counted_by_reason(records, capsys):
    data = records(
        {"input": "one ", "output": "two"},
        {"input": "one two three ", "output": "two"},
        {"input": "one two three four ", "output": "two"},
        {"input": "one", "output": " "},
        {"input": None, "output": "two"},
    )
    (row,) = read(data, output_key="output", template=TemplateFlags(input_template=None), max_len=7)
    assert decode_row(row) == ("one two<eos>", "two<eos>")
    assert capsys.readouterr().err.strip() == (
        "openrlhf: data.jsonl: dropped 4 of 5 rows: 2 with a prompt of 5 tokens or more (--max_len 7),"
        " 1 with an empty response, 1 with an empty prompt. Try: --max_len 10, which keeps all of them whole"
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([user("one")], "whose last message is not the assistant's"),
        ([user("one"), assistant(" ")], "with an empty response"),
        ([assistant("one")], "with an empty prompt"),
        ([user(""), assistant("one")], "with an empty prompt"),
        (None, "with an empty prompt"),
    ],
)
def test_dropping_every_row_is_an_error_with_the_reasons(records, value, reason):
    with pytest.raises(DataError, match=f"^data.jsonl: 0 of 1 rows can be used: 1 {reason}$"):
        read(records({"input": value}), template=CHAT)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([user("one")], "without an assistant turn"),
        ([user("one"), assistant("")], "with an empty response"),
        (
            [user("one " * 20), assistant("two")],
            r"with a prompt of 8 tokens or more \(--max_len 10\). Try: --max_len 50, which keeps all of them whole",
        ),
    ],
)
def test_multiturn_names_the_reasons_for_dropped_rows(records, value, reason):
    with pytest.raises(DataError, match=f"^data.jsonl: 0 of 1 rows can be used: 1 {reason}$"):
        read(records({"input": value}), template=CHAT, multiturn=True, max_len=10)


def test_a_tool_call_without_text_is_a_response(records):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "two"}}]}
    (row,) = read(records({"input": [user("one"), call]}), template=CHAT)
    assert (
        decode_row(row)[1] == "<unk> <unk> <eos>"
    )  # the template does not support calls, so the call is rendered as JSON


def test_multiturn_needs_the_chat_template(records):
    with pytest.raises(ConfigError, match=r"Try: --apply_chat_template$"):
        read(records({"input": TURNS}), multiturn=True)


def test_a_large_dataset_shows_a_progress_bar_on_the_main_process_only(records, capsys, monkeypatch):
    data = records(*[{"input": "one two"}] * 2000)
    assert len(read(data, pretrain_mode=True)) == 2000
    assert capsys.readouterr().err == ""  # not on a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    read(data, pretrain_mode=True)
    assert "reading" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    read(data, pretrain_mode=True)
    assert capsys.readouterr().err == ""
