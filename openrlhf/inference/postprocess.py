"""Post-processors of scored rows, selected by --post_processor.

They keep the best answer to each prompt (rejection sampling), form preference pairs (iterative DPO), or write rewards
into prompts (conditional SFT). Each is a pure function that converts scored rows to output rows for a training command.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NotRequired, TypedDict

from openrlhf.config.sections.inference import BatchTaskFlags
from openrlhf.data.answers import with_condition
from openrlhf.errors import DataError
from openrlhf.inference.parts import Row
from openrlhf.monitor import say

CONDITION = "<rm_score>: {reward}"


class ScoredRow(TypedDict):
    """An answer and its reward, as `score` writes them."""

    input: str  # the prompt
    output: str  # the answer
    reward: float
    index: NotRequired[int | str]  # row number of the prompt in its dataset, if known


def group_by_prompt(rows: Iterable[ScoredRow]) -> list[list[ScoredRow]]:
    """Group the answers by prompt, in order of first appearance.

    A prompt is identified by its row number and its text, so that files with the same row numbers can be concatenated.
    Without row numbers, equal texts are the same prompt.
    """
    found: dict[tuple[int | str | None, str], list[ScoredRow]] = {}
    for row in rows:
        found.setdefault((row.get("index"), row["input"]), []).append(row)
    return list(found.values())


def best(group: Sequence[ScoredRow]) -> ScoredRow:
    return max(group, key=lambda row: row["reward"])  # the first one in a tie


def rejection_sampling(rows: Sequence[ScoredRow], _: BatchTaskFlags) -> Sequence[Row]:
    """Keep the best answer to each prompt."""
    return [best(group) for group in group_by_prompt(rows)]


def preference_pairs(rows: Sequence[ScoredRow], _: BatchTaskFlags) -> Sequence[Row]:
    """Pair the best and the worst answer to each prompt; skip prompts whose answers are equally good."""
    groups = group_by_prompt(rows)
    pairs: list[Row] = []
    for group in groups:
        chosen, rejected = best(group), min(group, key=lambda row: row["reward"])
        # Rounding may give the same answer slightly different rewards in different batches.
        if chosen["reward"] == rejected["reward"] or chosen["output"] == rejected["output"]:
            continue
        pair = {
            "prompt": chosen["input"],
            "chosen": chosen["output"],
            "chosen_reward": chosen["reward"],
            "rejected": rejected["output"],
            "rejected_reward": rejected["reward"],
        }
        pairs.append(pair | ({"index": chosen["index"]} if "index" in chosen else {}))
    if not pairs:
        raise DataError(
            f"no prompt out of {len(groups)} has two answers with different rewards, so there are no pairs",
            try_this="answers generated with --best_of_n 4 or more and a --temperature above 0",
        )
    if without := len(groups) - len(pairs):
        say(f"iter_dpo: {without} of {len(groups)} prompts are skipped, because their answers are equally good")
    return pairs


def conditional_rows(rows: Sequence[ScoredRow], flags: BatchTaskFlags) -> Sequence[Row]:
    """Return every row with its reward written into its prompt."""
    rewards = [float(row["reward"]) for row in rows]
    if flags.normalize_reward:  # scale to mean 0 and unbiased std 1; equal rewards become 0
        mean = statistics.fmean(rewards)
        spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        rewards = [(reward - mean) / spread if spread else 0.0 for reward in rewards]
    return [
        {**row, "input": add_reward(row["input"], reward, flags.reward_template), "reward": reward}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def add_reward(prompt: str, reward: float, template: str | None) -> str:
    """Write the reward, with two decimals, into the prompt."""
    shown = f"{reward:.2f}"
    if template is None:
        return with_condition(prompt, CONDITION.replace("{reward}", shown))
    before, _, after = template.partition("{input}")  # the prompt itself may contain {reward}
    return before.replace("{reward}", shown) + prompt + after.replace("{reward}", shown)


POST_PROCESSORS: dict[str, Callable[[Sequence[ScoredRow], BatchTaskFlags], Sequence[Row]]] = {
    "rs": rejection_sampling,
    "iter_dpo": preference_pairs,
    "csft": conditional_rows,
}
