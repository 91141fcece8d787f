"""The entry points of all commands, from arguments to exit code.

`make_main` builds the entry point of a command: `start` parses and checks the flags and prints the batch table, and the
`run` function of a module in RUNS does the work. The `command` decorator turns errors into one line and an exit code.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module

from openrlhf.config.batch_table import render, rl_table, supervised_table
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS, RLConfig, SupervisedConfig
from openrlhf.config.parser import parse_given
from openrlhf.errors import OpenRLHFError
from openrlhf.monitor import is_main_process, say
from openrlhf.signals import INTERRUPTED, exit_on_signals, interrupt_on_signals

# Set by torchrun and deepspeed. Ray workers inherit the environment of the driver and would try to join its launch.
LAUNCHER_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
RUNS = {  # command -> module with `run`; other commands use SUPERVISED
    "train_ppo": "openrlhf.cluster.launch",
    "train_ppo_ray": "openrlhf.cluster.launch",
    "batch_inference": "openrlhf.inference.batch_inference",
    "interactive_chat": "openrlhf.inference.chat",
    "serve_rm": "openrlhf.inference.serve",
    "lora_combiner": "openrlhf.inference.merge",
    "init": "openrlhf.cli.starter.files",
    "doctor": "openrlhf.cluster.doctor.report",
    "view": "openrlhf.view.launch",
    "export": "openrlhf.inference.export",
}
SUPERVISED, DRY_RUN = "openrlhf.training.supervised", "openrlhf.rl.dry_run"


def command(main: Callable[[Sequence[str]], None]) -> Callable[..., None]:
    """Wrap a command's main function: default argv to sys.argv, and turn our errors into a line and an exit code."""

    @wraps(main)
    def entry(argv: Sequence[str] | None = None) -> None:
        try:
            try:
                if argv is None:
                    exit_on_signals()
                main(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()  # flush here, where BrokenPipeError is caught, not at exit
            if argv is None:
                exit_launched_process()
        except OpenRLHFError as error:
            say(f"error: {error}")
            if not is_main_process() and error.exit_code == 1:  # flag and data errors are the same on all ranks
                sys.stderr.write(f"openrlhf: error in rank {os.environ['RANK']}: {error}\n")
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            exec("")  # clears an interrupt during an exec; otherwise Python would exit with that signal
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return entry


def exit_launched_process() -> None:
    """Exit a launcher's process after its work, without the teardown of the interpreter.

    Threads of the process group are still running. If one of them used the interpreter during the teardown, the process
    would abort, and the launcher would report a finished run as failed.
    """
    if "RANK" in os.environ:
        sys.stderr.flush()
        os._exit(0)


def make_main(name: str) -> Callable[..., None]:
    """Build the entry point of a command."""

    @command
    def main(argv: Sequence[str]) -> None:
        config = start(name, argv)
        trains = isinstance(config, RLConfig | SupervisedConfig)
        module = DRY_RUN if trains and config.run.dry_run else RUNS.get(name, SUPERVISED)
        run = import_module(module).run  # imports torch and Transformers
        with interrupt_on_signals():
            run(config)

    return main


def start(name: str, argv: Sequence[str]) -> object:
    """Parse and check a command's flags and return its config; training commands also print their batch table."""
    config, given = parse_given(COMMANDS[name], argv, prog=f"openrlhf {name}")
    config = check(config, given=given)
    if isinstance(config, RLConfig):
        # RL has one driver: the first process of a launcher continues as if started alone, and the others exit.
        if not is_main_process():
            raise SystemExit(0)
        if "RANK" in os.environ:
            for variable in list(os.environ):
                if variable in LAUNCHER_VARIABLES or variable.startswith("TORCHELASTIC_"):
                    del os.environ[variable]
        say("batches\n" + render(rl_table(config)))
    elif isinstance(config, SupervisedConfig):
        say("batches\n" + render(supervised_table(config)))
    return config
