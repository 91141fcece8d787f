"""The command-line parser, built from the config dataclasses: sections become argparse groups, fields become flags.

Flags can also come from the environment and from YAML files (`--config`). They are converted to
command-line arguments first, so that one parser reads them all and reports errors in the same way.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from openrlhf.config.aliases import FALSE, environment_arguments, known_spellings, rewrite, successor
from openrlhf.config.flag_file import FileEntry, read_flag_file
from openrlhf.config.flags import Flag, choices_of, flags_of, in_reading_order, replace_flags, summary_of, without_none
from openrlhf.config.help import asked_topic, default_text, help_text
from openrlhf.config.unknown_flags import NEGATIVE_NUMBER, unknown_flags, unknown_words, wrong_choice
from openrlhf.errors import ConfigError, listed
from openrlhf.monitor import say

C = TypeVar("C")

METAVARS: Mapping[object, str] = {int: "N", float: "X", str: "TEXT"}  # placeholders of values in --help
TRUE = ("true", "yes", "on", "1")


def parse(
    command: type[C], argv: Sequence[str], *, prog: str = "openrlhf", environ: Mapping[str, str] | None = None
) -> C:
    """Parse a command line into a config; see `parse_given`."""
    return parse_given(command, argv, prog=prog, environ=environ)[0]


def parse_given(
    command: type[C], argv: Sequence[str], *, prog: str = "openrlhf", environ: Mapping[str, str] | None = None
) -> tuple[C, frozenset[str]]:
    """Parse flags from the environment, then `--config FILE`, then `argv`; later values override earlier ones.

    Return the config and the names of the flags that were given. `--help` prints the help and exits instead.
    """
    environ = os.environ if environ is None else environ
    parser = build_parser(command, prog)
    if (topic := asked_topic(argv)) is not None:
        sys.stdout.write(help_text(command, parser, topic))
        raise SystemExit(0)
    files = parse_words(command, parser, rewrite(command, argv)[0])[0].config
    from_files = [word for file in files for word in file_arguments(command, parser, Path(file))]
    from_environment, became = environment_arguments(command, environ)
    given, notes = rewrite(command, [*from_environment, *from_files, *argv])
    for note in [*became, *notes]:
        say(note)
    values, unknown = parse_words(command, parser, given)
    if unknown:
        raise unknown_words(command, unknown)
    names = {word.removeprefix("--").partition("=")[0] for word in given if word.startswith("--")}
    parsed = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(values).items()}
    del parsed["config"]  # not a flag of the command
    return replace_flags(command(), **parsed), frozenset(names & flags_of(command).keys())


def parse_words(
    command: type, parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the words of a command line; also return those that are neither flags nor values.

    Positional arguments may appear anywhere, even between flags or after a switch, which does not take them as its
    value.
    """
    flags = flags_of(command)
    if not any(item.positional for item in flags.values()):
        return parser.parse_known_args(words)
    switches = {f"--{item.name}" for item in flags.values() if without_none(item.type) is bool}
    separate: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        is_alone = word in switches and following.lower() not in (*TRUE, *FALSE)
        separate.append(f"{word}=true" if is_alone else word)
    return parser.parse_known_intermixed_args(separate)


class FlagParser(argparse.ArgumentParser):
    """argparse that raises a ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        problem = message.removeprefix("argument ")
        about = re.match(r"--(\w+): ", problem)  # argparse names the flag whose value is wrong
        raise ConfigError(problem, try_this=f"{self.prog} --help" + (f" {about[1]}" if about else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            raise wrong_choice(action.dest, value, choices, self.prog)


class FlagHelp(argparse.RawDescriptionHelpFormatter):
    """Help formatter with room for long names, without brackets after switches, and with example lines as written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "" if action.nargs == "?" else super()._format_args(action, default_metavar)


