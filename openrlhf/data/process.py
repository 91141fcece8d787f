"""Rows for process reward models: texts whose steps end in a placeholder token, with one label per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from openrlhf.data.records import describe
from openrlhf.data.rows import Dropped, build_rows
from openrlhf.data.tokens import check_fast, tokenize
from openrlhf.errors import ConfigError
from openrlhf.types import StepRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.sections.data import StepFlags
    from openrlhf.data.records import Place, Record, Records


@dataclass(frozen=True)
class StepTokens:
    """The token ids of --placeholder_token and --reward_tokens; without reward tokens, any token can be a label."""

    placeholder_id: int
    reward_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepSet:
    """Rows whose labels are all soft or all hard.

    Soft labels are probabilities of the first reward token. Hard labels are class numbers: indices into the reward
    tokens, or vocabulary ids if no reward tokens are given.
    """

    rows: list[StepRow]
    soft: bool


def step_tokens(tokenizer: PreTrainedTokenizerBase, fields: StepFlags) -> StepTokens:
    """Look up the ids of placeholder and reward tokens; each text must be exactly one token."""
    check_fast(tokenizer)
    placeholder = one_token(tokenizer, str(fields.placeholder_token), "--placeholder_token")
    return StepTokens(
        placeholder, tuple(one_token(tokenizer, text, "--reward_tokens") for text in fields.reward_tokens)
    )


def one_token(tokenizer: PreTrainedTokenizerBase, text: str, flag: str) -> int:
    ids = tokenize(text, tokenizer)[0]
    if len(ids) != 1:
        raise ConfigError(f"{flag} {text!r} is {len(ids)} tokens of this tokenizer; it must be exactly one")
    return int(ids[0])


def step_rows(records: Records, tokenizer: PreTrainedTokenizerBase, fields: StepFlags, max_len: int) -> StepSet:
    """Make rows for a process reward model, cut to `max_len` with the labels of the steps that remain."""
    reader = StepReader(tokenizer, fields, step_tokens(tokenizer, fields), max_len)
    rows = build_rows(records, reader.make)
    return StepSet(rows, soft=reader.soft is True)


@dataclass
class StepReader:
    """Builder of rows that checks that all labels are soft or all are hard."""

    tokenizer: PreTrainedTokenizerBase
    fields: StepFlags
    tokens: StepTokens
    max_len: int
    soft: bool | None = None  # None until the first label is read

    def make(self, record: Record) -> list[StepRow]:
        text = record.text(self.fields.input_key, "--input_key")
        ids, _ = tokenize(text, self.tokenizer)
        places = np.flatnonzero(ids == self.tokens.placeholder_id).astype(np.int32)
        given = self._labels(record, text)
        self._check_count(record.place, text, len(places), len(given))
        if not given:
            raise Dropped("without a step")
        if places[0] == 0:
            raise record.place.error("the first step is empty: nothing stands before its placeholder")
        values = [self._number(label, record.place) for label in given]
        left = int((places < self.max_len).sum())
        if not left:
            raise Dropped(f"whose first step ends past --max_len {self.max_len}")
        labels = np.asarray(values[:left], dtype=np.float32)
        return [StepRow(ids[: self.max_len], places[:left], labels)]

    def _labels(self, record: Record, text: str) -> Sequence[object]:
        """Read the labels: a list, or a copy of the text with a reward token in place of each placeholder."""
        field = self.fields.label_key
        value = record.value(field, "--label_key")
        if isinstance(value, list):
            return value
        if not isinstance(value, str):
            raise record.place.error(f"a list with one label per step is wanted, but {describe(value)} came", field)
        pieces = text.split(str(self.fields.placeholder_token))
        labels = labels_in_text(value, pieces, self.fields.reward_tokens)
        if labels is None:
            raise record.place.error(
                "a list with one label per step is wanted; the text that came is not the input with"
                " --reward_tokens in place of its placeholders",
                field,
            )
        return labels

    def _check_count(self, place: Place, text: str, found: int, given: int) -> None:
        if found == given:
            return
        placeholder = str(self.fields.placeholder_token)
        if text.count(placeholder) == given:
            raise place.error(
                f"{given - found} of {given} placeholders {placeholder!r} are merged with the text around them by the"
                " tokenizer; set them apart, or take a special token as --placeholder_token",
                self.fields.input_key,
            )
        raise place.error(f"{given} labels for {found} placeholders {placeholder!r}", self.fields.label_key)

    def _number(self, label: object, place: Place) -> float:
        soft = isinstance(label, int | float)
        if self.soft is None:
            self.soft = soft
            if soft and len(self.tokens.reward_ids) != 2:
                raise ConfigError(
                    f"{place}: labels are probabilities, which need exactly two --reward_tokens,"
                    f" not {len(self.tokens.reward_ids)}",
                    try_this="--reward_tokens + -",
                )
        if soft != self.soft:
            kinds = ("probabilities", "tokens") if self.soft else ("tokens", "probabilities")
            raise place.error(f"labels were {kinds[0]} so far, and here are {kinds[1]}", self.fields.label_key)
        return self._probability(label, place) if isinstance(label, int | float) else self._class(label, place)

    def _probability(self, label: float, place: Place) -> float:
        if not math.isfinite(label) or not 0 <= label <= 1:
            raise place.error(f"a probability from 0 to 1 is wanted, but {label} came", self.fields.label_key)
        return float(label)

    def _class(self, label: object, place: Place) -> float:
        field, known = self.fields.label_key, self.fields.reward_tokens
        if not isinstance(label, str):
            raise place.error(f"a label is a token or a probability, but {describe(label)} came", field)
        if not known:
            ids = tokenize(label, self.tokenizer)[0]
            if len(ids) != 1:
                raise place.error(f"the label {label!r} is {len(ids)} tokens; it must be exactly one", field)
            return float(ids[0])
        if label not in known:
            raise place.error(f"the label {label!r} is none of --reward_tokens {' '.join(known)}", field)
        return float(known.index(label))


def labels_in_text(value: str, pieces: Sequence[str], reward_tokens: Sequence[str]) -> list[str] | None:
    """Return the reward tokens found between the pieces of the input; None if they do not match, or are ambiguous."""
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
