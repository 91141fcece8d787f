"""YAML files of flags (`--config`): the keys of a file with their values, and their lines for error messages."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.config.checks.paths import nearest_path
from openrlhf.errors import ConfigError

if TYPE_CHECKING:
    import yaml


@dataclass(frozen=True)
class FileEntry:
    """A key of a file; a nested key has a dotted name."""

    name: str
    value: object
    line: int | None  # None for a key that is not text


def read_flag_file(path: Path, known: Collection[str]) -> list[FileEntry]:
    """Read a file of flags; `known` are the names that a command accepts."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file", try_this=nearest_path(str(path))) from None
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ConfigError(f"--config {path} is not YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: other bytes than UTF-8, or a date such as 2026-13-01
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise too_deep(path) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {path} contains no flags", try_this="lines such as `pretrain: ./model`")
    try:
        lines = lines_of_keys(node)
        return [FileEntry(name, value, lines.get(name)) for name, value in flatten(content, known)]
    except RecursionError:  # an alias for an object that contains it
        raise too_deep(path) from None


def too_deep(path: Path) -> ConfigError:
    return ConfigError(f"--config {path} nests too deeply", try_this="lines such as `pretrain: ./model`")


def flatten(content: Mapping[str, object], known: Collection[str], prefix: str = "") -> list[tuple[str, object]]:
    """Flatten nested keys to dotted names: `{ds: {zero_stage: 3}}` gives `ds.zero_stage`."""
    rows: list[tuple[str, object]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in known:
            rows += flatten(value, known, f"{name}.")
        else:
            rows.append((name, value))
    return rows


def lines_of_keys(node: "yaml.Node | None", prefix: str = "") -> dict[str, int]:
    """Return the line of each key by its dotted name."""
    import yaml

    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
                lines |= lines_of_keys(value, f"{prefix}{key.value}.")
    return lines
