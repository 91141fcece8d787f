"""Flags of `openrlhf preview COMMAND`: those of the command, and a few for the preview itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.config.check import check_data
from openrlhf.config.commands import COMMANDS, BatchInferenceConfig, RLConfig, SupervisedConfig
from openrlhf.config.flags import NOT_NEGATIVE, POSITIVE, flag
from openrlhf.config.wrapper import parse_both

ReadsData = SupervisedConfig | RLConfig | BatchInferenceConfig
PREVIEWED: dict[str, type[ReadsData]] = {
    name: config for name, config in COMMANDS.items() if issubclass(config, ReadsData)
}


@dataclass(frozen=True, kw_only=True)
class PreviewFlags:
    """Preview"""

    rows: int = flag(3, "Number of rows to show.", NOT_NEGATIVE, essential=True)
    row_chars: int = flag(2000, "Maximum characters of a prompt or response to show.", POSITIVE)


def parse_preview(name: str, argv: Sequence[str]) -> tuple[ReadsData, PreviewFlags]:
    """Parse and check the flags of `openrlhf preview NAME`; return the command's config and the preview's flags."""
    summary = "Show the data of this command as its model would see it, without loading the model."
    config, own = parse_both(PREVIEWED[name], PreviewFlags, argv, prog=f"openrlhf preview {name}", summary=summary)
    return check_data(config), own
