"""Damaged checkpoints and bad disks: a run falls back, continues or stops with one line; it never trains on damage."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from tests.commands import as_argv
from tests.tiny import make_model
from tests.warm import warm_python
from tools.drill import programs
from tools.drill.outcome import Lost, Outcome, try_all
from tools.drill.rl_runs import KINDS, RLTask, must_equal
from tools.drill.small_disk import READ_ONLY

NEWEST, BEFORE = "global_step6", "global_step4"  # the checkpoints of the run that is resumed
ERROR = re.compile(r"^(?:.*\r)?.*openrlhf: error: .*$", re.MULTILINE)


def flip_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": truncate,
    "bit-flipped": flip_bit,
    "missing": lambda path, rng: path.unlink(),
    "emptied": lambda path, rng: path.write_bytes(b""),
}
LATEST = {"garbage": "\x00\x01", "outside": "../elsewhere", "not there": "global_step99", "empty": ""}
ROOMY = "20000"  # KiB
ALL_WAYS = (*DAMAGES, "latest", "both")
# name -> (folder on the bad disk, kind of disk)
DISKS = {
    "no room for checkpoints": ("ckpt", "40"),
    "no room for the second checkpoint": ("ckpt", "700"),
    "no room for the model": ("out", "60"),
    "no room for rollouts and metrics": ("out/run", "64"),
    "a model folder on a separate disk, with room": ("out", ROOMY),
    "read-only checkpoints": ("ckpt", READ_ONLY),
    "read-only model": ("out", READ_ONLY),
    "read-only run folder": ("out/run", READ_ONLY),
}


def drill_damage(
    folder: Path, seed: int, limit: int | None = None, ways: Collection[str] = ALL_WAYS, at_a_time: int = 2
) -> Outcome:
    """Resume after each kind of damage: to each file of the newest checkpoint, to `latest`, and to both checkpoints."""
    task = RLTask(folder, make_model(folder / "model"))
    reference, _ = task.run_reference("async")
    files = [path.relative_to(reference / "ckpt" / NEWEST) for path in (reference / "ckpt" / NEWEST).rglob("*.*")]
    cases: list[tuple[str, str]] = [(how, str(name)) for name in sorted(files) for how in DAMAGES]
    cases += [("latest", how) for how in LATEST] + [("both", how) for how in DAMAGES]
    cases = [case for case in cases if case[0] in ways]
    random.Random(f"damage {seed}").shuffle(cases)

    def drill(case: tuple[str, str]) -> None:
        here = folder / f"case_{cases.index(case)}"
        prepare_stopped_run(reference, here)
        damage(here / "ckpt", case, random.Random(f"{seed} {case}"))
        process = programs.start(here, task.words("async", load_checkpoint=True))
        if process.wait(programs.WATCHDOG):
            must_refuse(here, process.returncode)
        else:
            must_equal(here, reference)
        programs.must_end(here)

    named = {f"{how} {what}": (how, what) for how, what in cases[:limit]}
    return try_all(named, drill, at_a_time)


def prepare_stopped_run(reference: Path, folder: Path) -> None:
    """Make the folder of a run that was stopped after two checkpoints."""
    for name in (NEWEST, BEFORE):
        shutil.copytree(reference / "ckpt" / name, folder / "ckpt" / name)
    (folder / "ckpt" / "latest").write_text(NEWEST)
    shutil.copytree(reference / "out" / "run", folder / "out" / "run")


def damage(ckpt: Path, case: tuple[str, str], rng: random.Random) -> None:
    match case:
        case ("latest", how):
            (ckpt / "latest").write_text(LATEST[how])
        case ("both", how):
            for name in (NEWEST, BEFORE):
                DAMAGES[how](rng.choice(sorted((ckpt / name).rglob("*.safetensors"))), rng)
        case (how, name):
            DAMAGES[how](ckpt / NEWEST / name, rng)


def must_refuse(folder: Path, code: int) -> None:
    """Check that a run ended with one line that says why."""
    output = programs.read_output(folder)
    if code not in (1, 2) or "Traceback" in output:
        raise Lost(f"exit code {code}, and not one line: {programs.last_line(folder)}")
    if (errors := len(ERROR.findall(output))) != 1:
        raise Lost(f"{errors} lines of errors instead of one: {programs.last_line(folder)}")


def drill_disks(folder: Path, at_a_time: int = 2) -> Outcome:
    """Run on full or read-only disks: either the trained model is saved somewhere, or the run refuses to start."""
    task = RLTask(folder, make_model(folder / "model"))
    reference, _ = task.run_reference("sync")
    weights = (reference / "out" / "model.safetensors").read_bytes()

    def drill(case: tuple[str, str]) -> None:
        target, kind = case
        here = folder / f"{target.replace('/', '_')}_{kind}"
        argv = as_argv(task.flags | KINDS["sync"])
        words = [*warm_python(), "-m", "tools.drill.small_disk", kind, target, "train_ppo", *argv]
        process = programs.start(here, words)
        code = process.wait(programs.WATCHDOG)
        programs.must_end(here)
        if code and kind == ROOMY:
            raise Lost(f"exit code {code} although there is room: {programs.last_line(here)}")
        if code:
            must_refuse(here, code)
        trained = "s/step" in programs.read_output(here)
        saved = [path for path in here.rglob("model.safetensors") if path.read_bytes() == weights]
        if trained and not saved:
            raise Lost(f"the trained model is nowhere: {programs.last_line(here)}")
        if not trained and code == 0:
            raise Lost("the run trained nothing, and ended with exit code 0")

    return try_all(DISKS, drill, at_a_time)
