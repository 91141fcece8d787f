"""Files of a training run that all training commands share: run folder, logs and the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from openrlhf.config.commands import TrainingConfig
from openrlhf.monitor import MetricsFile, Monitor, Sink, TensorBoard, Wandb, is_main_process, say
from openrlhf.training import checkpoint
from openrlhf.training.fit import Interrupted
from openrlhf.training.flag_record import shown_flags, write_run_config


def run_folder(config: TrainingConfig) -> Path:
    return Path(config.run.run_dir or Path(config.checkpoints.save_path) / "run")


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """Return the checkpoint that --load_checkpoint resumes from, and print the flags that changed since."""
    root = Path(config.checkpoints.ckpt_path)
    if not config.checkpoints.load_checkpoint:
        if count := len(checkpoint.finished(root)):
            say(explain_older(count, root))
        return None
    found = checkpoint.newest(root)
    if found is None:
        say(f"--load_checkpoint: there is no checkpoint in {root}, so the run starts fresh")
        return None
    saved = checkpoint.read_state(found)["settings"]
    now = shown_flags(config)
    changed = [name for name, value in now.items() if name in saved and saved[name] != value]
    changed = [name for name in changed if name not in ("load_checkpoint", "dry_run")]
    say(f"going on from {found}")
    if changed:
        say("flags that changed since: " + ", ".join(f"--{name} {saved[name]} -> {now[name]}" for name in changed))
    return found


def explain_older(count: int, root: Path) -> str:
    left = "1 checkpoint of an earlier run is" if count == 1 else f"{count} checkpoints of an earlier run are"
    return f"{left} in {root}: rotation (--max_ckpt_num) counts them too, and --load_checkpoint would go on from there"


def explain_stop(stop: Interrupted) -> str:
    if stop.folder is None:
        return "stopped; --disable_ds_ckpt leaves nothing to go on from"
    return f"stopped; {stop.folder} holds everything: the same command with --load_checkpoint goes on from there"


def make_monitor(config: TrainingConfig, total_steps: int, first_step: int, more: Sequence[Sink] = ()) -> Monitor:
    """Create the monitor of a run: progress bar and metrics file, plus TensorBoard and Weights & Biases if asked for.

    Only the main process writes; the others get a monitor without sinks.
    """
    logs = config.logs
    if not is_main_process():
        return Monitor([], total_steps=total_steps, first_step=first_step)
    name = logs.wandb_run_name.replace("%s", datetime.now().strftime("%m%dT%H:%M"))
    flags = shown_flags(config)
    sinks: list[Sink] = [*more]
    if logs.use_wandb:  # first, because it may fail
        place = {"project": logs.wandb_project, "group": logs.wandb_group, "org": logs.wandb_org}
        sinks.append(Wandb(logs.use_wandb, name=name, **place, config=flags))
    if logs.use_tensorboard:
        sinks.append(TensorBoard(Path(logs.use_tensorboard) / name))
    run_dir = run_folder(config)
    sinks.append(MetricsFile(run_dir, resumed_at=first_step))
    write_run_config(run_dir, flags)
    return Monitor(sinks, total_steps=total_steps, first_step=first_step)
