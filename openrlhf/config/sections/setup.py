"""Flags of the commands that prepare a machine and a first run: init and doctor."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag

Task = Literal["sft", "rm", "dpo", "kto", "kd", "prm", "ppo", "grpo", "reinforce", "rloo", "agent"]


@dataclass(frozen=True, kw_only=True)
class InitFlags:
    """Task and file"""

    task: Task | None = flag(None, "What to train; --task may be left out: openrlhf init grpo.", required="grpo")
    output: str | None = flag(
        None,
        "YAML file to write (default: standard output); a task with a reward function or an agent also gets that file, "
        "next to it.",
        essential=True,
    )
    overwrite: bool = flag(False, "Replace files that exist.", needs="output", essential=True)


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Report"""

    online: bool = flag(False, "Also try to reach the Hugging Face Hub.", essential=True)
    json: bool = flag(False, "Print the findings as JSON instead of a table.", essential=True)
