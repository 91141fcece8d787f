"""Trajectories in Parquet files: one row per sample, and one list per sample for each array.

`rl/record.py` writes the samples of a step and the queue of a checkpoint in this form, and reads them again. Tables are
made of whole arrays, a few samples at a time. A row group has about a million tokens, so that one sample can be read
without the rest of its file. Labels and logs may be anything that JSON can hold, so they are JSON in a text column.

Versions before 1.1 wrote JSON lines, which can still be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from openrlhf.training.disk_space import replacing
from openrlhf.types import NOT_SAMPLED, Prompt, Trajectory

GROUP_TOKENS = 2**20  # tokens of a row group
REPEATED = ["prompt.text", "prompt.label", "prompt.datasource"]  # columns that are equal in many rows
ARRAYS = {  # the arrays of a trajectory
    "input_ids": np.int32,
    "action_mask": np.bool_,
    "rollout_log_probs": np.float32,
    "token_versions": np.int32,
    "temperature_factors": np.float32,
}
SCALARS = {
    "reward": pa.float64(),
    "score": pa.float64(),
    "truncated": pa.bool_(),
    "version": pa.int64(),
    "whole_vocabulary": pa.bool_(),
    "episode": pa.int64(),
}
OPTIONAL = ("temperature_factors", "routed_experts", "episode")  # null in a sample that has none
STEPS = pa.list_(pa.struct([("place", pa.int32()), ("reward", pa.float64())]))
Fields: TypeAlias = dict[str, Any]  # arguments of a dataclass, as read from a file


def write_samples(path: Path, items: Sequence[Trajectory], more: Mapping[str, pa.Array], about: object = None) -> None:
    """Replace a file with one of these samples; `more` are additional columns, `about` is stored with the schema."""
    metadata = {"about": json.dumps(about)}
    with replacing(path) as aside, aside.open("wb") as file:
        writer: pq.ParquetWriter | None = None
        for group in row_groups(items):
            table = make_table(items[group], {name: column[group] for name, column in more.items()})
            if writer is None:
                schema = table.schema.with_metadata(metadata)
                # Stronger compression takes twice as long and saves a sixth.
                options = {"compression": "snappy", "use_dictionary": REPEATED, "write_statistics": False}
                writer = pq.ParquetWriter(file, schema, **options)
            writer.write_table(table.cast(writer.schema), row_group_size=max(1, len(table)))
        assert writer is not None
        writer.close()


def row_groups(items: Sequence[Trajectory]) -> Iterator[slice]:
    """Yield the samples of each row group; one empty group if there are no samples."""
    start = tokens = 0
    for place, item in enumerate(items):
        if place > start and tokens + len(item.input_ids) > GROUP_TOKENS:
            yield slice(start, place)
            start, tokens = place, 0
        tokens += len(item.input_ids)
    yield slice(start, len(items))


def make_table(items: Sequence[Trajectory], more: Mapping[str, pa.Array]) -> pa.Table:
    """Return samples as a table with additional columns."""
    prompts = [item.prompt for item in items]
    distinct = {id(own): own for own in prompts}  # the samples of a group have the same prompt
    tokens = {key: np.array(own.input_ids, np.int32) for key, own in distinct.items()}
    labels = {key: json.dumps(own.label) for key, own in distinct.items()}
    prompt = {
        "index": pa.array([own.index for own in prompts], pa.int64()),
        "text": text_column([own.text for own in prompts]),
        "input_ids": join_column([tokens[id(own)] for own in prompts], np.int32),
        "label": pa.array([labels[id(own)] for own in prompts], pa.string()),
        "datasource": text_column([own.datasource for own in prompts]),
    }
    experts = [item.routed_experts for item in items]
    steps = [[{"place": place, "reward": reward} for place, reward in item.step_rewards] for item in items]
    logs = [json.dumps(dict(item.extra_logs)) if item.extra_logs else "{}" for item in items]
    columns: dict[str, pa.Array] = {
        "prompt": pa.StructArray.from_arrays(list(prompt.values()), names=list(prompt)),
        # `attrgetter`, because `vars` would create a dict for each sample.
        **{name: join_column(list(map(attrgetter(name), items)), dtype) for name, dtype in ARRAYS.items()},
        **{name: pa.array(list(map(attrgetter(name), items)), kind) for name, kind in SCALARS.items()},
        "routed_experts": join_column([None if own is None else own.reshape(-1) for own in experts], np.int16),
        "routed_layers": pa.array([0 if own is None else own.shape[1] for own in experts], pa.int32()),
        "extra_logs": pa.array(logs, pa.string()),
        "step_rewards": pa.array(steps, STEPS),
    }
    columns |= more
    # Parquet writes columns that cannot be null a sixth faster.
    schema = [pa.field(name, column.type, nullable=name in OPTIONAL) for name, column in columns.items()]
    return pa.table(list(columns.values()), pa.schema(schema))


def join_column(arrays: Sequence[NDArray[np.generic] | None], dtype: type[np.generic]) -> pa.Array:
    """Return an array, or None, of each sample as a column of lists."""
    given = [array for array in arrays if array is not None]
    bounds = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int32)
    values = np.concatenate(given).astype(dtype, copy=False) if given else np.empty(0, dtype)
    absent = None if len(given) == len(arrays) else pa.array([array is None for array in arrays])
    return list_column(pa.array(bounds), values, absent)


def list_column(bounds: pa.Array, values: NDArray[np.generic], absent: pa.Array | None = None) -> pa.Array:
    """Return the values between successive bounds as a column of lists, of which some may be absent."""
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(values.dtype), nullable=False))
    return pa.ListArray.from_arrays(bounds, pa.array(values), kind, mask=absent)


def text_column(texts: Sequence[Any]) -> pa.Array:
    """Return texts as a column; lone surrogates, which JSON allows and UTF-8 does not, are replaced."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        return pa.array([text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts])


