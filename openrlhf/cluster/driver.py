"""Turn this process into a Ray driver: join a running cluster, or start a private Ray that ends with the run.

A private Ray has its own token, temporary folder and processes on this machine only, so that several runs on a machine
do not interfere. `session` calls `joined`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openrlhf.cluster.address import find_cluster, token_error
from openrlhf.cluster.placement import Node, PlacementPlan, explain_shortage, place
from openrlhf.cluster.reaper import KEPT, MARK, private_folder, remove_leftovers
from openrlhf.config.runtime import GPUS_PER_NODE_ON_RAY
from openrlhf.errors import BackendError, ConfigError, OpenRLHFError, RolloutError, counted
from openrlhf.models.compiler_cache import VARIABLE, compiler_cache
from openrlhf.monitor import say
from openrlhf.signals import end_program, keep_sigterm_handler

# By default, Ray starts one idle worker per core and a process that reports usage statistics. Our actors never use the
# idle workers, because each actor has its own environment.
RAY_SETTINGS = {"RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
HEAD = "gcs_server"  # name of Ray's head process
CHECK_HEAD_EVERY = 0.1  # seconds
PROCESSES_PER_CORE = 4  # limit for runs on CPUs; more processes per core would only slow the run down


@contextmanager
def joined(plan: PlacementPlan) -> Iterator[bool]:
    """Make this process a Ray driver while the context is open; yield whether this Ray is private to the run.

    If the process is already a driver, its Ray is used and left running.
    """
    import ray

    if ray.is_initialized():
        yield False
        return
    address = find_cluster(os.environ)
    if address is not None:
        start_driver(address=address)
        try:
            yield False
        finally:
            ray.shutdown()
        return
    with private_ray(plan):
        yield True


@contextmanager
def private_ray(plan: PlacementPlan) -> Iterator[None]:
    """Run a private Ray with its own token on this machine.

    Its logs are kept for a week after a backend error, a rollout error or an unexpected error.
    """
    import ray

    slots = private_slots(plan)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray writes a token to the home directory
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Keep the path short: Ray puts sockets deep below this folder, and socket paths are limited to 107 characters.
    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    for leftover in remove_leftovers(parent):
        say(f"removed {leftover}, left behind by an earlier run")
    say("starting a private Ray on this machine; it stops with the run")
    with private_folder(parent) as folder:
        try:
            with environment_for_ray(folder), interpreter_for_ray(folder), watch_starting_head():
                start_driver(address="local", include_dashboard=False, _temp_dir=str(folder), **slots)
            yield
        except Exception as error:  # re-raised; caught only to decide whether to keep the logs
            if isinstance(error, (BackendError, RolloutError)) or not isinstance(error, OpenRLHFError):
                (folder / KEPT).touch()
                say(f"logs of all processes: {folder}/session_latest/logs")
            raise
        finally:
            ray.shutdown()


@contextmanager
def environment_for_ray(folder: Path) -> Iterator[None]:
    """Set the variables that Ray's processes inherit while Ray starts them.

    Temporary files go to the private folder, because an engine that is killed cannot remove its own; only compiled code
    stays where torch would put it, for the next run.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    inherited = dict(os.environ) | {VARIABLE: compiler_cache(), MARK: str(folder), "TMPDIR": str(temporary)}
    before = dict(os.environ)
    os.environ.update(inherited)
    try:
        yield
    finally:
        for name in inherited.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def interpreter_for_ray(folder: Path) -> Iterator[None]:
    """Replace an interpreter path that needs shell quoting with a link in the folder while Ray starts its processes.

    Ray passes the path to a shell unquoted, so its workers would not start and it would wait for them forever.
    """
    python = Path(sys.executable)
    if shlex.quote(sys.executable) != sys.executable and python.is_relative_to(sys.prefix):
        environment = folder / "environment"
        environment.symlink_to(sys.prefix)
        sys.executable = str(environment / python.relative_to(sys.prefix))
    try:
        yield
    finally:
        sys.executable = str(python)


@contextmanager
def watch_starting_head() -> Iterator[None]:
    """End the program if Ray's head dies while `ray.init` waits for it: Ray would end it later, without a reason."""
    import psutil

    started = threading.Event()

    def watch() -> None:
        head: psutil.Process | None = None
        while not started.wait(CHECK_HEAD_EVERY):
            with suppress(psutil.Error):
                if head is None:
                    head = next((one for one in psutil.Process().children() if one.name() == HEAD), None)
                elif not head.is_running() or head.status() == psutil.STATUS_ZOMBIE:
                    line = (
                        "openrlhf: error: Ray's head process died while Ray was starting. Try: the same command again"
                    )
                    end_program(line, BackendError.exit_code)

    threading.Thread(target=watch, daemon=True, name="openrlhf-ray-head").start()
    try:
        yield
    finally:
        started.set()


def start_driver(**options: Any) -> None:
    """Call `ray.init` quietly, keep our SIGTERM handler, and translate its errors."""
    import ray
    from ray._raylet import Config  # pyrefly: ignore[missing-module-attribute]

    Config.initialize("")  # reads RAY_AUTH_MODE again, which may have changed since Ray was imported
    try:
        with keep_sigterm_handler():
            ray.init(namespace=f"openrlhf-{secrets.token_hex(4)}", logging_level=logging.ERROR, **options)
    except ray.exceptions.AuthenticationError:
        raise token_error(str(options["address"])) from None
    except (OSError, RuntimeError, ValueError, ray.exceptions.RaySystemError) as error:
        reason = " ".join(str(error).split())
        if options["address"] == "local":
            raise BackendError(
                f"Ray did not start on this machine: {reason}", try_this="the same command again"
            ) from error
        raise ConfigError(
            f"the Ray cluster at {options['address']} rejected this process: {reason}",
            try_this="the same command on a node of the cluster, with the cluster's versions of Ray and Python",
        ) from error


def private_slots(plan: PlacementPlan) -> dict[str, int]:
    """Return the CPUs and GPUs that a private Ray declares.

    Raise ConfigError if the plan does not fit, before Ray is started, which takes ten seconds.
    """
    import torch

    cores, gpus = os.cpu_count() or 1, torch.cuda.device_count()
    devices = gpus or PROCESSES_PER_CORE * cores
    here = Node("here", "this machine", devices, devices, cores)
    if place(plan, [here]) is None:
        raise explain_shortage(plan, [here], "GPU" if gpus else "CPU slot", private=True)
    if gpus:
        return {"num_gpus": gpus}
    line = f"no GPU found: each of the run's devices ({plan.describe()}) is a process on this machine, which has"
    line += f" {counted(cores, 'CPU core')}"
    if plan.devices > cores:
        line += f". Try: smaller --*_num_gpus_per_node (default: {GPUS_PER_NODE_ON_RAY}), or --runtime local"
    say(line)
    return {"num_cpus": max(cores, plan.devices), "num_gpus": 0}
