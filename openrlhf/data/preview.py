"""Preview of a dataset: its first rows as the model sees them, the lengths of all rows, and likely mistakes.

`preview_data` turns the rows of a command (`Loaded`) into a `Preview`, which `preview_text` prints for `openrlhf
preview`. A training run shows only its first row, with `describe_row`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import TemplateFlags
from openrlhf.data.answers import Answer
from openrlhf.data.collate import Row
from openrlhf.data.report import DataReport, Finding
from openrlhf.data.rows import NUMBER, LabelText, Loaded
from openrlhf.types import LabelledRow, PairRow, Prompt, StepRow, TokenRow

MANY_DUPLICATES = 0.05  # minimum fraction of repeated rows to report
NUM_BINS = 10  # maximum bars of a histogram
NICE_WIDTHS = (1, 2, 5)  # widths of bars, times a power of ten

AnyRow = Row | Prompt | Answer
# Why tokens are marked: trained on, part of a response that is compared, or the end of a step with a label.
Marks = Literal["learned", "response", "labelled"]
MARKS: Mapping[type, Marks] = {TokenRow: "learned", LabelledRow: "learned", PairRow: "response", StepRow: "labelled"}


@dataclass(frozen=True)
class Segment:
    """A piece of a row's text, marked if the loss depends on it; the end of a step has its label."""

    text: str
    marked: bool
    label: str | None = None


