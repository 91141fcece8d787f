"""Files of a training run that all training commands share.

The run directory (--run_dir) holds config.json, which records how the run was started, and metrics.jsonl. Checkpoints
are in --ckpt_path. `hold_run_folders` locks both against other runs. `find_checkpoint` chooses the checkpoint to resume
from, and `make_monitor` opens the run directory after all checks that may reject the run.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from openrlhf.config.commands import TrainingConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.urls import mask_urls
from openrlhf.errors import ConfigError, DiskError
from openrlhf.models.hub_commits import hub_commits
from openrlhf.monitor import Monitor, Sink, is_main_process, say
from openrlhf.training import atomic_folder, checkpoint
from openrlhf.training.disk_space import disk_failure, replace_file
from openrlhf.training.earlier_run import CONFIG_FILE, has_record, set_earlier_run_aside
from openrlhf.training.final_save import warn_if_replaced, warn_if_too_full
from openrlhf.training.fit import Interrupted
from openrlhf.training.folder_lock import hold_folders
from openrlhf.training.manifest import must_be_private
from openrlhf.training.metric_sinks import MetricsFile, TensorBoard, Trackio, Wandb

PACKAGES = ("openrlhf", "torch", "transformers", "peft", "datasets", "deepspeed", "ray", "vllm")
SECRET = ("use_wandb", "api_key", "reward_api_key")  # flags that hold API keys, which must not be written to files
ADDRESSES = ("remote_rm_url",)  # flags with URLs, which may contain credentials


def run_folder(config: TrainingConfig) -> Path:
    return Path(config.run.run_dir or Path(config.checkpoints.save_path) / "run")


@contextmanager
def hold_run_folders(config: TrainingConfig) -> Iterator[None]:
    """Lock the folders of a run while the context is open, and clean up after a killed run.

    Raise ConfigError if another run uses one of the folders. Enter the context before loading models. Only the main
    process writes to the folders, so only that process holds the locks.
    """
    if not is_main_process():
        yield
        return
    save_path, ckpt_path = Path(config.checkpoints.save_path), Path(config.checkpoints.ckpt_path)
    folders = {"--save_path": save_path, "--ckpt_path": ckpt_path, "--run_dir": run_folder(config)}
    with hold_folders(folders, free_folders(config)):
        atomic_folder.remove_leftovers(ckpt_path, checkpoint.is_checkpoint_name)
        exports = (save_path.name, f"{save_path.name}_critic")
        for folder in (save_path.parent, save_path):
            atomic_folder.remove_leftovers(folder, lambda name: name in exports)
        warn_if_too_full(config)
        warn_if_replaced(config)
        yield


def free_folders(config: TrainingConfig) -> dict[str, str]:
    """For each flag whose folder another run may be using, return the flags with which this run can start anyway.

    All runs of a command share the default --ckpt_path, as in OpenRLHF.
    """
    save_path, ckpt_path = Path(config.checkpoints.save_path), config.checkpoints.ckpt_path
    other = save_path.with_name(f"{save_path.name}_2") if save_path.name else save_path / "2"
    own_checkpoints = f"--ckpt_path {shlex.quote(str(save_path / 'checkpoints'))}"
    both = [f"--save_path {shlex.quote(str(other))}"]
    if ckpt_path == type(config)().checkpoints.ckpt_path:
        both.append(f"--ckpt_path {shlex.quote(str(other / 'checkpoints'))}")
    return {"--save_path": " ".join(both), "--ckpt_path": own_checkpoints}


def shown_flags(config: object) -> dict[str, object]:
    """Return all flags for files and dashboards, with API keys and credentials in URLs hidden.

    The values are converted to JSON types, so that they compare equal to saved ones.
    """
    flags = flag_values(config)
    flags |= {name: "***" for name in SECRET if flags.get(name)}
    flags |= {name: mask_urls(str(flags[name])) for name in ADDRESSES if flags.get(name)}
    return json.loads(json.dumps(flags))


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run depends on; None for those not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def write_run_config(run_dir: Path, flags: Mapping[str, object], commits: Mapping[str, str]) -> None:
    """Write `run_dir/config.json`: how the run was started, and with which versions of code, models and data.

    The file contains flags, working directory, package versions, the git revision, and the commits of hub names.
    """
    try:
        git = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True)
        revision = found.stdout.strip()
    except (OSError, subprocess.SubprocessError):  # not a checkout, or no git
        revision = None
    content = {
        "flags": flags,
        "cwd": str(Path.cwd()),
        "versions": package_versions(),
        "revision": revision,
        "hub_commits": commits,
    }
    replace_file(run_dir / CONFIG_FILE, json.dumps(content, indent=1))


def find_checkpoint(config: TrainingConfig, agree: Callable[[int], int] = int) -> Path | None:
    """Return the checkpoint that --load_checkpoint resumes from, and print the flags that changed since.

    The main process verifies and chooses it; `agree` broadcasts its step to the other processes.
    """
    root = Path(config.checkpoints.ckpt_path)
    if not config.checkpoints.load_checkpoint:
        if count := len(checkpoint.finished(root)):
            left = "1 checkpoint of an earlier run is" if count == 1 else f"{count} checkpoints of an earlier run are"
            say(
                f"{left} in {root}: rotation (--max_ckpt_num) deletes old checkpoints first. Try: --load_checkpoint to"
                " resume, or another --ckpt_path to keep them"
            )
        return None
    found = _choose_checkpoint(config, root) if is_main_process() else None
    step = agree(checkpoint.step_of(found) if found else -1)
    return checkpoint.step_folder(root, step) if step >= 0 else None


def _choose_checkpoint(config: TrainingConfig, root: Path) -> Path | None:
    found = checkpoint.newest(root)
    if found is None:
        must_not_be_elsewhere(config, root)
        say(f"--load_checkpoint: there is no checkpoint in {root}, so the run starts fresh")
        return None
    if any(found.rglob("*.pt")):  # DeepSpeed's
        must_be_private(root, found)
    saved, now = checkpoint.read_state(found)["settings"], shown_flags(config)
    must_be_of_this_run(found, saved, now)
    must_hold_out_the_same_rows(found, saved, now)
    say(f"resuming from {found}")
    changed = [
        f"--{name} {saved[name]} -> {value}"
        for name, value in now.items()
        if name in saved and saved[name] != value and name not in ("load_checkpoint", "dry_run")
    ]
    if changed:
        say("flags that changed since then: " + ", ".join(changed))
    if "save_path" in saved and saved["save_path"] != now["save_path"]:  # runs share the default --ckpt_path
        other = f"the checkpoint belongs to a run with --save_path {saved['save_path']}"
        say(f"{other}. Try: a separate --ckpt_path for each run")
    return found


def must_be_of_this_run(found: Path, saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise if a checkpoint belongs to a run with another model and --save_path: the default --ckpt_path is shared."""
    if all(name in saved and saved[name] != now[name] for name in ("save_path", "pretrain")):
        raise ConfigError(
            f"--load_checkpoint: the checkpoint {found} belongs to another run, with --save_path {saved['save_path']}"
            f" and --pretrain {saved['pretrain']}",
            try_this="a separate --ckpt_path for each run, or no --load_checkpoint to start over",
        )


