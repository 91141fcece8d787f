"""The entry points of all commands, from arguments to exit code.

`make_main` builds the entry point of a command, which prepares and runs it as a Python caller would (`api/start.py`).
The `command` decorator turns errors into one line and an exit code.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps

from openrlhf.api.start import prepare, run
from openrlhf.cli.next_steps import next_steps
from openrlhf.config.commands import TrainingConfig
from openrlhf.errors import OpenRLHFError
from openrlhf.monitor import is_main_process, say
from openrlhf.signals import INTERRUPTED, exit_on_signals


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
    """Exit a launched process when its work is done, without tearing down the interpreter.

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
        config = prepare(name, argv)
        result = run(name, config)
        if isinstance(config, TrainingConfig) and result is not None:  # not a dry run
            say(next_steps(config))

    return main
