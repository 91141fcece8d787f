"""The one way to start a run, for commands and for Python callers: parse, check, print the batch table, and run.

`prepare` turns a command's arguments into a checked config, and `run` calls the module that does the work. Only then
are torch and Transformers imported.
"""

import gc
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from openrlhf.config.batch_table import render, rl_table, supervised_table
from openrlhf.config.check import check
from openrlhf.config.checks.extras import install_command
from openrlhf.config.commands import COMMANDS, RLConfig, SupervisedConfig
from openrlhf.config.parser import parse_given
from openrlhf.errors import MissingExtraError
from openrlhf.monitor import Sink, is_main_process, say
from openrlhf.signals import interrupt_on_signals

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
    "generate": "openrlhf.inference.in_memory",  # batch_inference for `openrlhf.generate`
    "interactive_chat": "openrlhf.inference.chat",
    "serve_rm": "openrlhf.inference.serve",
    "lora_combiner": "openrlhf.inference.merge",
    "export": "openrlhf.inference.export",
    "view": "openrlhf.view.launch",
    "init": "openrlhf.cli.starter.files",
    "doctor": "openrlhf.cluster.doctor.report",
}
SPIN_COUNT = "2000"  # microseconds instead of milliseconds; as fast as the default if no other program runs
SUPERVISED, DRY_RUN = "openrlhf.training.supervised", "openrlhf.rl.dry_run"


def prepare(name: str, argv: Sequence[str]) -> Any:
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


def run(name: str, config: object, sinks: Sequence[Sink] = ()) -> Any:
    """Run a command with a config from `prepare`; return its result, or None for a dry run.

    In training runs, `sinks` receive every metric.
    """
    # By default, a thread that waits for another one spins so long that two threads on two busy cores take 48 times as
    # long as one thread (docs/performance.md). libgomp reads the variable when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    trains = isinstance(config, RLConfig | SupervisedConfig)
    is_dry = trains and config.run.dry_run
    try:
        work = import_module(DRY_RUN if is_dry else RUNS.get(name, SUPERVISED)).run  # imports torch and Transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the package {error.name} is not installed",
            try_this=f"{install_command(package=error.name)} (openrlhf doctor lists what is missing)",
        ) from error
    gc.freeze()  # the collection before training then skips all imported objects, which take 0.3 s
    with interrupt_on_signals():
        return work(config, sinks=sinks) if trains and not is_dry else work(config)


def run_and_restore(name: str, config: object, sinks: Sequence[Sink] = ()) -> Any:
    """Run a command for a Python caller, and leave the process as it was."""
    from openrlhf.training.process_state import process_state_restored  # imports torch, so only after the checks

    with process_state_restored():
        return run(name, config, sinks)
