"""Agents that change sampling parameters: what training accounts for, and what it rejects."""

from dataclasses import replace

import pytest

from openrlhf.agents.overrides import check_overrides, find_restriction, temperature_factors
from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams

RUN = SamplingParams(max_tokens=8, temperature=0.5)
RESTRICTED = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]


@pytest.mark.parametrize("change", RESTRICTED)
def test_restricted_sampling_is_rejected_if_the_loss_uses_the_engines_log_probs(change):
    asked = [RUN, replace(RUN, **change)]
    name, value = next(iter(change.items()))
    with pytest.raises(RolloutError, match=rf"sampling_params.{name}={value:g} changes the sampling distribution"):
        check_overrides(RUN, asked, compares_engine=True)
    check_overrides(RUN, asked, compares_engine=False)
    assert [find_restriction(params) for params in asked] == [None, f"{name}={value:g}"]


def test_greedy_turn_is_rejected_unless_the_run_is_greedy():
    greedy = replace(RUN, temperature=0.0)
    with pytest.raises(RolloutError, match=r"sampling_params.temperature is 0: expected a number above 0"):
        check_overrides(RUN, [greedy], compares_engine=False)
    check_overrides(greedy, [greedy], compares_engine=True)  # an evaluation


def test_temperatures_are_relative_to_the_runs():
    asked = [RUN, replace(RUN, temperature=1.0), replace(RUN, temperature=0.25)]
    assert temperature_factors(RUN, asked) == [1.0, 2.0, 0.5]
    assert temperature_factors(replace(RUN, temperature=0.0), asked) == [1.0, 1.0, 1.0]