@dataclass(frozen=True)
class ShownSequence:
    """One sequence of tokens of a row as text, in segments."""

    name: str  # "row", "prompt" or, for a pair, "chosen" and "rejected"
    tokens: int
    marked: int  # tokens in marked segments
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it, and its label, if it has one."""

    sequences: tuple[ShownSequence, ...]
    marks: Marks | None  # None if the command only reads the row
    label: str | None = None


@dataclass(frozen=True)
class Bin:
    """One bar of a histogram: the rows with `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True)
class Preview:
    """Everything that `openrlhf preview` shows about the dataset of one flag."""

    flag: str
    report: DataReport
    rows: tuple[ShownRow, ...]
    tokens: int  # in all rows that are used, after truncation
    marks: Marks | None
    marked: int  # tokens in marked segments
    histogram: tuple[Bin, ...]
    findings: tuple[Finding, ...]


def preview_data(
    flag: str,
    loaded: Loaded[AnyRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_rows: int,
    template: TemplateFlags | None = None,
) -> Preview:
    """Analyse the rows that a flag loads and show the first `num_rows`."""
    sequences = [part for row in loaded.rows for part in sequences_of(row)]
    masks = [part.target_mask for part in sequences if part.target_mask is not None]
    extra = (duplicates(loaded.rows), unused_chat_template(template, tokenizer))
    return Preview(
        flag=flag,
        report=loaded.report,
        rows=tuple(show_row(row, tokenizer, loaded.label_text) for row in loaded.rows[:num_rows]),
        tokens=sum(len(part.input_ids) for part in sequences),
        marks=MARKS.get(type(loaded.rows[0])),
        marked=int(sum(mask.sum() for mask in masks)),
        histogram=histogram(loaded.report.lengths),
        findings=(*loaded.report.all_findings(), *(finding for finding in extra if finding)),
    )


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of a row, or of one side of a pair, and its targets; None if the command trains on none of them."""

    name: str
    input_ids: NDArray[np.int32]  # [tokens]
    target_mask: NDArray[np.bool_] | None  # [tokens]


def sequences_of(row: AnyRow) -> tuple[TokenSequence, ...]:
    """Return the sequences of tokens of any kind of row."""
    match row:
        case PairRow(chosen=chosen, rejected=rejected):
            sides = (("chosen", chosen), ("rejected", rejected))
            return tuple(TokenSequence(name, side.input_ids, side.target_mask) for name, side in sides)
        case LabelledRow(tokens=tokens):
            return (TokenSequence("row", tokens.input_ids, tokens.target_mask),)
        case StepRow(input_ids=ids, step_places=places):
            return (TokenSequence("row", ids, np.isin(np.arange(len(ids)), places)),)
        case TokenRow(input_ids=ids, target_mask=mask):
            return (TokenSequence("row", ids, mask),)
        case Prompt(input_ids=ids):
            return (TokenSequence("prompt", np.asarray(ids, dtype=np.int32), None),)
        case Answer(input_ids=ids):
            return (TokenSequence("row", ids, None),)


def show_row(row: AnyRow, tokenizer: PreTrainedTokenizerBase, label_text: LabelText = NUMBER) -> ShownRow:
    """Decode a row, with special tokens, into segments that are marked or not."""
    label = None
    match row:
        case LabelledRow(label=desirable):
            label = "desirable" if desirable else "undesirable"
        case Prompt(label=given) if given not in (None, ""):
            label = f"label {given!r}"
        case PairRow(margin=margin) if margin:
            label = f"margin {margin:g}"
    shown: list[ShownSequence] = []
    for part in sequences_of(row):
        mask = part.target_mask if part.target_mask is not None else np.zeros(len(part.input_ids), dtype=np.bool_)
        if isinstance(row, StepRow):
            segments = step_segments(row, tokenizer, label_text)
        else:
            segments = marked_segments(part.input_ids, mask, tokenizer)
        shown.append(ShownSequence(part.name, len(part.input_ids), int(mask.sum()), segments))
    return ShownRow(tuple(shown), MARKS.get(type(row)), label)


def marked_segments(
    ids: NDArray[np.int32], mask: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> tuple[Segment, ...]:
    """Return one segment for each run of equal mask values."""
    ends = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    texts = split_text(ids, ends, tokenizer)
    return tuple(Segment(text, bool(mask[end - 1])) for text, end in zip(texts, ends, strict=True))


def step_segments(row: StepRow, tokenizer: PreTrainedTokenizerBase, label_text: LabelText) -> tuple[Segment, ...]:
    """Return one segment for each step, and one for its placeholder, which has the label."""
    labels = dict(zip((row.step_places + 1).tolist(), row.step_labels.tolist(), strict=True))  # end of step -> label
    ends = sorted({*labels, *row.step_places.tolist(), len(row.input_ids)} - {0})
    texts = split_text(row.input_ids, ends, tokenizer)
    return tuple(
        Segment(text, end in labels, label_text(labels[end]) if end in labels else None)
        for text, end in zip(texts, ends, strict=True)
    )


def split_text(ids: NDArray[np.int32], ends: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode tokens to pieces of text that end before the positions `ends`.

    A tokenizer may join tokens with spaces or merge their bytes into one character, so each
    piece is the text that decoding up to its end adds to the pieces before it.
    """
    pieces: list[str] = []
    before, start = "", 0
    for end in ends:
        through = decode(ids[:end], tokenizer)
        adds = through.startswith(before)
        pieces.append(through[len(before) :] if adds else decode(ids[start:end], tokenizer))
        before, start = through, end
    return pieces


def decode(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([int(token) for token in ids], clean_up_tokenization_spaces=False))


def histogram(lengths: Sequence[int]) -> tuple[Bin, ...]:
    """Count rows by length, in bars of a round width that start at its multiples."""
    if not lengths:
        return ()
    low, high = min(lengths), max(lengths)
    widths = (width * 10**power for power in range(12) for width in NICE_WIDTHS)
    width = next(width for width in widths if high // width - low // width < NUM_BINS)
    first = low // width
    counts = np.bincount([length // width - first for length in lengths])
    return tuple(
        Bin((first + number) * width, (first + number + 1) * width - 1, int(rows)) for number, rows in enumerate(counts)
    )


def duplicates(rows: Sequence[AnyRow]) -> Finding | None:
    """Find rows that occur more than once, if there are many."""
    distinct = {tuple(part.input_ids.tobytes() for part in sequences_of(row)) for row in rows}
    repeated = len(rows) - len(distinct)
    if repeated < 2 or repeated < MANY_DUPLICATES * len(rows):
        return None
    return Finding(f"{repeated} of {len(rows)} rows repeat an earlier row", "remove the duplicates")


def unused_chat_template(template: TemplateFlags | None, tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """Find a tokenizer whose chat template is not used: an instruction-tuned model would see an unfamiliar format."""
    if template is None or template.apply_chat_template or not tokenizer.chat_template:
        return None
    return Finding(
        "the tokenizer has a chat template, which is not used",
        "--apply_chat_template, if the model was trained with it",
    )
