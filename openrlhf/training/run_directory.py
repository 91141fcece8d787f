"""Files of a training run that all training commands share.

The run directory (--run_dir) holds config.json, which records how the run was started, and metrics.jsonl. Checkpoints
are in --ckpt_path. `find_checkpoint` chooses the one to resume from, and `make_monitor` opens the run directory once
nothing can reject the run any longer.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from openrlhf.config.commands import TrainingConfig
from openrlhf.config.flags import flag_values
from openrlhf.models.hub_commits import hub_commits
from openrlhf.monitor import MetricsFile, Monitor, Sink, TensorBoard, Wandb, is_main_process, say
from openrlhf.training import checkpoint
from openrlhf.training.fit import Interrupted

PACKAGES = ("openrlhf", "torch", "transformers", "peft", "datasets", "deepspeed", "ray", "vllm")
SECRET = ("use_wandb", "api_key", "reward_api_key")  # flags that hold API keys, which must not be written to files


def run_folder(config: TrainingConfig) -> Path:
    return Path(config.run.run_dir or Path(config.checkpoints.save_path) / "run")


def shown_flags(config: object) -> dict[str, object]:
    """Return all flags for files and dashboards, with API keys hidden.

    The values have gone through JSON, so that they compare equal to saved ones.
    """
    flags = flag_values(config)
    return json.loads(json.dumps({name: "***" if name in SECRET and flags[name] else flags[name] for name in flags}))


def write_run_config(run_dir: Path, flags: Mapping[str, object], commits: Mapping[str, str]) -> None:
    """Write `run_dir/config.json`: flags, package versions, the git revision of a checkout, commits of hub names."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    try:
        git = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True)
        revision = found.stdout.strip()
    except (OSError, subprocess.SubprocessError):  # not a checkout, or no git
        revision = None
    content = {"flags": flags, "versions": versions, "revision": revision, "hub_commits": commits}
    (run_dir / "config.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """Return the checkpoint that --load_checkpoint resumes from, and print the flags that changed since."""
    root = Path(config.checkpoints.ckpt_path)
    if not config.checkpoints.load_checkpoint:
        if count := len(checkpoint.finished(root)):
            left = "1 checkpoint of an earlier run is" if count == 1 else f"{count} checkpoints of an earlier run are"
            say(
                f"{left} in {root}: rotation (--max_ckpt_num) counts them too, and --load_checkpoint would resume from"
                " there"
            )
        return None
    found = checkpoint.newest(root)
    if found is None:
        say(f"--load_checkpoint: there is no checkpoint in {root}, so the run starts fresh")
        return None
    say(f"resuming from {found}")
    saved, now = checkpoint.read_state(found)["settings"], shown_flags(config)
    changed = [
        f"--{name} {saved[name]} -> {value}"
        for name, value in now.items()
        if name in saved and saved[name] != value and name not in ("load_checkpoint", "dry_run")
    ]
    if changed:
        say("flags that changed since then: " + ", ".join(changed))
    return found


def explain_stop(stop: Interrupted) -> str:
    """Return the line that says how to resume a run that was asked to stop."""
    if stop.folder is None:
        return "stopped without a checkpoint (--disable_ds_ckpt), so the run cannot be resumed"
    return f"stopped; run the same command with --load_checkpoint to resume from {stop.folder}"


def make_monitor(config: TrainingConfig, total_steps: int, first_step: int, more: Sequence[Sink] = ()) -> Monitor:
    """Create the monitor of a run: progress bar and metrics file, plus TensorBoard and Weights & Biases if requested.

    Only the main process writes; the others get a monitor without sinks. `more` are sinks of the caller.
    """
    logs = config.logs
    if not is_main_process():
        return Monitor([], total_steps=total_steps, first_step=first_step)
    name = logs.wandb_run_name.replace("%s", datetime.now().strftime("%m%dT%H:%M"))
    flags = shown_flags(config)
    sinks: list[Sink] = [*more]
    if logs.use_wandb:  # first, because it may fail
        project, group, org = logs.wandb_project, logs.wandb_group, logs.wandb_org
        sinks.append(Wandb(logs.use_wandb, name=name, project=project, group=group, org=org, config=flags))
    if logs.use_tensorboard:
        sinks.append(TensorBoard(Path(logs.use_tensorboard) / name))
    run_dir = run_folder(config)
    sinks.append(MetricsFile(run_dir, resumed_at=first_step))
    write_run_config(run_dir, flags, hub_commits(config))
    return Monitor(sinks, total_steps=total_steps, first_step=first_step)