def must_hold_out_the_same_rows(found: Path, saved: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise if --eval_size or --seed changed: the resumed run would train on rows that were held out before."""
    size, seed = saved.get("eval_size"), saved.get("seed")
    if size == now["eval_size"] and (size is None or seed == now["seed"]):
        return
    before = "without --eval_size" if size is None else f"--eval_size {size:.10g} --seed {seed}"
    how = before if size is None else f"with {before}"
    raise ConfigError(
        f"--load_checkpoint: the checkpoint {found} was written {how}, so other rows would be held out now",
        try_this=before,
    )


def must_not_be_elsewhere(config: TrainingConfig, root: Path) -> None:
    """Raise if the earlier run in --run_dir used another --ckpt_path, because this one may be mistyped.

    If both are the same, the earlier run was stopped before its first checkpoint, and the run starts over.
    """
    run_dir = run_folder(config)
    if not has_record(run_dir):
        return
    try:
        before = json.loads((run_dir / CONFIG_FILE).read_bytes())
        earlier = Path(before.get("cwd", os.curdir), before["flags"]["ckpt_path"])
    except (OSError, ValueError, KeyError, TypeError):
        earlier = None
    if earlier is None or earlier.resolve() != root.resolve():
        known = f", whose checkpoints are in {earlier}" if earlier else ""
        raise ConfigError(
            f"--load_checkpoint: there is no checkpoint in --ckpt_path {root}, but --run_dir {run_dir} has the record"
            f" of an earlier run{known}",
            try_this=f"--ckpt_path {earlier or 'of that run'}, or no --load_checkpoint to start over",
        )


def explain_stop(stop: Interrupted) -> str:
    """Return a message that says how to resume a run that was stopped by a signal."""
    if stop.folder is None and stop.disabled:
        return "stopped without a checkpoint (--disable_ds_ckpt), so the run cannot be resumed"
    if stop.folder is None:
        return "stopped without a new checkpoint; --load_checkpoint resumes from the previous one, if there is one"
    return f"stopped; run the same command with --load_checkpoint to resume from {stop.folder}"


def make_monitor(config: TrainingConfig, total_steps: int, first_step: int, more: Sequence[Sink] = ()) -> Monitor:
    """Create the monitor of a run: progress bar and metrics file, plus dashboards if requested.

    Only the main process writes; the others get a monitor without sinks. `more` are additional sinks of the caller.
    """
    logs = config.logs
    if not is_main_process():
        return Monitor([], total_steps=total_steps, first_step=first_step)
    name = logs.wandb_run_name.replace("%s", datetime.now().strftime("%m%dT%H:%M"))
    flags = shown_flags(config)
    sinks: list[Sink] = [*more]
    if logs.use_wandb:  # first, because connecting may fail
        project, group, org = logs.wandb_project, logs.wandb_group, logs.wandb_org
        sinks.append(Wandb(logs.use_wandb, name=name, project=project, group=group, org=org, config=flags))
    if logs.use_tensorboard:
        sinks.append(TensorBoard(Path(logs.use_tensorboard) / name))
    if logs.use_trackio:
        sinks.append(Trackio(logs.use_trackio, name=name, config=flags))
    run_dir = run_folder(config)
    set_earlier_run_aside(run_dir, first_step)
    try:
        sinks.append(MetricsFile(run_dir))
        write_run_config(run_dir, flags, hub_commits(config))
    except OSError as error:
        raise DiskError(f"--run_dir {run_dir} cannot be written: {disk_failure(error) or error}") from error
    return Monitor(sinks, total_steps=total_steps, first_step=first_step)
