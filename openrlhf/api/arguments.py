"""Convert a Python caller's keyword arguments to command-line arguments.

Most keywords are flags, and their values are converted to text. Datasets, reward functions and agents may be objects:
`as_arguments` holds them in memory while the run lasts and passes their names on (see `config/in_memory.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from openrlhf.api.keywords import Table
from openrlhf.config.checks.paths import DATA_FLAGS
from openrlhf.config.commands import COMMANDS
from openrlhf.config.in_memory import held, object_name
from openrlhf.config.parser import as_word, mapping_arguments
from openrlhf.errors import ConfigError, counted

CODE_FLAGS = {"reward": "remote_rm_url", "agent": "agent_func_path"}  # keyword -> flag for a path or a URL


@contextmanager
def as_arguments(command: str, keywords: Mapping[str, object]) -> Iterator[list[str]]:
    """Yield the command-line arguments for these keywords; objects stay available while the context is open."""
    flags = dict(keywords)
    config = flags.pop("config", None)
    files = [f"--config={as_word(config)}"] if config is not None else []
    with ExitStack() as stack:
        for name in DATA_FLAGS:
            if name in flags and not is_text(flags[name]):
                flags[name] = stack.enter_context(held(describe_rows(name, flags[name]), flags[name]))
        if command == "train_ppo":
            for name, flag in CODE_FLAGS.items():
                code = flags.pop(name, None)
                if code is not None:
                    must_be_code(name, code, flag, given=flags.get(flag))
                    flags[flag] = code if is_text(code) else stack.enter_context(held(object_name(code), code))
        yield [*files, *mapping_arguments(COMMANDS[command], flags)]


def must_be_code(name: str, code: object, flag: str, *, given: object) -> None:
    """Raise if a reward is not a function, or if the flag with the same meaning is also given."""
    if given is not None:
        raise ConfigError(f"{name}= and {flag}= are two values for the same flag", try_this=f"only {name}=")
    if name == "reward" and not (is_text(code) or callable(code)):
        raise ConfigError(
            f"reward= is a {type(code).__name__}: expected a function, a .py file or the address of a server",
            try_this="def reward(queries, prompts, labels): ...",
        )


def is_text(value: object) -> bool:
    """Return True if a value names something: text, a path, a list of them, or None for the default."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(map(is_text, value))
    return value is None or hasattr(value, "__fspath__") or isinstance(value, str)


def has_columns(rows: Mapping[str, object]) -> bool:
    """Return whether a mapping contains columns or other values, or nothing at all, instead of datasets."""

    def is_dataset(value: object) -> bool:
        if isinstance(value, Sequence):
            return all(isinstance(row, Mapping) for row in value)
        return hasattr(value, "__iter__")

    return not rows or not all(map(is_dataset, rows.values()))


def describe_rows(flag: str, rows: object) -> str:
    """Describe a dataset in memory: its size, and a fingerprint that shows on resume whether the rows have changed."""
    if isinstance(rows, Mapping) and not has_columns(rows):  # a DatasetDict
        return " and ".join(f"{split}: {describe_rows(flag, table)}" for split, table in rows.items())
    if isinstance(rows, list):
        lines = (json.dumps(row, sort_keys=True, default=repr) for row in rows)
        fingerprint = hashlib.blake2b("\n".join(lines).encode(), digest_size=3).hexdigest()
    elif isinstance(rows, Table):  # other iterables have no random access
        fingerprint = str(getattr(rows, "_fingerprint", ""))[:6]
    else:
        raise ConfigError(
            f"{flag}= is a {type(rows).__name__}: expected a path, a list of dicts or a datasets.Dataset",
            try_this=f"{flag}={'datasets.Dataset.from_dict' if isinstance(rows, Mapping) else 'list'}(rows)",
        )
    return f"{counted(len(rows), 'row')}; {fingerprint}"
