"""Flags of `openrlhf plan COMMAND`: those of the command, and a few that describe the machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.config.check import check_sizes
from openrlhf.config.commands import COMMANDS, TrainingConfig
from openrlhf.config.flags import POSITIVE, flag
from openrlhf.config.wrapper import parse_both

PLANNED: dict[str, type[TrainingConfig]] = {
    name: config for name, config in COMMANDS.items() if issubclass(config, TrainingConfig)
}


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Plan"""

    gpus: str | None = flag(
        None, "GPUs of a node, such as 8xH100 or A100-40 (default: those of this machine).", essential=True
    )
    nodes: int = flag(1, "Number of nodes.", POSITIVE, essential=True)
    host_memory: float | None = flag(None, "Host memory of a node in GiB (default with --gpus: unknown).", POSITIVE)
    network: float = flag(400.0, "Speed of a node's network in Gbit/s.", POSITIVE)
    json: bool = flag(False, "Print the plan as JSON; sizes are in bytes.", essential=True)


def parse_plan(name: str, argv: Sequence[str]) -> tuple[TrainingConfig, PlanFlags]:
    """Parse and check the flags of `openrlhf plan NAME`; return the command's config and the plan's flags."""
    summary = "Predict the memory and time of this command, from its flags and config.json alone."
    config, own = parse_both(PLANNED[name], PlanFlags, argv, prog=f"openrlhf plan {name}", summary=summary)
    return check_sizes(config), own
