"""Rows of preference pairs, for reward models and DPO."""

import pytest

from openrlhf.config.sections.data import PairFlags, TemplateFlags
from openrlhf.data.preference import preference_rows
from openrlhf.data.rows import announce
from openrlhf.errors import DataError
from tests.data.chat_words import MARKING, STABLE, assistant, decode_row, user, word_tokenizer

CHAT = TemplateFlags(apply_chat_template=True)
PLAIN = TemplateFlags(input_template="User: {} Assistant: ")
PAIR = {"prompt": "one", "chosen": "two", "rejected": "three"}


def read(records, *, template=PLAIN, tokenizer=None, max_len=100, drop_long_prompts=True, prompt_key="prompt"):
    fields = PairFlags(prompt_key=prompt_key)
    tokenizer = tokenizer or word_tokenizer()
    pairs = preference_rows(records, tokenizer, fields, template, max_len, drop_long_prompts=drop_long_prompts)
    return announce(pairs).rows


def test_plain_pairs_match_hand_computation(records):
    (row,) = read(records(PAIR))
    assert row.chosen.input_ids.tolist() == [5, 3, 7, 3, 6, 3, 8, 0]
    assert row.rejected.input_ids.tolist() == [5, 3, 7, 3, 6, 3, 9, 0]
    assert row.chosen.target_mask.tolist() == row.rejected.target_mask.tolist() == [False] * 6 + [True] * 2
    assert row.margin == 0.0


def test_plain_pairs_without_a_prompt_are_whole_texts(records):
    (row,) = read(records({"chosen": "one two", "rejected": "one three"}), prompt_key=None)
    assert decode_row(row.chosen) == ("one two<eos>", " two<eos>")


@pytest.mark.parametrize("chat_template", [STABLE, MARKING])
@pytest.mark.parametrize(
    ("data", "prompt_key"),
    [
        ({"prompt": [user("one")], "chosen": [assistant("two")], "rejected": [assistant("three")]}, "prompt"),
        ({"prompt": "one", "chosen": "two", "rejected": "three"}, "prompt"),
        ({"chosen": [user("one"), assistant("two")], "rejected": [user("one"), assistant("three")]}, None),
    ],
)
def test_chat_pairs_with_and_without_a_prompt(records, data, prompt_key, chat_template):
    (row,) = read(records(data), template=CHAT, tokenizer=word_tokenizer(chat_template), prompt_key=prompt_key)
    assert decode_row(row.chosen) == ("<user> one <eos>\n<assistant> two <eos>", "two <eos>")
    assert decode_row(row.rejected) == ("<user> one <eos>\n<assistant> three <eos>", "three <eos>")


def test_without_a_prompt_only_the_last_turn_of_a_conversation_is_the_response(records):
    before = [user("one"), assistant("two"), user("three")]
    (row,) = read(
        records({"chosen": [*before, assistant("four")], "rejected": [*before, assistant("five")]}),
        template=CHAT,
        prompt_key=None,
    )
    assert (decode_row(row.chosen)[1], decode_row(row.rejected)[1]) == ("four <eos>", "five <eos>")


def test_in_a_continuation_of_several_messages_only_assistant_turns_are_learned(records):
    chosen = [assistant("two"), {"role": "tool", "content": "three"}, assistant("four")]
    (row,) = read(records({"prompt": "one", "chosen": chosen, "rejected": "five"}), template=CHAT)
    assert decode_row(row.chosen)[1] == "two <eos>four <eos>"


def test_the_system_prompt_is_part_of_the_prompt(records):
    (row,) = read(records(PAIR), template=TemplateFlags(apply_chat_template=True, system_prompt="be kind"))
    assert decode_row(row.chosen) == ("<system> be kind <eos>\n<user> one <eos>\n<assistant> two <eos>", "two <eos>")


def test_margins_are_read_from_rows(records):
    rows = read(records({**PAIR, "margin": 2}, {**PAIR, "margin": None}, PAIR))
    assert [row.margin for row in rows] == [2.0, 0.0, 0.0]


def test_dpo_drops_long_prompts_and_a_reward_model_truncates_them(records, capsys):
    data = records(PAIR, {**PAIR, "prompt": "one one one one"})
    assert len(read(data, max_len=14)) == 1
    assert "dropped 1 of 2 rows: 1 with a prompt of 12 tokens or more (--max_len 14)" in capsys.readouterr().err
    assert len(read(data, max_len=14, drop_long_prompts=False)) == 2
    assert capsys.readouterr().err == ""


def test_equal_pairs_are_dropped_and_counted(records, capsys):
    assert len(read(records(PAIR, {**PAIR, "rejected": "two"}))) == 1
    assert "dropped 1 of 2 rows: 1 with chosen equal to rejected" in capsys.readouterr().err


def test_pairs_that_differ_only_after_truncation_are_dropped(records, capsys):
    long = {"prompt": "one", "chosen": "two two two two four", "rejected": "two two two two five"}
    assert len(read(records(PAIR, long), max_len=12)) == 1
    assert "with chosen equal to rejected within --max_len 12" in capsys.readouterr().err


def test_a_dataset_of_equal_pairs_is_an_error(records):
    same = {**PAIR, "rejected": "two"}
    with pytest.raises(DataError, match=r"^data.jsonl: 0 of 2 rows can be used: 2 with chosen equal to rejected$"):
        read(records(same, same))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"prompt": "one", "chosen": 17, "rejected": "x"}, "row 1, field 'chosen': expected text, got the number 17"),
        (
            {"prompt": "one", "good": "two"},
            "row 1: no field 'chosen'; the row has 'prompt', 'good'. Try: --chosen_key prompt or good",
        ),
        (
            {"prompt": "one", "chosen": "two"},
            "row 1: no field 'rejected'; the row has 'prompt', 'chosen'. Try: --rejected_key",
        ),
        (
            {"chosen": "one", "rejected": "two"},
            "row 1: no field 'prompt'; the row has 'chosen', 'rejected'. Try: --prompt_key",
        ),
        ({**PAIR, "margin": 10**400}, "row 1, field 'margin': expected a number, got the number 1000"),
        ({**PAIR, "margin": "far"}, "row 1, field 'margin': expected a number, got the text 'far'"),
    ],
)
def test_errors_name_row_and_field(records, data, complaint):
    with pytest.raises(DataError) as caught:
        read(records(data))
    assert str(caught.value).startswith(f"data.jsonl, {complaint}")


@pytest.mark.parametrize(
    ("chosen", "prompt_key", "reason"),
    [
        ([assistant("two")], None, "with an empty prompt. Try: --prompt_key prompt"),
        ([assistant("two"), user("one")], None, "whose last message is not the assistant's"),
        ([], "prompt", "whose last message is not the assistant's"),
    ],
)
def test_conversations_that_form_no_pair_are_dropped(records, chosen, prompt_key, reason):
    with pytest.raises(DataError, match=f"0 of 1 rows can be used: 1 {reason}$"):
        read(records({"prompt": "one", "chosen": chosen, "rejected": chosen}), template=CHAT, prompt_key=prompt_key)