def read_samples(path: Path) -> list[Trajectory]:
    """Read the samples of a file, in Parquet or, from an older version, as JSON lines."""
    if path.suffix == ".jsonl":
        return [trajectory_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return samples_of(pq.read_table(path))


def read_about(path: Path) -> Any:
    """Return the metadata stored with the schema."""
    return json.loads(pq.read_schema(path).metadata[b"about"])


def samples_of(table: pa.Table) -> list[Trajectory]:
    """Return the samples of a table; their arrays are views of its columns. Raise ValueError for a missing value."""
    for name in (*ARRAYS, *SCALARS, "prompt", "extra_logs", "step_rewards"):
        must_have_values(name, table.column(name).drop_null() if name in OPTIONAL else table.column(name))
    arrays = {name: split_column(table.column(name)) for name in ARRAYS}
    experts: list[NDArray[np.generic] | None] = [None] * len(table)
    layers = [0] * len(table)
    if "routed_experts" in table.column_names:  # not in older files
        experts, layers = split_column(table.column("routed_experts")), table.column("routed_layers").to_pylist()
    plain = {name: table.column(name).to_pylist() for name in (*SCALARS, "prompt", "extra_logs", "step_rewards")}
    found = []
    for row in range(len(table)):
        prompt = plain["prompt"][row]
        steps = tuple((step["place"], step["reward"]) for step in plain["step_rewards"][row])
        known: Fields = {name: values[row] for name, values in arrays.items()}
        known |= {name: plain[name][row] for name in SCALARS}
        prompt |= {"input_ids": tuple(prompt["input_ids"]), "label": json.loads(prompt["label"])}
        routed = experts[row]
        if routed is not None:
            known["routed_experts"] = routed.reshape(len(known["input_ids"]), layers[row], -1)
        logs = json.loads(plain["extra_logs"][row])
        found.append(Trajectory(prompt=Prompt(**prompt), **known, extra_logs=logs, step_rewards=steps))
    return found


def must_have_values(name: str, column: pa.ChunkedArray) -> None:
    """Raise ValueError if a value of a column, or of its lists or structs, is null."""
    if column.null_count:
        raise ValueError(f"a value of {name} is null")
    if pa.types.is_list(column.type):
        must_have_values(name, pa.chunked_array([chunk.flatten() for chunk in column.chunks], column.type.value_type))
    elif pa.types.is_struct(column.type):
        for field, values in zip(column.type, column.flatten(), strict=True):
            must_have_values(f"{name}.{field.name}", values)


def split_column(column: pa.ChunkedArray) -> list[NDArray[np.generic] | None]:
    """Return the list of each row as an array; None for a null."""
    found: list[NDArray[np.generic] | None] = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        parts = [values[first:last] for first, last in pairwise(offsets)]
        found += [part if known else None for part, known in zip(parts, chunk.is_valid().to_pylist(), strict=True)]
    return found


def trajectory_of(line: Fields) -> Trajectory:
    """Return the trajectory of a line that an older version wrote."""
    known: Fields = {name: line[name] for name in Trajectory.__dataclass_fields__ if name in line}
    for name, value in known.items():
        values = value if name in ARRAYS and value is not None else [value]
        if name not in OPTIONAL and None in values:
            raise ValueError(f"a value of {name} is null")
    prompt: Fields = dict(line["prompt"])
    known["prompt"] = Prompt(**prompt | {"input_ids": tuple(prompt["input_ids"])})
    for name, dtype in ARRAYS.items():
        known[name] = np.array(known.get(name, ()), dtype)
    if not len(known["temperature_factors"]):
        known["temperature_factors"] = None
    known["token_versions"] = np.where(known["action_mask"], np.int32(known["version"]), np.int32(NOT_SAMPLED))
    known["step_rewards"] = tuple((place, reward) for place, reward in known["step_rewards"])
    return Trajectory(**known)
