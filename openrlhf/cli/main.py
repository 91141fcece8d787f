"""The program `openrlhf <command>`, equivalent to `python -m openrlhf.cli.<command>`."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version

from openrlhf.cli.entry import command
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import summary_of
from openrlhf.config.suggestions import suggest_commands
from openrlhf.errors import ConfigError

# The order of `openrlhf --help`; a test checks that every command has a group.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Set up": ("doctor", "init", "plan"),
    "Train": (
        *("train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm"),
        *("train_ppo", "train_ppo_ray"),
    ),
    "Look at data and runs": ("preview", "view"),
    "Use a model": ("interactive_chat", "batch_inference", "serve_rm"),
    "Merge and export": ("lora_combiner", "export"),
}
# Commands that take the name and the flags of another command: `openrlhf preview train_sft --dataset ...`.
WRAPPERS = {
    "preview": "Show the data of a command as its model would see it.",
    "plan": "Predict the memory and time of a training command, and which flags to change.",
}
# Command name -> what the command does.
SUMMARIES = {**{name: summary_of(config) for name, config in COMMANDS.items()}, **WRAPPERS}
END = """
openrlhf <command> --help           a typical command line and the essential flags
openrlhf <command> --help all       every flag; --help WORD: a section, a flag, or all flags that mention the word
openrlhf <command> --config FILE    flags from a YAML file; openrlhf init TASK writes one
"""


@command
def main(argv: Sequence[str]) -> None:
    """List the commands, print the version, or pass the remaining arguments to a command."""
    words = list(argv)
    if words[:1] == ["help"] and len(words) > 1:  # `openrlhf help train_sft lora` is `openrlhf train_sft --help lora`
        named = 3 if words[1] in WRAPPERS else 2  # keep `preview train_sft` together
        words = [*words[1:named], "--help", *words[named:]]
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(list_commands())
    elif words[0] == "--version":
        sys.stdout.write(f"openrlhf {version('openrlhf')}\n")
    elif (name := words[0].replace("-", "_")) in SUMMARIES:
        import_module(f"openrlhf.cli.{name}").main(words[1:])
    else:
        near = suggest_commands(words, SUMMARIES) or ["--help"]
        raise ConfigError(f"unknown command {words[0]}", try_this=" or ".join(f"openrlhf {line}" for line in near))


def list_commands() -> str:
    """Return all commands by group, with their descriptions."""
    lines = ["openrlhf <command> [--flag value ...]"]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<18}{SUMMARIES[name]}" for name in names)]
    return "\n".join(lines) + "\n" + END


if __name__ == "__main__":
    main()