def build_parser(command: type, prog: str) -> FlagParser:
    """Build the parser of a command; --help is not part of it, because `parse_given` answers that first."""
    places = "".join(f" {item.positional} ..." for item in flags_of(command).values() if item.positional)
    parser = FlagParser(
        prog=prog,
        usage=f"{prog}{places} [--flag value ...]",
        description=summary_of(command),
        formatter_class=FlagHelp,
        add_help=False,
        allow_abbrev=False,  # a typo could be accepted as an abbreviation of another flag
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file of flags, without the dashes; flags on the command line override it.",
    )
    parser._negative_number_matcher = NEGATIVE_NUMBER  # argparse's default pattern mistakes -1e-3 for a flag
    groups: dict[str, argparse._ArgumentGroup] = {}
    for item in in_reading_order(command):
        if item.section not in groups:
            groups[item.section] = parser.add_argument_group(item.title)
        name = item.name if item.positional else f"--{item.name}"
        groups[item.section].add_argument(name, **argument_options(item))
    return parser


def argument_options(item: Flag) -> dict[str, Any]:
    """Return the keyword arguments for `add_argument` that match a field's type."""
    kind = without_none(item.type)
    default = "" if item.default is False else default_text(item)
    suffix = " (required)." if item.required else "." if default in ("", "not set") else f" (default: {default})."
    text = item.help.removesuffix(".") + suffix
    options: dict[str, Any] = {"default": item.default, "help": text.replace("%", "%%")}
    if kind is bool:
        return options | {"nargs": "?", "const": True, "type": to_bool}
    if choices := choices_of(item.type):
        return options | {"choices": choices, "type": str}
    if get_origin(kind) is tuple:
        element, second = get_args(kind)[:2]
        metavar = item.positional or METAVARS[element]
        return options | {"nargs": "*" if second is Ellipsis else 2, "type": element, "metavar": metavar}
    return options | {"type": kind, "metavar": METAVARS[kind]}


def to_bool(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise argparse.ArgumentTypeError(f"expected true, false or no value for a switch, got {text!r}")


def file_arguments(command: type, parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """Convert a YAML file to command-line arguments; an error about a key or its value names the file and the line."""
    known = known_spellings(command)
    entries = read_flag_file(path, known)
    if unknown := [entry for entry in entries if entry.name not in known]:
        error = unknown_flags(command, {f"--{entry.name}": as_word(entry.value) for entry in unknown})
        raise ConfigError(f"in --config {path}{at_lines(unknown)}: {error}")
    arguments: list[str] = []
    for entry in entries:
        words = mapping_arguments(command, {entry.name: entry.value})
        try:
            surplus = parse_words(command, parser, rewrite(command, words)[0])[1]
            if surplus:
                raise ConfigError(f"--{entry.name}: expected one value, got {entry.value!r}")
        except ConfigError as error:
            raise ConfigError(f"in --config {path}{at_lines([entry])}: {error}") from None
        arguments += words
    return arguments


def at_lines(entries: Sequence[FileEntry]) -> str:
    """Return `, line 3` or `, lines 3 and 5`."""
    lines = [str(entry.line) for entry in entries]
    return f", {'line' if len(lines) == 1 else 'lines'} {listed(lines)}"


def mapping_arguments(command: type, values: Mapping[str, object]) -> list[str]:
    """Convert flags by name to command-line arguments; None leaves a flag at its default."""
    known, flags = known_spellings(command), flags_of(command)
    if unknown := {f"--{name}": as_word(value) for name, value in values.items() if name not in known}:
        raise unknown_flags(command, unknown)
    arguments: list[str] = []
    for name, value in values.items():
        flag = next(iter(successor(name, flags)), None)
        match value:
            case None:
                pass
            case list() | tuple() if flag and without_none(flags[flag].type) is str:  # such as a list of datasets
                arguments.append(f"--{name}={','.join(map(as_word, value))}")
            case list() | tuple():
                arguments += [f"--{name}", *map(as_word, value)]
            case bool() | Mapping():
                arguments.append(f"--{name}={json.dumps(value)}")
            case _:
                arguments.append(f"--{name}={as_word(value)}")
    return arguments


def as_word(value: object) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
