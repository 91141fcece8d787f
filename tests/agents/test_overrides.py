"""Agents that change sampling parameters: what training accounts for, and what it rejects."""

from dataclasses import replace

import pytest

from openrlhf.agents.overrides import EngineLogProbs, check_overrides, find_mismatch, temperature_factors
from openrlhf.errors import RolloutError
from openrlhf.types import SamplingParams

RUN = SamplingParams(max_tokens=8, temperature=0.5)
RESTRICTED = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
COMPARED, UNUSED = EngineLogProbs(compared=True), EngineLogProbs()


@pytest.mark.parametrize("change", RESTRICTED)
def test_restricted_sampling_is_rejected_if_the_loss_uses_the_engines_log_probs(change):
    asked = [RUN, replace(RUN, **change)]
    name, value = next(iter(change.items()))
    with pytest.raises(RolloutError, match=rf"sampling_params.{name}={value:g} changes the sampling distribution"):
        check_overrides(RUN, asked, COMPARED)
    check_overrides(RUN, asked, UNUSED)
    assert [find_mismatch(RUN, params, UNUSED) for params in asked] == [None, f"{name}={value:g}"]


@pytest.mark.parametrize("change", RESTRICTED)
def test_restricted_sampling_is_accepted_with_log_probs_over_the_whole_vocabulary(change):
    """These are the log-probs of a run with --top_p 0.9, for example."""
    asked = [replace(RUN, **change)]
    for log_probs in (replace(COMPARED, whole=True), replace(COMPARED, whole=True, before_temperature=True)):
        check_overrides(RUN, asked, log_probs)
        check_overrides(asked[0], asked, log_probs)


def test_another_temperature_is_rejected_if_the_log_probs_ignore_it():
    hot = replace(RUN, temperature=0.8)
    check_overrides(RUN, [hot], replace(COMPARED, whole=True))
    with pytest.raises(RolloutError, match=r"temperature=0.8 changes .* Try: leave temperature unchanged"):
        check_overrides(RUN, [hot], replace(COMPARED, whole=True, before_temperature=True))
    check_overrides(hot, [hot], replace(COMPARED, whole=True, before_temperature=True))  # an evaluation


def test_greedy_turn_is_rejected_unless_the_run_is_greedy():
    greedy = replace(RUN, temperature=0.0)
    with pytest.raises(RolloutError, match=r"sampling_params.temperature is 0: expected a number above 0"):
        check_overrides(RUN, [greedy], UNUSED)
    check_overrides(greedy, [greedy], COMPARED)  # an evaluation


def test_temperatures_are_relative_to_the_runs():
    asked = [RUN, replace(RUN, temperature=1.0), replace(RUN, temperature=0.25)]
    assert temperature_factors(RUN, asked) == [1.0, 2.0, 0.5]
    assert temperature_factors(replace(RUN, temperature=0.0), asked) == [1.0, 1.0, 1.0]
