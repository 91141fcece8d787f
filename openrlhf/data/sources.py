"""Load the datasets that a flag names: files, folders, saved datasets, hub names and objects of a Python caller.

`load_dataset` reads --dataset, and `load_dataset_rows` the datasets of any other flag. JSON files are read by `files`;
all other datasets are loaded as Arrow tables by `datasets` or, with --use_ms, by ModelScope. Only row numbers are
concatenated or mixed, so rows are read when needed, and datasets may have different fields.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from datasets.exceptions import DatasetsError
from huggingface_hub import snapshot_download
from numpy.typing import NDArray

from openrlhf.config.checks.paths import looks_local, nearest_path
from openrlhf.config.checks.revisions import dataset_revisions
from openrlhf.config.in_memory import find_object, is_in_memory
from openrlhf.config.sections.data import SourceFlags
from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.files import JsonArray, open_json
from openrlhf.data.hub import dataset_is_cached, hub_failure
from openrlhf.data.json_text import InvalidJSON, check_values
from openrlhf.data.records import Place, Records, Source
from openrlhf.errors import ConfigError, DataError, MissingExtraError, counted
from openrlhf.monitor import say

JSON = (".json", ".jsonl")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # file suffix -> builder of `datasets`
# Errors that `datasets` raises for unreadable files, unknown names or a missing network; any other error is a bug.
LOADER_ERRORS = (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError, NotImplementedError)
HASHED = 10_000  # rows of a table to copy and hash at a time
FROM_THE_HUB = LoadingFlags()  # names that are not local are loaded from the Hugging Face Hub


@dataclass(frozen=True)
class TableRows:
    """Rows of an Arrow table. Arrow sets missing keys of nested objects to null; `read` removes them."""

    name: str
    table: datasets.Dataset

    def __len__(self) -> int:
        return len(self.table)

    def read(self, position: int) -> tuple[object, int]:
        row: dict[str, object] = self.table[position]
        return {field: without_nulls(value) for field, value in row.items()}, position + 1  # null fields are kept

    def read_many(self, positions: Sequence[int]) -> list[tuple[object, int]]:
        columns: dict[str, list[object]] = self.table[list(positions)]
        rows = zip(*([without_nulls(value) for value in column] for column in columns.values()), strict=True)
        return [(dict(zip(columns, row, strict=True)), place + 1) for place, row in zip(positions, rows, strict=True)]

    def digest(self, rows: int) -> str | None:
        """Return a hash of the first rows, or None if the table has a format: a function may compute its rows."""
        if self.table.format["type"] is not None:
            return None
        found = hashlib.sha256(f"{self.table.features!r} {self.table.format!r}".encode())
        stored = self.table.with_format("arrow")
        for start in range(0, rows, HASHED):
            part: pa.Table = stored[start : min(start + HASHED, rows)]
            content = pa.BufferOutputStream()
            with pa.ipc.new_stream(content, part.schema) as stream:
                # A copy, because the padding of a slice may contain the rows next to it.
                stream.write_table(part.take(pa.array(range(len(part)))).combine_chunks())
            found.update(content.getvalue())
        return found.hexdigest()


def without_nulls(value: object) -> object:
    """Remove the keys with null values from nested objects."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def load_dataset(data: SourceFlags, *, seed: int, loading: LoadingFlags) -> Records:
    """Load the rows of --dataset, limited to --max_samples and mixed by --dataset_probs."""
    return load_dataset_rows(
        str(data.dataset),
        split=data.dataset_split,
        probs=data.dataset_probs,
        max_samples=data.max_samples,
        seed=seed,
        revisions=data.dataset_revision,
        loading=loading,
    )


