"""Load the datasets that a flag names: files, folders, saved datasets and hub names.

`load_dataset_rows` is the entry point of all commands. It caps the datasets and concatenates or mixes them by row
number, so rows are read only when needed and keep their own fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.exceptions import DatasetsError
from numpy.typing import NDArray

from openrlhf.config.checks.paths import looks_local
from openrlhf.config.sections.data import split_names
from openrlhf.data.files import open_json
from openrlhf.data.records import Records, Source
from openrlhf.errors import ConfigError, DataError, MissingExtraError
from openrlhf.monitor import say

JSON = (".json", ".jsonl")
TABLES = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
LOADER_ERRORS = (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError, NotImplementedError)


@dataclass(frozen=True)
class Hub:
    """Where to load a dataset from if its name is not a local path."""

    use_ms: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TableRows:
    """Rows of an Arrow table. Arrow fills missing keys of nested objects with null; `read` removes them again."""

    name: str
    table: datasets.Dataset

    def __len__(self) -> int:
        return len(self.table)

    def read(self, position: int) -> tuple[Mapping[str, Any], int]:
        row: dict[str, Any] = self.table[position]
        return {field: without_nulls(value) for field, value in row.items()}, position + 1


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def load_dataset_rows(
    spec: str,
    *,
    split: str,
    probs: Sequence[float] | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    use_ms: bool = False,
    trust_remote_code: bool = False,
) -> Records:
    """Load a comma-separated list of datasets, concatenated or mixed by probabilities.

    The first `max_samples` rows of each dataset are used, and then the first `max_samples` of the result. Mixing
    continues until every dataset is exhausted, so rows of shorter datasets repeat.
    """
    hub = Hub(use_ms, trust_remote_code)
    sources = [open_source(item, split, max_samples, hub) for item in split_names(spec)]
    if not sources:
        raise ConfigError(f"{spec!r} names no dataset")
    lengths = [len(source) if max_samples is None else min(len(source), max_samples) for source in sources]
    if probs is not None and len(probs) != len(sources):
        raise ConfigError(f"{len(probs)} probabilities for {len(sources)} datasets")
    order = one_after_another(lengths) if probs is None else mixed(lengths, probs, seed)
    return Records(sources, order[:max_samples])


def one_after_another(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate(
        [np.stack([np.full(length, which), np.arange(length)], axis=1) for which, length in enumerate(lengths)]
    )


def mixed(lengths: Sequence[int], probs: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Return the order in which `datasets.interleave_datasets` draws rows, computed on row numbers alone.

    Datasets with different columns can therefore be mixed. A dataset with probability 0 would never be exhausted, so it
    is removed first.
    """
    drawn = [which for which, prob in enumerate(probs) if prob > 0]
    if len(drawn) < len(lengths):
        say(
            f"--dataset_probs: {len(lengths) - len(drawn)} of {len(lengths)} datasets have probability 0 and are unused"
        )
    total = sum(probs[which] for which in drawn)
    numbers = [
        datasets.Dataset.from_dict({"which": [which] * lengths[which], "inside": list(range(lengths[which]))})
        for which in drawn
    ]
    together = datasets.interleave_datasets(
        numbers,
        probabilities=[probs[which] / total for which in drawn],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    return np.stack([np.asarray(together["which"]), np.asarray(together["inside"])], axis=1).astype(np.int64)


def open_source(item: str, split: str, limit: int | None, hub: Hub) -> Source:
    """Open one dataset: a file, a folder, or a hub name, with an optional @dir for a folder inside it."""
    name, _, data_dir = item.partition("@")
    if Path(item).expanduser().exists():  # the @ is part of a path
        name, data_dir = item, ""
    path = Path(name).expanduser()
    check_path(name, path)
    if path.is_file() and path.suffix in JSON:
        return open_json(name, path, limit)
    with quiet():
        try:
            loaded = load(name, path, data_dir or None, hub)
        except LOADER_ERRORS as error:
            raise DataError(f"{name}: cannot be loaded: {cause_of(error)}") from None
    table = pick_split(loaded, name, "train" if path.is_file() else split)
    if not len(table):
        raise DataError(f"{name} holds no rows")
    return TableRows(name, table)


def check_path(name: str, path: Path) -> None:
    """Raise for mistakes in a name that a look at the disk can reveal."""
    known = [*JSON, *TABLES]
    if path.suffix == ".py" or (path / f"{path.name}.py").is_file():
        raise DataError(
            f"{name} is a dataset script, which datasets no longer runs", try_this="its data as json or parquet files"
        )
    if not path.exists() and (path.suffix in known or looks_local(name)):
        raise DataError(f"{name}: no such file or folder")
    if path.is_file() and path.suffix not in known:
        raise DataError(f"{name}: {path.suffix or 'this'} is no format that is read; {', '.join(known)} are")
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{name} is empty")


def load(name: str, path: Path, data_dir: str | None, hub: Hub) -> Any:
    if path.is_file() and path.suffix == ".csv":  # an empty cell is null; NA and None are text
        return datasets.load_dataset("csv", data_files=str(path), keep_default_na=False, na_values=[""])
    if path.is_file():
        return datasets.load_dataset(TABLES[path.suffix], data_files=str(path))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_dir():
        return datasets.load_dataset(str(path), data_dir=data_dir)
    if hub.use_ms:
        return load_from_modelscope(name, hub)
    return datasets.load_dataset(name, data_dir=data_dir)


def load_from_modelscope(name: str, hub: Hub) -> Any:
    if find_spec("modelscope") is None:
        raise MissingExtraError("--use_ms needs modelscope, which is not installed", try_this="pip install modelscope")
    namespace, slash, short = name.partition("/")
    if not slash:
        raise DataError("a dataset on ModelScope is called namespace/name")
    modelscope = importlib.import_module("modelscope.msdatasets")
    loaded = modelscope.MsDataset.load(short, namespace=namespace, trust_remote_code=hub.trust_remote_code)

    def as_table(part: Any) -> Any:
        return part.to_hf_dataset() if isinstance(part, modelscope.MsDataset) else part

    if isinstance(loaded, Mapping):
        return {split: as_table(part) for split, part in loaded.items()}
    return as_table(loaded)


def pick_split(loaded: Any, name: str, split: str) -> datasets.Dataset:
    """Return the requested split; a dataset without splits is used as a whole."""
    if not isinstance(loaded, Mapping):
        return loaded
    if split not in loaded:
        raise DataError(f"{name} has no split {split!r}; there are {', '.join(map(repr, loaded))}")
    return loaded[split]


@contextmanager
def quiet() -> Generator[None]:
    """Silence the progress bars and error logs of `datasets`; our own error message is one line."""
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
        return "it holds no rows"
    return lines[0][:300] if lines else type(error).__name__
