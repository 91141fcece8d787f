"""Kill RL runs in one process at random moments, and resume them."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import KILL
from tests.tiny import make_model
from tests.warm import kill
from tools.drill import programs
from tools.drill.outcome import Outcome, try_all
from tools.drill.rl_runs import KINDS, RLTask, must_be_whole, must_equal

KILLS_PER_RUN = 2  # the resumed run is killed again
KILLED = (-signal.SIGKILL, -KILL)  # the second one before the program has begun


@dataclass(frozen=True)
class Kill:
    """A kill of a run of this kind, at this share of its duration."""

    kind: str
    share: float


def drill_local_kills(
    folder: Path, count: int, seed: int, at_a_time: int = 2, *, shared_memory: bool = True
) -> Outcome:
    """Kill synchronous and asynchronous runs in turn; each is killed twice and must then finish like its reference.

    Turn off the check of shared memory if other programs may leave files there at the same time.
    """
    task = RLTask(folder, make_model(folder / "model"))
    references = {kind: task.run_reference(kind) for kind in KINDS}
    rng = random.Random(f"local {seed}")
    kinds = list(KINDS)
    kills = [Kill(kinds[number // KILLS_PER_RUN % len(kinds)], rng.random()) for number in range(count)]

    def drill(case: tuple[int, list[Kill]]) -> None:
        number, chain = case
        reference, seconds = references[chain[0].kind]
        here = folder / f"run_{number}"
        before = programs.shared_files() if shared_memory else None
        for one in chain:
            kill_once(task, here, one, seconds)
            must_be_whole(here, reference)
        process = programs.start(here, task.words(chain[0].kind, load_checkpoint=True))
        programs.finish(process, here)
        programs.must_end(here)
        must_equal(here, reference)
        programs.must_leave_no_files(here, before)

    chains = [
        (number, kills[first : first + KILLS_PER_RUN]) for number, first in enumerate(range(0, count, KILLS_PER_RUN))
    ]
    named = {f"run {number}, {describe(chain)}": (number, chain) for number, chain in chains}
    outcome = try_all(named, drill, at_a_time)
    outcome.tried = count  # a lost run counts once, whichever kill caused it
    return outcome


def kill_once(task: RLTask, folder: Path, one: Kill, seconds: float) -> None:
    """Start or resume a run and kill it; if it ends before that, resume it and kill it earlier."""
    share = one.share
    while True:
        resumed = folder.exists()
        process = programs.start(folder, task.words(one.kind, **{"load_checkpoint": True} if resumed else {}))
        if programs.wait_seconds(process, share * seconds):
            kill(process.pid)
        if process.wait(programs.GRACE) in KILLED:
            programs.must_end(folder)
            return
        programs.finish(process, folder)
        share /= 2


def describe(chain: list[Kill]) -> str:
    return f"{chain[0].kind}, killed at " + " and ".join(f"{one.share:.0%}" for one in chain)
