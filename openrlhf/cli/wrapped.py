"""Commands in front of another command line: `openrlhf preview COMMAND ...`, `openrlhf plan COMMAND ...`."""

from collections.abc import Collection, Sequence

from openrlhf.config.suggestions import suggest_commands
from openrlhf.errors import ConfigError


def wrapped_command(wrapper: str, argv: Sequence[str], accepted: Collection[str], expected: str) -> str:
    """Return the command that the first argument names; raise an error with similar names if it is not accepted."""
    name = argv[0].replace("-", "_")
    if name not in accepted:
        near = [line for line in suggest_commands(argv, accepted) if line.split()[0] in accepted]
        fix = " or ".join(f"openrlhf {wrapper} {line}" for line in near) or " or ".join(accepted)
        raise ConfigError(f"{wrapper}: expected {expected}, got {argv[0]}", try_this=fix)
    return name
