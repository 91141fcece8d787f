"""The common path of every command, from its arguments to its exit code.

`make_main` builds the entry point of a command: `start` parses and checks the flags and prints the batch table, then
the module that RUNS names does the work. The `command` decorator turns errors into one line and an exit code.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, Protocol

from openrlhf.cli.signals import INTERRUPTED, at_work, end_at_once
from openrlhf.config.batch_table import render, rl_table, supervised_table
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS, RLConfig, SupervisedConfig
from openrlhf.config.parser import parse_given
from openrlhf.errors import OpenRLHFError
from openrlhf.monitor import is_main_process, say

# Set by torchrun and deepspeed. Ray workers inherit the driver's environment and would try to join the launch.
LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)


RUNS = {  # the module whose `run` takes the checked config
    **dict.fromkeys(
        ("train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm"), "openrlhf.training.supervised"
    ),
    **dict.fromkeys(("train_ppo", "train_ppo_ray"), "openrlhf.cluster.launch"),
    "batch_inference": "openrlhf.inference.batch_inference",
    "interactive_chat": "openrlhf.inference.chat",
    "serve_rm": "openrlhf.inference.serve",
    "lora_combiner": "openrlhf.inference.merge",
}


class Main(Protocol):
    """A command's entry point; without `argv` it reads sys.argv."""

    def __call__(self, argv: Sequence[str] | None = None) -> None: ...


def command(main: Callable[[Sequence[str]], None]) -> Main:
    """Wrap a command's main function: default argv to sys.argv, and turn our errors into a line and an exit code."""

    @wraps(main)
    def entry(argv: Sequence[str] | None = None) -> None:
        try:
            try:
                if argv is None:
                    end_at_once()
                main(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()  # here, where BrokenPipeError is caught, and not at interpreter exit
        except OpenRLHFError as error:
            say(f"error: {error}")
            if not is_main_process() and error.exit_code == 1:  # flag and data errors are the same on all ranks
                sys.stderr.write(f"openrlhf: error in rank {os.environ['RANK']}: {error}\n")
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            exec("")  # Python remembers an interrupt during an exec until the next exec, and would exit by that signal
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return entry


def make_main(name: str) -> Main:
    """Build the entry point of a command."""

    @command
    def main(argv: Sequence[str]) -> None:
        config = start(name, argv)
        trains = isinstance(config, RLConfig | SupervisedConfig)
        module = "openrlhf.rl.dry_run" if trains and config.run.dry_run else RUNS[name]
        run = import_module(module).run  # torch and Transformers are first imported here
        with at_work():
            run(config)

    return main


def start(name: str, argv: Sequence[str]) -> Any:
    """Parse and check a command's flags and return its config; training commands also print their batch table."""
    config, given = parse_given(COMMANDS[name], argv, prog=f"openrlhf {name}")
    config = check(config, given=given)
    if isinstance(config, RLConfig):
        leave_launcher()
        say("batches\n" + render(rl_table(config)))
    elif isinstance(config, SupervisedConfig):
        say("batches\n" + render(supervised_table(config)))
    return config


def leave_launcher() -> None:
    """Continue only in a launcher's first process, as if started alone, because RL has one driver; the others exit."""
    if "RANK" not in os.environ:
        return
    if not is_main_process():
        raise SystemExit(0)
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
