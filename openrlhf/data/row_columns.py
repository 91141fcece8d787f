"""Rows as Arrow columns, and back: what the files of `row_cache` contain.

`make_batch` stores rows of one kind as a batch of columns, one for each array, number or string of a row. `map_rows`
returns the sequence of rows in such batches. It makes a row on access: its arrays are views of the columns, which are
mapped from a file. So a large dataset takes no memory of the process, and all processes of a machine share it.

    rows       TokenRow([5, 7, 0], [F, T, T])    TokenRow([5, 0], [F, T])
    columns    input_ids [5 7 0 | 5 0]    target_mask [0 1 1 | 0 1]    length [3 2]
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from openrlhf.data.json_text import exact_json
from openrlhf.types import LabelledRow, PairRow, Prompt, StepRow, TokenRow

LENGTH = "length"  # column with the tokens of each row before truncation, for the report
IDS, MASK = pa.large_list(pa.int32()), pa.large_list(pa.uint8())  # Arrow's booleans are bits, which NumPy cannot view

TEXT = pa.large_string()

Row = TypeVar("Row")
IntArray = NDArray[np.int32]
ByteArray = NDArray[np.uint8]
Cell = Any  # an array, a number or a string
Column = Callable[[int], Cell]  # returns the cell of a row


class NotStorable(ValueError):
    """Raised for rows that cannot be stored exactly."""


@dataclass(frozen=True)
class RowFormat(Generic[Row]):
    """The columns of one kind of row, and how to convert a row to its cells and back."""

    columns: Mapping[str, pa.DataType]
    cells: Callable[[Row], tuple[Cell, ...]]  # in the order of the columns
    row: Callable[..., Row]  # makes a row from its cells
    numbered: bool = False  # the first argument of `row` is the row number

    @property
    def schema(self) -> pa.Schema:
        return pa.schema({**self.columns, LENGTH: pa.int64()})


def token_cells(row: TokenRow) -> tuple[Cell, ...]:
    return row.input_ids, row.target_mask.view(np.uint8)


def token_row(ids: IntArray, mask: ByteArray) -> TokenRow:
    return TokenRow(ids, mask.view(np.bool_))


def pair_cells(row: PairRow) -> tuple[Cell, ...]:
    return *token_cells(row.chosen), *token_cells(row.rejected), row.margin


def pair_row(ids: IntArray, mask: ByteArray, other_ids: IntArray, other_mask: ByteArray, margin: float) -> PairRow:
    return PairRow(token_row(ids, mask), token_row(other_ids, other_mask), margin)


def labelled_cells(row: LabelledRow) -> tuple[Cell, ...]:
    return *token_cells(row.tokens), row.prompt_length, int(row.label)


def labelled_row(ids: IntArray, mask: ByteArray, prompt_length: int, label: int) -> LabelledRow:
    return LabelledRow(token_row(ids, mask), prompt_length, bool(label))


def step_cells(row: StepRow) -> tuple[Cell, ...]:
    return row.input_ids, row.step_places, row.step_labels


def prompt_cells(row: Prompt) -> tuple[Cell, ...]:
    label = exact_json(row.label)
    if label is None:  # a Python caller may pass any object
        raise NotStorable(f"JSON cannot hold the label of prompt {row.index}")
    return row.text, np.asarray(row.input_ids, dtype=np.int32), label, row.datasource


def prompt_row(index: int, text: str, ids: IntArray, label: str, source: str) -> Prompt:
    return Prompt(index, text, tuple(ids.tolist()), json.loads(label), source)


SEQUENCE = {"input_ids": IDS, "target_mask": MASK}
PAIR = {"chosen_ids": IDS, "chosen_mask": MASK, "rejected_ids": IDS, "rejected_mask": MASK, "margin": pa.float64()}
LABELLED = {**SEQUENCE, "prompt_length": pa.int64(), "label": pa.uint8()}
STEPS = {"input_ids": IDS, "step_places": IDS, "step_labels": pa.large_list(pa.float32())}
PROMPT = {"text": TEXT, "input_ids": IDS, "label": TEXT, "datasource": TEXT}

FORMATS: Mapping[type, RowFormat[Any]] = {
    TokenRow: RowFormat(SEQUENCE, token_cells, token_row),
    PairRow: RowFormat(PAIR, pair_cells, pair_row),
    LabelledRow: RowFormat(LABELLED, labelled_cells, labelled_row),
    StepRow: RowFormat(STEPS, step_cells, StepRow),
    Prompt: RowFormat(PROMPT, prompt_cells, prompt_row, numbered=True),
}


def make_batch(kind: type[Row], rows: Sequence[Row], lengths: Sequence[int]) -> pa.RecordBatch:
    """Return rows as columns; `lengths` are their tokens before truncation."""
    stored: RowFormat[Row] = FORMATS[kind]
    cells = [stored.cells(row) for row in rows]
    columns = [
        make_column([row[number] for row in cells], column) for number, column in enumerate(stored.columns.values())
    ]
    return pa.record_batch([*columns, pa.array(np.asarray(lengths), type=pa.int64())], schema=stored.schema)


def make_column(cells: Sequence[Cell], column: pa.DataType) -> pa.Array:
    """Return the cells of all rows as one column."""
    if not pa.types.is_large_list(column):
        return pa.array(cells, type=column)
    bounds = np.fromiter(accumulate(map(len, cells), initial=0), dtype=np.int64, count=len(cells) + 1)
    values = np.concatenate([np.empty(0, dtype=column.value_type.to_pandas_dtype()), *cells])
    return pa.LargeListArray.from_arrays(bounds, pa.array(values, type=column.value_type))


def open_column(column: pa.Array) -> Column:
    """Return a function from the number of a row to its cell, which is a view of the column if it is an array."""
    if pa.types.is_large_string(column.type):
        return lambda place: column[place].as_py()
    if not pa.types.is_large_list(column.type):
        numbers = column.to_numpy()  # [rows]
        return lambda place: numbers[place].item()
    bounds, values = column.offsets.to_numpy(), column.values.to_numpy()  # [rows + 1], [sum of cells]
    return lambda place: values[bounds[place] : bounds[place + 1]]


@dataclass(frozen=True)
class MappedRows(Sequence[Row]):
    """The rows of one kind in batches of columns; a slice is another sequence over the same columns."""

    kind: type[Row]
    columns: Sequence[Sequence[Column]]  # the columns of each batch
    starts: Sequence[int]  # the first row of each batch, and the number of rows
    places: range  # the rows of this sequence

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> MappedRows[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | MappedRows[Row]:
        if isinstance(index, slice):
            return replace(self, places=self.places[index])
        place = self.places[index]
        batch = bisect_right(self.starts, place) - 1
        inside = place - self.starts[batch]
        stored: RowFormat[Row] = FORMATS[self.kind]
        cells = (column(inside) for column in self.columns[batch])
        return stored.row(place, *cells) if stored.numbered else stored.row(*cells)

    def __len__(self) -> int:
        return len(self.places)


def map_rows(kind: type[Row], batches: Sequence[pa.RecordBatch]) -> MappedRows[Row]:
    """Return the sequence of all rows in the batches."""
    stored: RowFormat[Row] = FORMATS[kind]
    columns = [[open_column(batch.column(name)) for name in stored.columns] for batch in batches]
    starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
    return MappedRows(kind, columns, starts, range(starts[-1]))
