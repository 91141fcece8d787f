"""Parser for untrusted JSON from dataset files, models, servers and clients.

All JSON that this package did not write is parsed by `parse_json`. It either returns a value that all later code can
use, or raises `InvalidJSON`, which the caller turns into its own error. `json.loads` alone is not enough: it raises
three kinds of exceptions, and it returns values on which later code fails, such as a lone surrogate, which no
tokenizer accepts, or an object that is nested too deeply to be compared, printed or serialised.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 100  # maximum levels of nested lists and objects
SURROGATE = re.compile("[\ud800-\udfff]")  # in a Python string, always half of a pair
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # escape of a surrogate, alone or in a pair


class InvalidJSON(ValueError):
    """Raised for text that is not usable JSON; contains the line and column of a syntax error."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(problem if column is None else f"{problem} at line {line} column {column}")
        self.problem = problem
        self.line = line
        self.column = column


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Parse JSON; raise InvalidJSON for every kind of bad input, with `finite` also for NaN and infinite numbers."""
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text))
        elif not text.isascii():
            text.encode()
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidJSON(error.msg, error.lineno, error.colno) from None
    except UnicodeError as error:  # bytes of another encoding, or a lone surrogate
        raise InvalidJSON(str(error)) from None
    except ValueError:  # Python does not convert very long numbers, because that takes quadratic time
        raise InvalidJSON("a number has thousands of digits") from None
    except RecursionError:
        raise InvalidJSON(f"lists and objects nest deeper than {MAX_DEPTH} levels") from None
    # Most texts need no check of their values, and counting brackets is far cheaper than visiting all values.
    if finite or text.count("[") + text.count("{") > MAX_DEPTH or HALF_PAIR.search(text):
        check_values(value, finite=finite)
    return value


def check_values(value: object, *, finite: bool) -> None:
    """Raise InvalidJSON for deep nesting, lone surrogates and, with `finite`, NaN and infinity."""
    level, depth = [value], 1
    while level:
        inner: list[object] = []
        for item in level:
            if depth > MAX_DEPTH and isinstance(item, (dict, list)):
                raise InvalidJSON(f"lists and objects nest deeper than {MAX_DEPTH} levels")
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and SURROGATE.search(item):
                raise InvalidJSON("a string contains half of a surrogate pair")
            elif finite and isinstance(item, float) and not math.isfinite(item):
                raise InvalidJSON(f"expected finite numbers, got {item}")
        level, depth = inner, depth + 1


def exact_json(value: object) -> str | None:
    """Return the JSON text that parses to an equal value of the same types; None if there is none."""
    return json.dumps(value) if is_exact(value) else None


def is_exact(value: object) -> bool:
    """Return whether a value survives JSON unchanged; tuples, keys that are not text, and other types do not."""
    if type(value) is dict:
        return all(type(key) is str and is_exact(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_exact, value))
    return value is None or type(value) in (str, int, float, bool)
