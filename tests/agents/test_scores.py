import pytest
from sessions import prompt

from openrlhf.agents.scores import Group, Scored, read_scores
from openrlhf.errors import RewardError

TWO = Group(prompt(), ("1+1=2", "1+1=3"), ("2", "3"))
ONE = TWO.part([1])


def test_a_list_is_the_rewards():
    assert read_scores([1, 0.5], TWO, "it") == [Scored(1.0, 1.0), Scored(0.5, 0.5)]


def test_scores_default_to_rewards_and_zero_is_a_score():
    assert read_scores({"rewards": [1.0, 2.0], "scores": [0.0, 0.0]}, TWO, "it") == [Scored(1.0, 0.0), Scored(2.0, 0.0)]
    assert read_scores({"rewards": [1.0, 2.0], "scores": None}, TWO, "it")[1] == Scored(2.0, 2.0)


def test_extra_logs_come_per_sample_or_once_for_all():
    logs = {"length": [3, 4], "mean": 0.5, "one": [True]}
    got = read_scores({"rewards": [1, 2], "extra_logs": logs}, TWO, "it")
    assert [item.extra_logs for item in got] == [
        {"length": 3.0, "mean": 0.5, "one": 1.0},
        {"length": 4.0, "mean": 0.5, "one": 1.0},
    ]


def test_a_lone_number_serves_a_lone_sample():
    assert read_scores(1.0, ONE, "it") == [Scored(1.0, 1.0)]


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (None, "None"), ("x", "'x'")]
)
def test_a_value_that_is_no_finite_number_is_the_error_of_its_sample_alone(value, said):
    good, bad = read_scores([1.0, value], TWO, "it")
    assert good == Scored(1.0, 1.0)
    assert isinstance(bad, RewardError)
    assert said in str(bad)
    assert "prompt 7 '1+1=', response '3'" in str(bad)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "came as None"),
        ("1", "came as '1'"),
        (1.0, "came as 1.0"),
        ([1.0], "has 1 values for 2 samples"),
        ({"reward": [1, 2]}, "without 'rewards': its keys are ['reward']"),
        ({"rewards": [1, 2], "scores": [1]}, "scores has 1 values"),
        ({"rewards": [1, 2], "extra_logs": [1]}, "extra_logs is [1]"),
        ({"rewards": [1, 2], "extra_logs": {"a": [1, 2, 3]}}, "extra_logs 'a'"),
        ({"rewards": [1, 2], "extra_logs": {"a": "x"}}, "extra_logs 'a'"),
    ],
)
def test_a_result_of_the_wrong_shape_is_an_error(result, said):
    with pytest.raises(RewardError) as error:
        read_scores(result, TWO, "it")
    assert said in str(error.value)
