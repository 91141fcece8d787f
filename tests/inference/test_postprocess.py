"""Scored rows become best answers, pairs or conditional rows."""

import pytest

from openrlhf.config.sections.inference import BatchTaskFlags
from openrlhf.errors import DataError
from openrlhf.inference.postprocess import conditional_rows, preference_pairs, rejection_sampling

PLAIN = BatchTaskFlags()


def rows(*scored, index=None):
    """Return rows of (prompt, answer, reward), with the index of their prompt if given."""
    made = [{"input": prompt, "output": answer, "reward": reward} for prompt, answer, reward in scored]
    return made if index is None else [row | {"index": number} for row, number in zip(made, index, strict=True)]


TWO_PROMPTS = rows(("p", "a", 0.1), ("q", "b", 0.9), ("p", "c", 0.7), ("q", "d", 0.2), ("p", "e", 0.7))


def test_rejection_sampling_keeps_the_first_best_answer():
    assert rejection_sampling(TWO_PROMPTS, PLAIN) == [TWO_PROMPTS[2], TWO_PROMPTS[1]]


def test_pairs_are_made_of_the_best_and_the_worst_answer():
    assert preference_pairs(TWO_PROMPTS, PLAIN) == [
        {"prompt": "p", "chosen": "c", "chosen_reward": 0.7, "rejected": "a", "rejected_reward": 0.1},
        {"prompt": "q", "chosen": "b", "chosen_reward": 0.9, "rejected": "d", "rejected_reward": 0.2},
    ]


def test_equal_prompts_are_distinguished_by_index():
    scored = rows(("p", "a", 1.0), ("p", "b", 2.0), ("p", "c", 3.0), ("p", "d", 0.0), index=[4, 4, 9, 9])
    assert rejection_sampling(scored, PLAIN) == [scored[1], scored[2]]
    assert [(pair["chosen"], pair["rejected"], pair["index"]) for pair in preference_pairs(scored, PLAIN)] == [
        ("b", "a", 4),
        ("c", "d", 9),
    ]


def test_concatenated_files_with_repeated_row_numbers_are_handled():
    scored = rows(("p", "a", 1.0), ("q", "b", 2.0), index=[0, 0])
    assert rejection_sampling(scored, PLAIN) == scored


def test_answers_with_equal_rewards_give_no_pair_and_are_counted(capfd):
    scored = rows(
        *[("equal", "a", 1.0), ("equal", "b", 1.0), ("alone", "a", 3.0)],
        *[("rounding", "same", 1.0), ("rounding", "same", 1.0000001), ("p", "a", 1.0), ("p", "b", 0.0)],
    )
    assert [pair["prompt"] for pair in preference_pairs(scored, PLAIN)] == ["p"]
    assert "iter_dpo: 3 of 4 prompts are skipped" in capfd.readouterr().err


def test_no_pair_at_all_is_an_error():
    with pytest.raises(DataError, match=r"no prompt out of 1 has two answers with different rewards.*--best_of_n"):
        preference_pairs(rows(("p", "a", 1.0), ("p", "b", 1.0)), PLAIN)


def test_conditional_rows_contain_their_reward_in_the_prompt():
    scored = rows(("p", "a", 1.256), ("q ", "b", -3.0), index=[0, 1])
    assert conditional_rows(scored, PLAIN) == rows(
        ("p <rm_score>: 1.26 ", "a", 1.256), ("q <rm_score>: -3.00 ", "b", -3.0), index=[0, 1]
    )


def test_conditional_rewards_are_normalised_with_the_unbiased_deviation():
    made = conditional_rows(
        rows(("p", "a", 1.0), ("q", "b", 2.0), ("r", "c", 6.0)), BatchTaskFlags(normalize_reward=True)
    )
    deviation = 7**0.5  # of 1, 2, 6 with mean 3: (4 + 1 + 9) / 2
    assert [row["reward"] for row in made] == pytest.approx([-2 / deviation, -1 / deviation, 3 / deviation])
    assert made[2]["input"] == f"r <rm_score>: {3 / deviation:.2f} "


@pytest.mark.parametrize("rewards", [[2.0], [2.0, 2.0]])
def test_equal_rewards_are_normalised_to_zero(rewards):
    scored = rows(*(("p", "a", reward) for reward in rewards))
    assert {row["reward"] for row in conditional_rows(scored, BatchTaskFlags(normalize_reward=True))} == {0.0}


def test_a_template_is_used_literally():
    how = BatchTaskFlags(reward_template="[{reward}] {input} ->")
    (row,) = conditional_rows(rows(("say {reward} and {input}", "a", 0.5)), how)
    assert row["input"] == "[0.50] say {reward} and {input} ->"
