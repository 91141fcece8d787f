"""YAML files of flags (`--config`): the keys of a file with their values, and their lines for error messages."""

from collections.abc import Collection
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
    line: int


def read_flag_file(path: Path, known: Collection[str]) -> list[FileEntry]:
    """Read a file of flags; `known` are the names that a command accepts."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            return entries_of(loader, node, known)
        problem = "contains no flags"
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file", try_this=nearest_path(str(path))) from None
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ConfigError(f"--config {path} is not YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or a date such as 2026-13-01
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:  # nested too deeply, or an alias for an object that contains it
        problem = "nests too deeply"
    raise ConfigError(f"--config {path} {problem}", try_this="lines such as `pretrain: ./model`")


def entries_of(
    loader: "yaml.SafeLoader", node: "yaml.MappingNode", known: Collection[str], prefix: str = ""
) -> list[FileEntry]:
    """Return the keys of a mapping; nested ones have dotted names: `{ds: {zero_stage: 3}}` gives `ds.zero_stage`."""
    import yaml

    loader.flatten_mapping(node)  # the keys that << merges in
    found: list[FileEntry] = []
    for key, value in node.value:
        name = f"{prefix}{loader.construct_object(key, deep=True)}"
        if isinstance(value, yaml.MappingNode) and name not in known:
            found += entries_of(loader, value, known, f"{name}.")
        else:
            found.append(FileEntry(name, loader.construct_object(value, deep=True), key.start_mark.line + 1))
    return found
