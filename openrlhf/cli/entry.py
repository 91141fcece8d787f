"""How every command begins and ends: parse, check, print the batch table; errors become one line and an exit code."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

from openrlhf.cli.signals import INTERRUPTED, end_at_once
from openrlhf.config.batch_table import render, rl_table, supervised_table
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS, RLConfig, SupervisedConfig
from openrlhf.config.parser import parse_given
from openrlhf.errors import OpenRLHFError
from openrlhf.monitor import is_main_process, say

# What torchrun and deepspeed tell a process. Ray's workers inherit the driver's environment and would join the launch.
LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)


class Main(Protocol):
    """A command's entry: without argv it reads the program's own."""

    def __call__(self, argv: Sequence[str] | None = None) -> None: ...


def command(main: Callable[[Sequence[str]], None]) -> Main:
    """The entry of a command: takes argv (or the program's own), and turns our errors into a line and an exit code."""

    @wraps(main)
    def entry(argv: Sequence[str] | None = None) -> None:
        try:
            try:
                if argv is None:
                    end_at_once()
                main(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()  # here, where a reader that left is understood, and not at the interpreter's end
        except OpenRLHFError as error:
            say(f"error: {error}")
            if not is_main_process() and error.exit_code == 1:  # wrong flags and rows are wrong everywhere: said once
                sys.stderr.write(f"openrlhf: error in rank {os.environ['RANK']}: {error}\n")
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            exec("")  # Python remembers an interrupt amid an exec until the next exec, and would end by that signal
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return entry


def start(name: str, argv: Sequence[str]) -> Any:
    """The checked config of a command; training commands print what their batch sizes mean."""
    config, given = parse_given(COMMANDS[name], argv, prog=f"openrlhf {name}")
    config = check(config, given=given)
    if isinstance(config, RLConfig):
        leave_launcher()
        say("batches\n" + render(rl_table(config)))
    elif isinstance(config, SupervisedConfig):
        say("batches\n" + render(supervised_table(config)))
    return config


def leave_launcher() -> None:
    """Reinforcement learning has one driver: a launcher's first process goes on as if started alone, the others end."""
    if "RANK" not in os.environ:
        return
    if not is_main_process():
        raise SystemExit(0)
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
