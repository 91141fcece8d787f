"""Rows for process reward models: texts whose steps end in a placeholder token, with one label per step.

A label is the probability of the first reward token (soft) or a token (hard); a dataset must not mix the two.
`data.supervised` calls `step_rows`, and the objective gets the ids of the reward tokens from `step_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import StepFlags
from openrlhf.data.findings import check_texts
from openrlhf.data.records import Record, Records
from openrlhf.data.report import Budget, DataReport
from openrlhf.data.row_cache import load_rows
from openrlhf.data.rows import Dropped, Loaded, TooLong
from openrlhf.data.tokens import check_fast, tokenize
from openrlhf.errors import ConfigError
from openrlhf.types import StepRow


@dataclass(frozen=True)
class StepTokens:
    """The token ids of --placeholder_token and --reward_tokens; without reward tokens, any token can be a label."""

    placeholder_id: int
    reward_ids: tuple[int, ...]


def step_tokens(tokenizer: PreTrainedTokenizerBase, fields: StepFlags) -> StepTokens:
    """Look up the ids of placeholder and reward tokens; each must be exactly one token."""
    check_fast(tokenizer)
    placeholder = one_token(tokenizer, str(fields.placeholder_token), "--placeholder_token")
    return StepTokens(
        placeholder, tuple(one_token(tokenizer, text, "--reward_tokens") for text in fields.reward_tokens)
    )


def one_token(tokenizer: PreTrainedTokenizerBase, text: str, flag: str) -> int:
    """Return the id of a string that must be exactly one token."""
    ids = tokenize(text, tokenizer)[0]
    if len(ids) != 1:
        raise ConfigError(f"{flag} {text!r}: expected exactly one token of this tokenizer, got {len(ids)}")
    return int(ids[0])


def label_text(label: float, tokenizer: PreTrainedTokenizerBase, fields: StepFlags, *, soft: bool) -> str:
    """Return the label of a step as in the data: a probability or a token."""
    if soft:
        return f"{label:g}"
    return fields.reward_tokens[int(label)] if fields.reward_tokens else str(tokenizer.decode([int(label)]))


def step_rows(records: Records, tokenizer: PreTrainedTokenizerBase, fields: StepFlags, max_len: int) -> Loaded[StepRow]:
    """Make rows for a process reward model, truncated to `max_len` together with the labels of the steps cut off."""
    report = DataReport(records.name, Budget(max_len, "--max_len"))
    rows = load_rows(records, StepReader(tokenizer, fields, step_tokens(tokenizer, fields), max_len), report)
    names = partial(label_text, tokenizer=tokenizer, fields=fields, soft=report.soft_labels is True)
    return Loaded(rows, check_texts(report, tokenizer), names)


@dataclass(frozen=True)
class StepReader:
    """Reader that builds rows and checks that labels are either all soft or all hard."""

    kind: ClassVar[type] = StepRow
    tokenizer: PreTrainedTokenizerBase
    fields: StepFlags
    tokens: StepTokens
    max_len: int

    def make(self, record: Record, report: DataReport) -> list[StepRow]:
        """Return the row of one record."""
        text = record.text(self.fields.input_key, "--input_key")
        ids, _ = tokenize(text, self.tokenizer)  # [tokens]
        # A step ends at its placeholder, which is where its label is predicted.
        places = np.flatnonzero(ids == self.tokens.placeholder_id).astype(np.int32)  # [steps]
        given = self._labels(record, text)
        if len(given) != len(places):
            placeholder = str(self.fields.placeholder_token)
            if text.count(placeholder) == len(given):
                raise record.at(self.fields.input_key).error(
                    f"the tokenizer merges {len(given) - len(places)} of {len(given)} placeholders {placeholder!r} with"
                    " the text around them",
                    try_this="spaces around them, or a special token as --placeholder_token",
                )
            raise record.at(self.fields.label_key).error(
                f"expected as many labels as placeholders {placeholder!r} ({len(places)}), got {len(given)}"
            )
        if not given:
            raise Dropped("without a step")
        if places[0] == 0:
            raise record.place.error("the first step is empty: expected text before its placeholder")
        values = [self._number(label, record, report) for label in given]
        kept = int((places < self.max_len).sum())
        if not kept:
            raise TooLong(f"whose first step ends past --max_len {self.max_len}", tokens=len(ids))
        report.keep((text, len(ids)))
        labels = np.asarray(values[:kept], dtype=np.float32)  # [steps]
        return [StepRow(ids[: self.max_len], places[:kept], labels)]

    def _labels(self, record: Record, text: str) -> Sequence[object]:
        """Read the labels: a list, or a copy of the text with a reward token in place of each placeholder."""
        value = record.value(self.fields.label_key, "--label_key")
        if isinstance(value, list):
            return value
        if not isinstance(value, str):
            raise record.at(self.fields.label_key).mismatch("a list with one label per step", value)
        pieces = text.split(str(self.fields.placeholder_token))
        labels = labels_in_text(value, pieces, self.fields.reward_tokens)
        if labels is None:
            raise record.at(self.fields.label_key).error(
                "expected a list with one label per step, or the input with --reward_tokens in place of its"
                " placeholders, got a different text"
            )
        return labels

    def _number(self, label: object, record: Record, report: DataReport) -> float:
        """Return a probability or the class index of a token; all labels must be of the same kind as the first."""
        place, known = record.at(self.fields.label_key), self.fields.reward_tokens
        soft = isinstance(label, int | float)
        if report.soft_labels is None:
            report.soft_labels = soft
            if soft and len(known) != 2:
                raise ConfigError(
                    f"{record.place}: labels are probabilities: expected exactly two --reward_tokens, got {len(known)}",
                    try_this="--reward_tokens + -",
                )
        if soft != report.soft_labels:
            kinds = ("probabilities", "tokens") if report.soft_labels else ("tokens", "probabilities")
            raise place.error(f"expected {kinds[0]}, as in earlier labels, got {kinds[1]}")
        if isinstance(label, int | float):
            if not 0 <= label <= 1:  # also true for NaN
                raise place.error(f"expected a probability from 0 to 1, got {str(label)[:40]}")
            return float(label)
        if not isinstance(label, str):
            raise place.mismatch("a token or a probability as label", label)
        if known:
            if label not in known:
                raise place.error(f"expected one of --reward_tokens {' '.join(known)} as label, got {label!r}")
            return float(known.index(label))
        ids = tokenize(label, self.tokenizer)[0]
        if len(ids) != 1:
            raise place.error(f"expected one token as label, got {label!r} with {len(ids)} tokens")
        return float(ids[0])


def labels_in_text(value: str, pieces: Sequence[str], reward_tokens: Sequence[str]) -> list[str] | None:
    """Return the reward tokens between the pieces of the input; None if the text does not match or is ambiguous."""
    if not value.startswith(pieces[0]):
        return None
    position = len(pieces[0])
    labels: list[str] = []
    for piece in pieces[1:]:
        fitting = [token for token in reward_tokens if value.startswith(token + piece, position)]
        if len(fitting) != 1:
            return None
        labels.append(fitting[0])
        position += len(fitting[0]) + len(piece)
    return labels if position == len(value) else None
