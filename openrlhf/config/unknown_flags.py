"""Errors about unknown flags and values, each with a suggestion of what to write instead.

All unknown flags of a command line are reported together, because a user who comes from another framework often has
several of them. `suggestions.py` has the names that other frameworks use.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from openrlhf.config.aliases import known_spellings
from openrlhf.config.flags import choices_of, flags_of
from openrlhf.config.suggestions import UNNEEDED, suggest, suggest_choice
from openrlhf.errors import ConfigError, listed

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)
ALL_FLAGS = "--help all for all flags"
MANY = 3  # answers that get their own lines
NEARLY = 0.15  # also suggest names whose similarity (0 to 1) is at most this much below the best


def unknown_words(command: type, words: Sequence[str]) -> ConfigError:
    """Build the error about the words of a command line that are neither flags nor their values."""
    flags: dict[str, str] = {}
    for word in words:
        if word.startswith("-") and not NEGATIVE_NUMBER.match(word):
            name, _, value = word.partition("=")
            flags.setdefault(name, value)
        elif flags:
            *_, last = flags
            flags[last] = flags[last] or word
    if not flags:
        fix = "put quotes around values with spaces"
        required = [item.name for item in flags_of(command).values() if item.required]
        if required and Path(words[0]).exists():  # `openrlhf export ./model`
            fix = f"--{required[0]} {words[0]}"
        return ConfigError(f"expected a flag, got {words[0]!r}", try_this=fix)
    return unknown_flags(command, flags)


def unknown_flags(command: type, given: Mapping[str, str]) -> ConfigError:
    """Build the error about unknown flags, as typed, with their values."""
    unneeded = [flag for flag in given if flag.lstrip("-") in UNNEEDED]
    hints = {
        flag: what_to_write(command, flag.lstrip("-"), value) for flag, value in given.items() if flag not in unneeded
    }
    if len(given) == 1:
        (flag,) = given
        fix = "leave it out, since nothing here needs it" if unneeded else hints[flag] or ALL_FLAGS
        return ConfigError(f"{flag} is not a flag of this command", try_this=fix)
    fixes = [f"{hint} instead of {flag}" for flag, hint in hints.items() if hint]
    if unneeded:
        fixes.append(f"leave out {', '.join(unneeded)}")
    if not all(hints.values()):
        fixes.append(ALL_FLAGS)
    fix = "; ".join(fixes) if len(fixes) < MANY else "".join(f"\n  {item}" for item in fixes)
    return ConfigError(f"{listed([*given])} are not flags of this command", try_this=fix)


def what_to_write(command: type, name: str, value: str) -> str | None:
    """Return our flag for a name used elsewhere (and our value, if it also differs), or else similar flags."""
    flags = flags_of(command)
    if suggested := suggest(name, flags):
        choices = choices_of(flags[suggested.flag].type)
        with_value = suggest_choice(suggested.flag, value, choices) if value and choices else None
        return with_value or str(suggested)
    known = ["config", *(spelling for spelling in known_spellings(command) if "." in name or "." not in spelling)]
    near = [match for match in known if match.startswith(name)][:3]
    near = near or nearest(name, known)
    return " or ".join(f"--{match}" for match in near) or None


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the most similar names; a name that is much less similar than the best one is left out."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    alike = [difflib.SequenceMatcher(None, name, match).ratio() for match in near]
    return [match for match, ratio in zip(near, alike, strict=True) if ratio > alike[0] - NEARLY]


def wrong_choice(flag: str, given: str, choices: Sequence[str], prog: str) -> ConfigError:
    """Build the error about a value that is not among a flag's choices."""
    return ConfigError(
        f"--{flag}: expected {listed(choices, 'or')}, got {given!r}",
        try_this=suggest_choice(flag, given, choices) or f"{prog} --help {flag}",
    )
