"""Post-processors of scored rows, selected by --post_processor.

They keep the best answer to each prompt (rejection sampling), form preference pairs (iterative DPO), or write rewards
into prompts (conditional SFT).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.data.answers import INDEX, with_condition
from openrlhf.errors import DataError
from openrlhf.monitor import say

Row = Mapping[str, Any]  # keys: input, output, reward and usually index
CONDITION = "<rm_score>: {reward}"


@dataclass(frozen=True)
class Conditioning:
    """Settings for writing a reward into a prompt; without a template, the format is that of --enable_csft."""

    template: str | None = None
    normalize: bool = False


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the answers by prompt, in order of first appearance.

    A prompt is identified by its row number and its text. Without row numbers, equal texts are the same prompt; with
    them, files that each start counting at 0 can still be concatenated.
    """
    found: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        found.setdefault((row.get(INDEX), row["input"]), []).append(row)
    return list(found.values())


def best(group: Sequence[Row]) -> Row:
    return max(group, key=lambda row: row["reward"])  # the first one in a tie


def rejection_sampling(rows: Sequence[Row], _: Conditioning) -> list[Row]:
    """Keep the best answer to each prompt."""
    return [best(group) for group in groups(rows)]


def preference_pairs(rows: Sequence[Row], _: Conditioning) -> list[Row]:
    """Pair the best and the worst answer to each prompt; prompts whose answers are equally good give no pair."""
    together = groups(rows)
    pairs = [pair for pair in map(preference_pair, together) if pair is not None]
    without = len(together) - len(pairs)
    if not pairs:
        raise DataError(
            f"none of {len(together)} prompts has two answers of different reward, so there is no pair",
            try_this="answers made with --best_of_n 4 or more and a --temperature above 0",
        )
    if without:
        say(f"iter_dpo: {without} of {len(together)} prompts give no pair, since their answers are equally good")
    return pairs


def preference_pair(group: Sequence[Row]) -> Row | None:
    """Return the best and the worst answer as a DPO row; None if they have equal rewards or equal texts."""
    chosen, rejected = best(group), min(group, key=lambda row: row["reward"])
    # The same answer may get slightly different rewards in different batches, because of rounding.
    if chosen["reward"] == rejected["reward"] or chosen["output"] == rejected["output"]:
        return None
    pair = {
        "prompt": chosen["input"],
        "chosen": chosen["output"],
        "chosen_reward": chosen["reward"],
        "rejected": rejected["output"],
        "rejected_reward": rejected["reward"],
    }
    return pair | ({INDEX: chosen[INDEX]} if INDEX in chosen else {})


def conditional_rows(rows: Sequence[Row], how: Conditioning) -> list[Row]:
    """Return every row with its reward written into its prompt."""
    rewards = [float(row["reward"]) for row in rows]
    if how.normalize:
        rewards = standardised(rewards)
    return [
        {**row, "input": conditioned(row["input"], reward, how.template), "reward": reward}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def conditioned(prompt: str, reward: float, template: str | None) -> str:
    """Write the reward, with two decimals, into the prompt."""
    shown = f"{reward:.2f}"
    if template is None:
        return with_condition(prompt, CONDITION.replace("{reward}", shown))
    before, _, after = template.partition("{input}")  # the prompt itself may contain {reward}
    return before.replace("{reward}", shown) + prompt + after.replace("{reward}", shown)


def standardised(rewards: Sequence[float]) -> list[float]:
    """Shift and scale to mean 0 and unbiased standard deviation 1; rewards that are all equal become 0."""
    mean = statistics.fmean(rewards)
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - mean) / spread if spread else 0.0 for reward in rewards]


POST_PROCESSORS: dict[str, Callable[[Sequence[Row], Conditioning], list[Row]]] = {
    "rs": rejection_sampling,
    "iter_dpo": preference_pairs,
    "csft": conditional_rows,
}
