"""The likely cause of a gap between the log-probs of engine and trainer.

`GapWatch` (proof.py) calls `find_cause` once it has measured a gap that is too large. Each cause has its own symptom:

- stale weights: both sides agreed until the weights changed, or the engine agrees with the frozen reference;
- tokenisation: the first turn agrees and later turns do not, or tokenising the prompts again removes the gap;
- temperature: the gap disappears if the trainer uses another temperature;
- top-p, top-k or min-p: the engine renormalises over the tokens that it keeps, so its log-probs are higher;
- precision: small differences in both directions.

The search costs a few forward passes over the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from openrlhf.rl.workers import Workers
from openrlhf.types import RolloutBatch, Trajectory

EXPLAINED = 0.2  # a variant explains the gap if it leaves at most this share of it
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.4, 1.7, 2.0)  # temperatures to try, relative to the trainer's
MOSTLY = 0.97  # share of tokens with a higher log-prob in the engine that suggests truncated sampling
LEAST_TOKENS = 8  # minimum number of tokens to conclude truncated sampling
ONE_SIDED = 0.5  # differences go in both directions if their mean is below this share of their mean size
PRECISION = (
    "--param_dtype fp32 to see whether precision is the cause, --attn_implementation eager, or no --packing_samples"
)

# The samples, each with the differences (engine - trainer) of the log-probs of its action tokens.
Differences = Sequence[tuple[Trajectory, list[float]]]


@dataclass(frozen=True)
class Cause:
    """The likely cause of a gap, and advice to fix it."""

    text: str
    advice: str


@dataclass(frozen=True)
class Comparison:
    """The compared samples, and how to compare them again under other assumptions."""

    batches: Sequence[RolloutBatch]
    differences: Differences
    compare: Callable[[Sequence[torch.Tensor]], Differences]  # differences from other log-probs of the batches
    # The differences after tokenising the prompts again; None if their tokens stay the same or this is not possible.
    with_other_prompts: Callable[[], Awaitable[Differences | None]]


def mean_gap(differences: Differences) -> float:
    """Return the mean size of the differences over all tokens."""
    every = [abs(value) for _, values in differences for value in values]
    return sum(every) / len(every)


async def find_cause(found: Comparison, workers: Workers, *, agreed_before_update: bool) -> Cause:
    """Return the first cause whose symptom is found."""
    gap = mean_gap(found.differences)
    every = [value for _, values in found.differences for value in values]
    if math.isnan(gap):
        return Cause("a log-prob is not a number, in the engine or in the trainer", PRECISION)

    reference = (await workers.score(found.batches, log_probs=False)).reference_log_probs
    is_initial = reference is not None and mean_gap(found.compare(reference)) < EXPLAINED * gap
    if agreed_before_update or is_initial:
        when = "the engine agrees with the reference model" if is_initial else "they agreed until the weights changed"
        return Cause(
            f"stale weights: {when}, so updates or adapters do not reach the engine",
            "--sync_check_every 1, which verifies every weight sync",
        )

    others = await found.with_other_prompts()
    if others is not None and mean_gap(others) < EXPLAINED * gap:
        return Cause(
            "tokenisation: the engine received different tokens for the same prompt texts",
            "a template and tokenizer that give the same tokens in the engine and in the trainer",
        )
    if later_turns_differ(found.differences):
        return Cause(
            "tokenisation: first turns agree but later ones do not, so the trainer has different tokens for the"
            " history",
            "an agent and a template that only append to the history, and never tokenise it again",
        )

    tried: dict[float, float] = {}  # gap by temperature factor
    for factor in FACTORS:
        batches = [replace(batch, temperature_factors=scaled(batch, factor)) for batch in found.batches]
        tried[factor] = mean_gap(found.compare(await workers.log_probs(batches)))
    nearest = min(tried, key=lambda factor: tried[factor])
    if tried[nearest] < EXPLAINED * gap:
        return Cause(
            f"temperature: the engine seems to sample at {nearest:g} times the trainer's temperature, which "
            f"reduces the gap to {tried[nearest]:.2g}",
            "the same --temperature on both sides, and engines without their own sampling defaults",
        )

    higher = sum(value > 0 for value in every)
    if len(every) >= LEAST_TOKENS and higher >= MOSTLY * len(every):
        return Cause(
            f"top-p, top-k or min-p: {higher} of {len(every)} tokens are more probable in the engine, so it seems to "
            "exclude others",
            "engines without their own sampling defaults (generation_config.json)",
        )
    if abs(sum(every)) / len(every) < ONE_SIDED * gap:
        return Cause("precision or kernels: the differences go in both directions", PRECISION)
    return Cause("unknown: neither weights, temperature, top-p nor tokenisation explains it", PRECISION)


def scaled(batch: RolloutBatch, factor: float) -> torch.Tensor:
    """Return the batch's temperature factors, [rows, tokens], times `factor`."""
    given = batch.temperature_factors
    return factor * (torch.ones(batch.input_ids.shape) if given is None else given)


def later_turns_differ(differences: Differences) -> bool:
    """Return whether the gap is in the turns after the first, in samples of several turns."""
    first: list[float] = []
    later: list[float] = []
    for item, values in differences:
        # Number the turns of the action tokens: a turn begins where the mask becomes true.
        begins = np.diff(item.action_mask.astype(np.int8), prepend=0) == 1  # [tokens]
        turns = begins.cumsum()[item.action_mask].tolist()  # one per action token
        for number, value in zip(turns, values, strict=True):
            (first if number == 1 else later).append(abs(value))
    return bool(first and later) and sum(first) / len(first) < EXPLAINED * sum(later) / len(later)
