import pytest
from sessions import prompt

from openrlhf.agents.scores import Samples, Scored, read_scores
from openrlhf.errors import RewardError

TWO = Samples((prompt(), prompt()), ("1+1=2", "1+1=3"), ("2", "3"))
ONE = TWO.part([1])


def test_list_is_read_as_rewards():
    assert read_scores([1, 0.5], TWO, "it") == [Scored(1.0, 1.0), Scored(0.5, 0.5)]


def test_scores_default_to_rewards_and_may_be_zero():
    assert read_scores({"rewards": [1.0, 2.0], "scores": [0.0, 0.0]}, TWO, "it") == [Scored(1.0, 0.0), Scored(2.0, 0.0)]
    assert read_scores({"rewards": [1.0, 2.0], "scores": None}, TWO, "it")[1] == Scored(2.0, 2.0)


def test_extra_logs_are_per_sample_or_shared():
    logs = {"length": [3, 4], "mean": 0.5, "one": [True]}
    got = read_scores({"rewards": [1, 2], "extra_logs": logs}, TWO, "it")
    assert [item.extra_logs for item in got] == [
        {"length": 3.0, "mean": 0.5, "one": 1.0},
        {"length": 4.0, "mean": 0.5, "one": 1.0},
    ]


def test_single_number_scores_a_single_sample():
    assert read_scores(1.0, ONE, "it") == [Scored(1.0, 1.0)]


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "nan"), (float("-inf"), "-inf"), (-(10**400), "-inf"), (None, "None"), ("x", "'x'")],
)
def test_non_finite_value_fails_only_its_sample(value, message):
    good, bad = read_scores([1.0, value], TWO, "it")
    assert good == Scored(1.0, 1.0)
    assert isinstance(bad, RewardError)
    assert message in str(bad)
    assert "prompt 7 '1+1=', response '3'" in str(bad)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "got None"),
        ("1", "got '1'"),
        (1.0, "got 1.0"),
        ([1.0], "has 1 value for 2 samples"),
        ({"reward": [1, 2]}, "without 'rewards': its keys are ['reward']"),
        ({"rewards": [1, 2], "scores": [1]}, "scores has 1 value "),
        ({"rewards": [1, 2], "extra_logs": [1]}, "extra_logs is [1]"),
        ({"rewards": [1, 2], "extra_logs": {"a": [1, 2, 3]}}, "extra_logs 'a'"),
        ({"rewards": [1, 2], "extra_logs": {"a": "x"}}, "extra_logs 'a'"),
    ],
)
def test_malformed_result_is_an_error(result, message):
    with pytest.raises(RewardError) as error:
        read_scores(result, TWO, "it")
    assert message in str(error.value)
