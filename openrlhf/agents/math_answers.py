r"""Extract mathematical answers from responses, and compare them with a reference.

Two answers agree if they are the same number, or the same text after removing meaningless notation. If the
package math-verify is installed, they also agree if they are mathematically equal, such as `\frac{\sqrt{4}}{2}` and 1,
or `(x+1)^2` and its expansion. Reward files import these functions from `openrlhf.utils`.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from functools import cache
from importlib.util import find_spec

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"[{}]")
MAX_DIGITS = 1000  # maximum digits of a number; Python refuses to convert much longer ones
SECONDS = 5  # time limit of math-verify per answer

# Notation that is removed or rewritten before answers are compared.
DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\(?:text|mathrm|mathbf)\s*\{\s*\}|\\\$|\$|\\%|%|\s+|\^\s*\{?\\circ\}?")
WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"(\d)?\\[dt]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")


def extract_boxed_answer(solution: str | None) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces, or None."""
    text = solution or ""
    starts = {match.end() for match in BOXED.finditer(text)}
    opened: list[int] = []  # start of the content of each brace that is open
    closed: dict[int, int] = {}  # start -> end of the content of each closed box
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in starts:
            closed[start] = brace.start()
    return text[max(closed) : closed[max(closed)]].strip() if closed else None


def grade_answer(given_answer: object, ground_truth: object) -> bool:
    """Return True if an answer agrees with the reference; False if either is None."""
    if given_answer is None or ground_truth is None:
        return False
    given, truth = (bare(str(answer)) for answer in (given_answer, ground_truth))
    if not given or not truth:
        return False
    if given == truth:
        return True
    numbers = number(given), number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return equal_as_mathematics(str(given_answer), str(ground_truth))


def bare(answer: str) -> str:
    """Strip the box and meaningless notation from an answer."""
    boxed = extract_boxed_answer(answer)
    text = (answer if boxed is None else boxed).strip().rstrip(".")
    text = DROPPED.sub("", WRAPPED.sub(r"\1", text))
    return THOUSANDS.sub("", FRACTION.sub(as_quotient, text)).lower()


def as_quotient(fraction: re.Match[str]) -> str:
    """Rewrite a LaTeX fraction as a/b, or a mixed number as n+a/b."""
    whole, *parts = fraction.groups()
    above, below = filter(None, parts)
    return f"{f'{whole}+' if whole else ''}{above}/{below}"


def number(text: str) -> Fraction | None:
    """Parse an integer, a decimal or a fraction; return None for anything else."""
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text):
        return None
    above, _, below = text.partition("/")
    return None if below and not int(below) else Fraction(above) / Fraction(below or 1)


def equal_as_mathematics(given: str, truth: str) -> bool:
    """Compare two answers with math-verify; return False if it is not installed.

    Its time limit uses a signal, which works only in the main thread; in other threads there is no limit.
    """
    if not has_math_verify():
        return False
    from math_verify import parse, verify

    limit = SECONDS if threading.current_thread() is threading.main_thread() else 0  # 0: no limit

    def in_box(answer: str) -> str:
        boxed = extract_boxed_answer(answer)
        return f"\\boxed{{{answer if boxed is None else boxed}}}"

    expected, answered = (parse(in_box(answer), parsing_timeout=limit) for answer in (truth, given))
    return bool(verify(expected, answered, timeout_seconds=limit))


@cache
def has_math_verify() -> bool:
    return find_spec("math_verify") is not None