def load_dataset_rows(
    spec: str,
    *,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    revisions: str | None = None,
    loading: LoadingFlags = FROM_THE_HUB,
) -> Records:
    """Load a comma-separated list of datasets, concatenated or mixed by a comma-separated list of probabilities.

    `revisions` is a comma-separated list with one commit, tag or branch for each hub name in `spec`.
    Only the first `max_samples` rows of each dataset are used, and then only the first `max_samples` rows of the
    result. Mixing continues until every dataset is exhausted, so rows of shorter datasets repeat.
    """
    pinned = dataset_revisions(spec, revisions)
    sources = [open_source(item, split, max_samples, loading, revision) for item, revision in pinned]
    if not sources:
        raise ConfigError(f"{spec!r} does not name a dataset")
    lengths = [len(source) if max_samples is None else min(len(source), max_samples) for source in sources]
    if probs is None:  # concatenate, [rows, 2]
        parts = [
            np.stack([np.full(length, number), np.arange(length)], axis=1) for number, length in enumerate(lengths)
        ]
        return Records(sources, np.concatenate(parts)[:max_samples])
    chances = [float(share) for share in probs.split(",")]
    if len(chances) != len(sources):
        raise ConfigError(f"expected one probability per dataset ({len(sources)}), got {len(chances)}")
    return Records(sources, mix(lengths, chances, seed)[:max_samples])


