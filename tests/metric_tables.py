"""The tables of docs/metrics.md, for tests that check which metrics a run logs."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
SUPERVISED = ("train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm")
GROUPS = {"all": (*SUPERVISED, "train_ppo"), "supervised": SUPERVISED}  # train_ppo_ray logs the same as train_ppo


@dataclass(frozen=True)
class Metric:
    """A row of a table; `kind` says whether the metric is logged after steps or after evaluations."""

    kind: str
    name: str
    commands: tuple[str, ...]
    meaning: str
    healthy: str

    def matches(self, name):
        """Return whether this is the metric of that name, in which fields in braces have values."""
        pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


def read_metrics():
    """Return the rows of all tables; those under the heading Evaluation are logged after evaluations."""
    found, title = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, commands, meaning, healthy = (cell.strip() for cell in line.strip("|").split(" | "))
            kind = "eval" if title == "Evaluation" else "train"
            listed = GROUPS.get(commands) or tuple(f"train_{short}" for short in commands.split(", "))
            found.append(Metric(kind, name.strip("`"), listed, meaning, healthy))
    return found


METRICS = read_metrics()


def find_metric(kind, name, command):
    """Return the metric that a command logs under this name; None if the page does not have it."""
    for metric in METRICS:
        if metric.kind == kind and command in metric.commands and metric.matches(name):
            return metric
    return None
