"""Every handler of Ctrl-C (SIGINT) and SIGTERM in the package.

A command passes through three phases. While it imports modules, a signal ends it immediately (`exit_on_signals`). While
it works, a signal raises KeyboardInterrupt (`interrupt_on_signals`), so a scheduler's SIGTERM is treated like a user's
Ctrl-C. While something runs that should end cleanly, an optimizer step or a chat reply, the first signal is only a
request to stop (`stop_request`), and a second one raises. Python delivers signals to the main thread only, so in any
other thread these functions do nothing.

An exception is raised only when the main thread next runs Python code, and the cleanup after it may hang as well. So a
thread of each command also counts the signals (`LastResort`): GRACE_SECONDS after the second request it kills the
child processes and ends the program. Code that never releases the interpreter lock is the one exception: it stops the
thread, too, and only SIGKILL ends it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from openrlhf.monitor import is_main_process

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code by convention after Ctrl-C
SAME_REQUEST = 1.0  # seconds: launchers and process groups deliver one request twice
GRACE_SECONDS = 4.0  # between the second request and the end of a program that has not ended by itself
SAVES = "\nopenrlhf: stopping after this step, with a checkpoint; press Ctrl-C again to stop immediately, without one"
SAVES_NOTHING = (
    "\nopenrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt);"
    " press Ctrl-C again to stop immediately"
)

# Set in programs that are one of our commands: this process belongs to us, and may be ended.
_is_command = False


def write_line(line: str) -> None:
    """Print a line to stderr from a signal handler; `print` is unsafe there, since the signal may interrupt one."""
    if is_main_process():
        os.write(STDERR, f"{line}\n".encode())


def exit_on_signals() -> None:
    """Exit immediately on either signal from now on, except inside the contexts below.

    There is nothing to clean up yet, and an exception may get lost: during an import it may be raised in a callback,
    where Python prints it and continues.
    """

    def end(number: int, frame: FrameType | None) -> None:
        write_line("openrlhf: interrupted")
        os._exit(INTERRUPTED)

    if threading.current_thread() is threading.main_thread():
        global _is_command
        _is_command = True
        for number in not_ignored():
            signal.signal(number, end)


def not_ignored() -> list[signal.Signals]:
    """List the signals to handle: not those our parent made us ignore, as nohup and background jobs of shells do."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], object],
    signals: Iterable[signal.Signals] = SIGNALS,
    *,
    ends: bool = True,
) -> Iterator[None]:
    """Let `handler` handle the signals while the context is open, and restore the previous handlers afterwards.

    `ends` is False if the signals do not ask the program to end, however often they are sent.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    counted = LastResort.counted
    LastResort.counted = counted if ends else counted - set(signals)
    try:
        yield
    finally:
        LastResort.counted = counted
        for number, previous in before.items():
            signal.signal(number, previous)


@dataclass
class Requests:
    """The requests to stop that have arrived so far, as far as they are different requests."""

    first: float | None = None  # when the first one arrived

    def add(self, number: int) -> bool:
        """Add a signal and return whether it is a further request.

        A SIGTERM right after another signal is the same request, delivered twice: to the process group, and by the
        launcher. Launched processes take no SIGTERM as a further request, because the `deepspeed` launcher signals its
        processes one after another, seconds apart; launchers kill what does not end.
        """
        now = time.monotonic()
        if self.first is None:
            self.first = now
            return False
        if number == signal.SIGINT:
            return True
        return "RANK" not in os.environ and now - self.first > SAME_REQUEST


class LastResort:
    """Thread that ends the program if a second request to stop has not done so after GRACE_SECONDS.

    It reads the signals from a pipe that the interpreter's own handler writes to, whatever the main thread is doing.
    """

    counted = frozenset(SIGNALS)  # signals that ask the program to end, in the current context
    running = False

    @classmethod
    def start(cls) -> None:
        """Start the thread, once per process; must be called in the main thread."""
        if cls.running:
            return
        cls.running = True
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A forked process inherits the pipe, and its signals are not ours.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=cls._watch, args=(reading,), daemon=True, name="openrlhf-last-resort").start()

    @classmethod
    def _watch(cls, pipe: int) -> None:
        requests = Requests()
        while True:
            for number in os.read(pipe, 1):
                if number in cls.counted and requests.add(number):
                    time.sleep(GRACE_SECONDS)
                    frame = sys._current_frames().get(threading.main_thread().ident or 0)
                    place = f" in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
                    line = f"openrlhf: still busy{place} {GRACE_SECONDS:g} s after the second request: ending now"
                    end_program(line, INTERRUPTED)


def end_program(line: str, code: int) -> NoReturn:
    """Print a line, kill all child processes and exit, from any thread and whatever the main thread is doing."""
    write_line(line)
    for child in descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all processes below this one; empty on systems without /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # "pid (name) state parent ...", where the name may contain anything
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [ancestor]
    for parent in found:  # grows while it is read
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore our SIGTERM handler after code that installs its own, such as `ray.init`."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def interrupt_on_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on both signals while the context is open; in a command, start the `LastResort`.

    The handler is Python's own, which `asyncio.run` recognises and replaces with one that cancels the running task.
    """
    if _is_command and threading.current_thread() is threading.main_thread():
        LastResort.start()
    return handled_by(signal.default_int_handler, not_ignored())


@dataclass
class StopRequest:
    """Whether the user or the scheduler asked to stop; loops check it where they can end cleanly."""

    requested: bool = False


@contextmanager
def stop_request(
    message: str | None = None,
    *,
    signals: Iterable[signal.Signals] = SIGNALS,
    error: type[KeyboardInterrupt] = KeyboardInterrupt,
) -> Iterator[StopRequest]:
    """Take the first signal as a request to stop, and print `message`; a second request raises `error` immediately."""
    stop = StopRequest()
    requests = Requests()

    def note(number: int, frame: FrameType | None) -> None:
        if requests.add(number):
            raise error
        if not stop.requested:
            stop.requested = True
            if message is not None:
                write_line(message)

    with handled_by(note, signals):
        yield stop
