"""The answers to --help: the essential flags, all of them, a section, a word, or one flag in full.

    openrlhf train_ppo --help                   a typical command line and the essential flags
    openrlhf train_ppo --help all               every flag
    openrlhf train_ppo --help lora              a section, or every flag whose name or help has this word
    openrlhf train_ppo --help learning_rate     one flag: default, range, choices, other spellings
    openrlhf train_ppo --help num_generations   our flag for a name of another framework

All of it comes from the declarations of the flags and the docstrings of the commands; argparse does the layout.
"""

import argparse
import difflib
import re
from collections.abc import Collection, Sequence
from textwrap import indent
from typing import get_args, get_origin

from openrlhf.config.aliases import known_spellings, successor
from openrlhf.config.flags import Flag, choices_of, flags_of, typical_use, without_none
from openrlhf.config.suggestions import suggest
from openrlhf.errors import ConfigError

ALL = "all"
MORE = "--help all shows every flag; --help WORD shows a section, a flag, or all flags that mention the word."


def asked_topic(argv: Sequence[str]) -> str | None:
    """Return the word after --help or -h, "" if there is none, and None if no help is asked for."""
    for position, word in enumerate(argv):
        name, _, attached = word.partition("=")
        if name in ("-h", "--help"):
            following = argv[position + 1] if position + 1 < len(argv) else ""
            return attached or ("" if following.startswith("-") else following)
    return None


def help_text(command: type, parser: argparse.ArgumentParser, topic: str = "") -> str:
    """Return the help of a command on a topic; `parser` is its parser, whose layout is used."""
    flags = flags_of(command)
    if topic == ALL:
        return laid_out(parser, [*flags, "config"])
    if not topic:
        essential = [name for name, item in flags.items() if item.essential or item.required]
        parser.description = f"{parser.description}\n\ntypical use:\n{indent(typical_use(command, parser.prog), '  ')}"
        if len(essential) < len(flags):
            parser.epilog = f"{len(essential)} of {len(flags)} flags. {MORE}"
        return laid_out(parser, [*essential, "config"])
    word = topic.lower().lstrip("-").replace("-", "_")
    if word in flags:
        return flag_in_full(flags[word], other_spellings(command, word))
    found = in_section(flags.values(), word) or mentioning(flags.values(), word)
    if not found and (current := successor(word, flags)):  # an older or dotted spelling
        return help_text(command, parser, current[0])
    if suggested := suggest(word, flags):  # a name of another framework
        line = f"{word} in other frameworks: {suggested}"
        if not found:
            return f"{line}\n\n{flag_in_full(flags[suggested.flag], other_spellings(command, suggested.flag))}"
        parser.epilog = line
        found = [*found, suggested.flag]
    if not found:
        near = difflib.get_close_matches(word, [*flags, *(item.section for item in flags.values())], n=1)
        raise ConfigError(
            f"no section or flag of {parser.prog} mentions {topic!r}",
            try_this=f"{parser.prog} --help {near[0] if near else ALL}",
        )
    return laid_out(parser, found)


def in_section(flags: Collection[Flag], word: str) -> list[str]:
    """Return the flags of the sections that this word names, and flags elsewhere whose name contains it."""
    sections = {item.section for item in flags if word in (item.section, *re.findall(r"\w+", item.title.lower()))}
    named = [item.name for item in flags if item.section in sections or word in item.name.split("_")]
    return named if sections else []


def mentioning(flags: Collection[Flag], word: str) -> list[str]:
    """Return the flags whose name or help contains this text."""
    text = word.replace("_", " ")
    return [item.name for item in flags if word in item.name or text in item.help.lower().replace("-", " ")]


def laid_out(parser: argparse.ArgumentParser, shown: Collection[str]) -> str:
    """Return argparse's help with only these flags."""
    for action in parser._actions:
        if action.dest not in shown and action.option_strings:
            action.help = argparse.SUPPRESS
    return parser.format_help()


def flag_in_full(item: Flag, spellings: Sequence[str]) -> str:
    """Return everything that is known about one flag."""
    kind = without_none(item.type)
    needed = " or ".join(f"--{name}" for name in item.needed)
    facts = {
        "section": item.title,
        "default": "" if item.required else default_text(item),
        "required": f"yes; for example --{item.name} {item.required}" if item.required else "",
        "choices": ", ".join(choices_of(item.type)),
        "range": item.within.wanted if item.within else "",
        "values": values_text(kind),
        "needs": f"{needed}; without it, this flag has no effect" if needed else "",
        "also": ", ".join(f"--{name}" for name in spellings),
    }
    lines = [f"  {name:<10}{text}" for name, text in facts.items() if text]
    return "\n".join([f"--{item.name}", f"  {item.help}", "", *lines, ""])


def default_text(item: Flag) -> str:
    """Return a default as it would be typed; "not set" for one that is empty."""
    if item.default is None or item.default in ("", ()):
        return "not set"
    if isinstance(item.default, bool):
        return str(item.default).lower()
    shown = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
    # Quotes show where a value with spaces ends.
    return repr(item.default) if isinstance(item.default, str) and " " in item.default else repr(shown).strip("'")


def values_text(kind: object) -> str:
    """Say how the values of a switch or a list are written."""
    if kind is bool:
        return "a switch: alone or followed by true or false"
    if get_origin(kind) is tuple:
        return "a list, separated by spaces" if get_args(kind)[1] is Ellipsis else "two values, separated by a space"
    return ""


def other_spellings(command: type, name: str) -> list[str]:
    """Return the older and dotted names of a flag that the command also accepts."""
    flags = flags_of(command)
    return [other for other in known_spellings(command) if other != name and successor(other, flags)[:1] == [name]]
