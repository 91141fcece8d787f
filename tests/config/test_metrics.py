"""docs/metrics.md explains every metric once; and the other generated pages are current."""

import pytest

from openrlhf.config.commands import COMMANDS
from tests.metric_tables import METRICS, find_metric
from tools.write_reference import DOCS, PAGES


def test_every_metric_belongs_to_commands_and_is_explained():
    assert len(METRICS) > 90
    for metric in METRICS:
        assert set(metric.commands) <= set(COMMANDS)
        assert metric.meaning.endswith(".")
        assert metric.healthy.endswith(".")
    keys = [(metric.kind, metric.name, command) for metric in METRICS for command in metric.commands]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("kind", "name", "command", "found"),
    [
        ("train", "acc", "train_dpo", "acc"),
        ("train", "acc", "train_sft", None),
        ("eval", "eval_gsm8k_reward", "train_ppo", "eval_{dataset}_reward"),
        ("eval", "eval_a_b_pass16", "train_ppo", "eval_{dataset}_pass{k}"),
        ("eval", "eval_num_samples", "train_ppo", "eval_num_samples"),
        ("train", "rewards", "train_ppo", None),
    ],
)
def test_names_are_looked_up_by_command_with_their_fields(kind, name, command, found):
    metric = find_metric(kind, name, command)
    assert (metric and metric.name) == found


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("name", PAGES)
def test_the_generated_pages_are_current(name):
    current = (DOCS / name).read_text(encoding="utf-8")
    assert current == PAGES[name](), "run: python tools/write_reference.py"
