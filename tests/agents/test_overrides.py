"""Agents that change how their tokens are drawn: what training is told, and what it cannot follow."""

from dataclasses import replace

import pytest

from openrlhf.agents.overrides import check_overrides, find_restriction, temperature_factors
from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams

OWN = SamplingParams(max_tokens=8, temperature=0.5)
BENT = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]


@pytest.mark.parametrize("change", BENT)
def test_what_bends_the_distribution_is_refused_where_the_engines_log_probs_count(change):
    asked = [OWN, replace(OWN, **change)]
    name, value = next(iter(change.items()))
    with pytest.raises(RolloutError, match=rf"sampling_params.{name}={value:g} changes which tokens can be sampled"):
        check_overrides(OWN, asked, compares_engine=True)
    check_overrides(OWN, asked, compares_engine=False)
    assert [find_restriction(params) for params in asked] == [None, f"{name}={value:g}"]


def test_a_turn_without_chance_is_refused_unless_all_are_so():
    greedy = replace(OWN, temperature=0.0)
    with pytest.raises(RolloutError, match=r"sampling_params.temperature is 0: expected a number above 0"):
        check_overrides(OWN, [greedy], compares_engine=False)
    check_overrides(greedy, [greedy], compares_engine=True)  # an evaluation


def test_temperatures_are_factors_on_the_runs_own():
    asked = [OWN, replace(OWN, temperature=1.0), replace(OWN, temperature=0.25)]
    assert temperature_factors(OWN, asked) == [1.0, 2.0, 0.5]
    assert temperature_factors(replace(OWN, temperature=0.0), asked) == [1.0, 1.0, 1.0]