def mix(lengths: Sequence[int], probs: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Return the order of rows in `datasets.interleave_datasets`, [rows, 2]: (dataset, row in it).

    Only row numbers are mixed, so the datasets may have different columns. A dataset with probability 0 would never be
    exhausted, so it is removed first.
    """
    used = [number for number, prob in enumerate(probs) if prob > 0]
    if len(used) < len(lengths):
        say(f"--dataset_probs: {len(lengths) - len(used)} of {len(lengths)} datasets have probability 0 and are unused")
    total = sum(probs[number] for number in used)
    tables = [
        datasets.Dataset.from_dict({"number": [number] * lengths[number], "row": list(range(lengths[number]))})
        for number in used
    ]
    mixed = datasets.interleave_datasets(
        tables, probabilities=[probs[number] / total for number in used], seed=seed, stopping_strategy="all_exhausted"
    )
    return np.stack([np.asarray(mixed["number"]), np.asarray(mixed["row"])], axis=1).astype(np.int64)


def hold_out(records: Records, size: float | None, seed: int) -> tuple[Records, Records | None]:
    """Divide records into those to train on and those that --eval_size holds out: a fraction below 1, or a number.

    The seed chooses them; both parts keep the order of the records. A row that mixing repeats is held out with all its
    repetitions, and evaluated once.
    """
    if size is None:
        return records, None
    order = records.order
    rows = order[:, 0] * (order[:, 1].max() + 1) + order[:, 1]  # [records], a number for each row of each source
    distinct, first = np.unique(rows, return_index=True)
    count = max(1, round(size * len(distinct))) if size < 1 else int(size)
    if count >= len(distinct):
        raise DataError(
            f"{records.name}: --eval_size {size:.10g} leaves nothing to train on: it holds out {count:,} of"
            f" {counted(len(distinct), 'row')}",
            try_this="a fraction, such as --eval_size 0.1" if len(distinct) > 1 else "--eval_dataset",
        )
    say(f"{records.name}: {count:,} of {len(distinct):,} rows are held out for evaluation (--eval_size {size:.10g})")
    chosen = np.random.default_rng(seed).permutation(len(distinct))[:count]
    train = order[~np.isin(rows, distinct[chosen])]
    return Records(records.sources, train), Records(records.sources, order[np.sort(first[chosen])], held_out=True)


def open_source(item: str, split: str, limit: int | None, loading: LoadingFlags, revision: str | None = None) -> Source:
    """Open one dataset: a file, a folder or a hub name, optionally followed by @dir for a subfolder; or an object."""
    if is_in_memory(item):
        return open_object(item, split)
    name, _, data_dir = item.partition("@")
    if Path(item).expanduser().exists():  # the @ is part of the path
        name, data_dir = item, ""
    path = Path(name).expanduser()
    check_path(name, path)
    if path.is_file() and path.suffix in JSON:
        return open_json(name, path, limit)
    from_hub = not path.exists() and not loading.use_ms
    if from_hub and not dataset_is_cached(name) and (failure := hub_failure()):
        fix = nearest_path(name) or "a file or folder on this machine, or HF_ENDPOINT with the address of a mirror"
        raise DataError(f"{name} is neither a local path nor in the cache, and {failure}", try_this=fix)
    with quiet():
        try:
            loaded = load(name, path, data_dir or None, loading, revision)
        except LOADER_ERRORS as error:
            at = f" at revision {revision}" if revision else ""
            raise DataError(f"{name}: cannot be loaded{at}: {cause_of(error)}") from None
    return take_split(name, loaded, "train" if path.is_file() else split)


def open_object(name: str, split: str) -> Source:
    """Open the rows that a Python caller passed: a list of dicts, a table, or a mapping from splits to tables."""
    given = find_object(name, "dataset")
    if not isinstance(given, list):
        return take_split(name, given, split)
    if not given:
        raise DataError(f"{name} has no rows")
    for number, row in enumerate(given, 1):
        try:
            check_values(row, finite=False)
        except InvalidJSON as error:
            raise Place(name, number).error(error.problem) from None
    return JsonArray(name, given)


def take_split(name: str, loaded: object, split: str) -> TableRows:
    """Return the rows of a split; a table without splits is used as a whole."""
    if isinstance(loaded, Mapping):
        if split not in loaded:
            raise DataError(f"{name} has no split {split!r}, only {', '.join(map(repr, loaded))}")
        loaded = loaded[split]
    if not isinstance(loaded, datasets.Dataset):
        raise DataError(
            f"{name}: expected rows with random access, got {type(loaded).__name__}",
            try_this="a list of dicts, or a datasets.Dataset",
        )
    if not len(loaded):
        raise DataError(f"{name} has no rows")
    return TableRows(name, loaded)


def check_path(name: str, path: Path) -> None:
    """Raise for mistakes in a dataset name that can be found without loading it."""
    known = [*JSON, *TABLES]
    if path.suffix == ".py" or (path / f"{path.name}.py").is_file():
        raise DataError(
            f"{name} is a dataset script, which `datasets` no longer runs", try_this="its data as json or parquet files"
        )
    if not path.exists() and (path.suffix in known or looks_local(name)):
        raise DataError(f"{name}: no such file or folder")
    if path.is_file() and path.suffix not in known:
        raise DataError(f"{name}: unknown format: expected {', '.join(known)}, got {path.suffix or 'no suffix'}")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{name} is empty")


def load(name: str, path: Path, data_dir: str | None, loading: LoadingFlags, revision: str | None) -> object:
    """Load a table, or a mapping from splits to tables, from a file, a folder or a hub."""
    if path.is_file() and path.suffix == ".csv":  # read only empty cells as null; NA and None are text
        return datasets.load_dataset("csv", data_files=str(path), keep_default_na=False, na_values=[""])
    if path.is_file():
        return datasets.load_dataset(TABLES[path.suffix], data_files=str(path))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), data_dir=data_dir)
    if loading.use_ms:
        return load_from_modelscope(name, revision, trust_remote_code=loading.trust_remote_code)
    if revision is None:
        return datasets.load_dataset(name, data_dir=data_dir)
    # Even with a revision, `datasets` uses any cached version if the hub does not respond. So download that commit, or
    # only its subfolder, and load the files.
    wanted = None if data_dir is None else [f"{data_dir}/**", "README.md"]
    folder = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted)
    return datasets.load_dataset(folder, data_dir=data_dir)


def load_from_modelscope(name: str, revision: str | None, *, trust_remote_code: bool) -> object:
    """Load a dataset from ModelScope as a table or a mapping from splits to tables."""
    if find_spec("modelscope") is None:
        raise MissingExtraError("--use_ms needs modelscope, which is not installed", try_this="pip install modelscope")
    namespace, slash, short = name.partition("/")
    if not slash:
        raise DataError(f"invalid ModelScope dataset name: expected namespace/name, got {name}")
    modelscope = importlib.import_module("modelscope.msdatasets")
    pinned: dict[str, str] = {} if revision is None else {"version": revision}
    loaded = modelscope.MsDataset.load(short, namespace=namespace, trust_remote_code=trust_remote_code, **pinned)
    splits = loaded if isinstance(loaded, Mapping) else {"": loaded}
    own = modelscope.MsDataset  # wraps the table
    tables = {split: part.to_hf_dataset() if isinstance(part, own) else part for split, part in splits.items()}
    return tables if isinstance(loaded, Mapping) else tables[""]


@contextmanager
def quiet() -> Generator[None]:
    """Silence the progress bars and error logs of `datasets`; errors are reported in one line instead."""
    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def cause_of(error: BaseException) -> str:
    """Return the first line of the root cause's message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith("corresponds to no data!"):
        return "it has no rows"
    return lines[0][:300] if lines else type(error).__name__
