"""Flags of `openrlhf preview COMMAND`: those of the command, and a few for the preview itself."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass

from openrlhf.config.check import check_data
from openrlhf.config.checks.common import numbers_are_in_range
from openrlhf.config.commands import COMMANDS, BatchInferenceConfig, RLConfig, SupervisedConfig
from openrlhf.config.flags import NOT_NEGATIVE, POSITIVE, flag, section
from openrlhf.config.parser import parse

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
    command = PREVIEWED[name]
    config = parse(with_preview_flags(command), argv, prog=f"openrlhf preview {name}")
    numbers_are_in_range(config)
    own = command(**{part.name: getattr(config, part.name) for part in fields(command)})
    return check_data(own), config.preview


def with_preview_flags(command: type[ReadsData]) -> type:
    """Return a copy of a command's config with one more section."""
    return make_dataclass(
        command.__name__,
        [("preview", PreviewFlags, section(PreviewFlags))],
        bases=(command,),
        namespace={"__doc__": "Show the data of this command as its model would see it, without loading the model."},
        frozen=True,
        kw_only=True,
    )
