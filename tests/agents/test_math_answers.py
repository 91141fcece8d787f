"""Extraction and grading of mathematical answers, with math-verify and without it."""

import threading
import time

import pytest

from openrlhf.agents import math_answers
from openrlhf.utils import extract_boxed_answer, grade_answer, math_utils


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1}, or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x} and \fbox{ y }", "y"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a{b}c", None),
        ("no box", None),
        ("", None),
        (None, None),
    ],
)
def test_last_closed_box_is_the_answer(response, answer):
    assert extract_boxed_answer(response) == answer


AS_TEXT_OR_NUMBER = [
    ("42", "42.0", True),
    (" 42. ", 42, True),
    (r"\frac{1}{2}", "0.5", True),
    (r"-\dfrac12", "-.5", True),
    ("1,234", "1234", True),
    (r"\$3.50", "7/2", True),
    (r"50\%", "50", True),
    (r"90^\circ", "90", True),
    (r"\boxed{\text{Paris}}", "paris", True),
    (r"\left(1,\, 2\right)", "(1,2)", True),
    ("(1,2)", "(2,1)", False),
    ("1/0", "2", False),
    ("", "", False),
    (None, "3", False),
    ("3", None, False),
]
AS_MATHEMATICS = [
    (r"\frac{\sqrt{4}}{2}", "1", True),
    ("x^2+2x+1", "(x+1)^2", True),
    (r"2\frac{1}{2}", "2.5", True),
    (r"2\frac{1}{2}", "10.5", False),
    (r"2\pi", r"\pi \cdot 2", True),
    (r"\pi", "3.14", False),
    ("abc", "abd", False),
]


@pytest.mark.parametrize(("given", "truth", "equal"), [*AS_TEXT_OR_NUMBER, *AS_MATHEMATICS])
def test_answers_are_compared_as_text_numbers_and_expressions(given, truth, equal):
    assert grade_answer(given, truth) is equal


@pytest.mark.parametrize(("given", "truth", "equal"), AS_TEXT_OR_NUMBER)
def test_without_math_verify_texts_and_numbers_are_compared(given, truth, equal, monkeypatch):
    monkeypatch.setattr(math_answers, "has_math_verify", lambda: False)
    assert grade_answer(given, truth) is equal


def test_without_math_verify_expressions_are_compared_as_text(monkeypatch):
    monkeypatch.setattr(math_answers, "has_math_verify", lambda: False)
    assert not grade_answer("x^2+2x+1", "(x+1)^2")
    assert grade_answer("x^2 + 1", "x^2+1")


def test_grading_works_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(grade_answer("x^2+2x+1", "(x+1)^2")))
    thread.start()
    thread.join()
    assert found == [True]


def test_both_import_paths_give_the_same_functions():
    assert math_utils.grade_answer is grade_answer
    assert math_utils.extract_boxed_answer is extract_boxed_answer


@pytest.mark.parametrize("answer", ["1" * 5000, "0." + "1" * 5000, "1/" + "1" * 5000, r"\frac{1}{" + "1" * 5000 + "}"])
def test_a_number_with_thousands_of_digits_is_wrong_and_not_an_error(answer):
    assert not grade_answer(answer, "42")


def test_many_open_boxes_take_linear_time():
    began = time.monotonic()
    assert extract_boxed_answer(r"\boxed{1}" + r"\boxed{" * 6000) == "1"
    assert time.monotonic() - began < 5
