"""The preview of a dataset: rows with the marked text, lengths, totals and findings; and its rendering."""

from itertools import pairwise

import numpy as np
import pytest

from openrlhf.config.sections.data import ConversationFlags, TemplateFlags
from openrlhf.data.preview import Bin, Segment, duplicates, histogram, marked_segments, preview_data, show_row
from openrlhf.data.preview_text import GREEN, RESET, abridge, describe_row, render
from openrlhf.data.sft import sft_rows
from openrlhf.types import LabelledRow, PairRow, Prompt, StepRow, TokenRow
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
PLAIN = TemplateFlags(input_template="{}=")


def token_row(prompt, response):
    ids = [*TOKENIZER(prompt + response)["input_ids"], TOKENIZER.eos_token_id]
    return TokenRow(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= len(prompt))


def preview(records, *rows, max_len=100, num_rows=2):
    fields = ConversationFlags(output_key="output")
    loaded = sft_rows(records(*rows), TOKENIZER, fields, PLAIN, max_len)
    return preview_data("dataset", loaded, TOKENIZER, num_rows=num_rows, template=PLAIN)


def test_each_kind_of_row_shows_what_the_loss_depends_on():
    row, other = token_row("a=", "b"), token_row("a=", "c")
    (shown,) = show_row(row, TOKENIZER).sequences
    assert shown.segments == (Segment("a=", marked=False), Segment("b</s>", marked=True))
    assert (shown.tokens, shown.marked) == (4, 2)
    assert show_row(LabelledRow(row, 2, label=True), TOKENIZER).label == "desirable"
    pair = show_row(PairRow(row, other, 0.5), TOKENIZER)
    assert [part.name for part in pair.sequences] == ["chosen", "rejected"]
    assert (pair.label, pair.marks) == ("margin 0.5", "response")
    prompt = show_row(Prompt(0, "ab", tuple(TOKENIZER("ab")["input_ids"]), label={"x": 1}), TOKENIZER)
    assert (prompt.label, prompt.marks) == ("label {'x': 1}", None)
    places, labels = np.array([1, 2], dtype=np.int32), np.array([0.0, 1.0], dtype=np.float32)
    steps = show_row(StepRow(row.input_ids, places, labels), TOKENIZER, lambda label: "+-"[int(label)])
    assert steps.sequences[0].segments == (
        Segment("a", marked=False),
        Segment("=", marked=True, label="+"),
        Segment("b", marked=True, label="-"),
        Segment("</s>", marked=False),
    )


def test_the_pieces_of_a_text_join_to_the_whole():
    ids = np.array(TOKENIZER("one two three")["input_ids"], dtype=np.int32)
    for seed in range(20):
        mask = np.random.default_rng(seed).random(len(ids)) < 0.5
        segments = marked_segments(ids, mask, TOKENIZER)
        assert "".join(segment.text for segment in segments) == "one two three"
        assert "".join(segment.text for segment in segments if segment.marked) == TOKENIZER.decode(ids[mask])


@pytest.mark.parametrize("lengths", [[5], [1, 1000], list(range(3, 47)), [7, 8, 9, 9], [0, 123456]])
def test_a_histogram_counts_every_row_once_in_adjoining_bars(lengths):
    bars = histogram(lengths)
    assert sum(bar.rows for bar in bars) == len(lengths)
    assert len(bars) <= 10
    assert bars[0].low <= min(lengths) <= bars[0].high
    assert bars[-1].low <= max(lengths) <= bars[-1].high
    assert all(left.high + 1 == right.low for left, right in pairwise(bars))


def test_a_histogram_has_round_bars():
    assert histogram([12, 13, 29, 41]) == tuple(
        Bin(low, low + 4, rows) for low, rows in zip(range(10, 45, 5), (2, 0, 0, 1, 0, 0, 1), strict=True)
    )


def test_totals_count_rows_and_tokens(records):
    rows = [{"input": "a", "output": "b"}, {"input": "a", "output": "bcdefgh"}, {"input": "a", "output": ""}]
    seen = preview(records, *rows, max_len=6)
    assert (seen.report.read, len(seen.report.lengths), seen.report.dropped.total()) == (3, 2, 1)
    assert (seen.report.truncated, seen.report.tokens_cut) == (1, 4)  # a=bcdefgh</s> has ten tokens
    assert (seen.tokens, seen.marked) == (4 + 6, 2 + 3)  # the EOS of the cut row is not learned


def test_many_duplicates_are_reported():
    rows = [token_row("a", letter) for letter in "bcde"]
    assert duplicates(rows) is None
    assert duplicates([*rows, rows[0]]) is None
    assert "2 of 6 rows repeat an earlier row" in duplicates([*rows, *rows[:2]]).problem


def test_the_text_marks_learned_text_with_brackets_or_colour(records):
    seen = preview(records, {"input": "a", "output": "b\nc"}, {"input": "a", "output": "d"})
    text = render(seen, (), longest=100, colour=False)
    assert "row 1\n  6 tokens, learned: 4\n    | a=[[b\n    | c</s>]]\n" in text
    assert f"\n  4  1  {'#' * 40}\n  5  0\n  6  1  {'#' * 40}\n" in text
    coloured = render(seen, (), longest=100, colour=True)
    assert f"    | a={GREEN}b{RESET}\n    | {GREEN}c</s>{RESET}\n" in coloured
    assert "the tokenizer has a chat template, which is not used\n     Try: --apply_chat_template" in text
    assert not any(line != line.rstrip() for line in text.split("\n"))


def test_control_characters_in_the_data_do_not_reach_the_terminal(records):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["\x1b"])
    loaded = sft_rows(
        records({"input": "a\x1b[2J", "output": "b"}), tokenizer, ConversationFlags(output_key="output"), PLAIN, 100
    )
    seen = preview_data("dataset", loaded, tokenizer, num_rows=1)
    assert "a\\x1b[2J=[[b</s>]]" in render(seen, (), longest=100, colour=False)
    assert "\x1b" not in describe_row(loaded.rows[0], tokenizer)


def test_long_text_is_shortened_in_the_middle():
    assert abridge("a" * 10, 10) == "a" * 10
    assert abridge("a" * 500 + "b" * 500, 20) == "aaaaaaaaaa [... 980 characters ...] bbbbbbbbbb"
