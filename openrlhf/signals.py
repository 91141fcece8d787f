"""All handling of Ctrl-C (SIGINT) and SIGTERM in the package.

A command passes through three phases. While it imports modules, a signal ends it immediately (`exit_on_signals`). While
it works, a signal raises KeyboardInterrupt (`interrupt_on_signals`), so a scheduler's SIGTERM is treated like a user's
Ctrl-C. During work that should end cleanly, such as an optimizer step or a chat reply, the first signal only requests a
stop (`stop_request`), and a second one raises. Python delivers signals to the main thread only, so in any other thread
these functions do nothing, unless the main thread waits for that thread and forwards its signals (`forward_signals`).

An exception is raised only when the main thread next runs Python code, and the cleanup after it may hang. Each command
therefore has a thread that also counts the signals (`LastResort`): GRACE_SECONDS after the second request it kills the
child processes and ends the program. If nothing can be lost, it does so at the first request (`end_at_first_signal`).
Code that never releases the interpreter lock blocks this thread, too; then only SIGKILL ends the program.
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
SAME_REQUEST = 1.0  # seconds within which launchers may deliver the same request twice
GRACE_SECONDS = 4.0  # time for the program to exit after the second request, before it is ended
SAVES = "\nopenrlhf: stopping after this step, with a checkpoint; press Ctrl-C again to stop immediately, without one"
SAVES_NOTHING = (
    "\nopenrlhf: stopping after this step, without a checkpoint (--disable_ds_ckpt);"
    " press Ctrl-C again to stop immediately"
)

# True in our own commands, which may end the process; False if another program imports the package.
_is_command = False
# Handlers of the `stop_request` contexts that are open in threads other than the main one, innermost last.
_handlers_elsewhere: list[Callable[[int, FrameType | None], None]] = []


def write_line(line: str) -> None:
    """Print a line to stderr from a signal handler; `print` is unsafe there, since the signal may interrupt another."""
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
    """Return the signals to handle, without those that the parent process (nohup, a shell) set to be ignored."""
    return [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], object],
    signals: Iterable[signal.Signals] = SIGNALS,
    *,
    ends: bool = True,
) -> Iterator[None]:
    """Install `handler` for the signals while the context is open, and restore the previous handlers afterwards.

    Pass `ends=False` for signals that never request the end of the program, however often they arrive.
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
    """Requests to stop that have arrived so far; repeated deliveries of one request count once."""

    first: float | None = None  # time at which the first request arrived

    def add(self, number: int) -> bool:
        """Record a signal and return whether it is a further request.

        A SIGTERM right after another signal is the same request, delivered twice: to the process group, and by the
        launcher. In a launched process no SIGTERM counts as a further request, because the `deepspeed` launcher signals
        its processes one after another, seconds apart; launchers kill processes that do not end.
        """
        now = time.monotonic()
        if self.first is None:
            self.first = now
            return False
        if number == signal.SIGINT:
            return True
        return "RANK" not in os.environ and now - self.first > SAME_REQUEST


class LastResort:
    """Thread that ends the program if it is still running GRACE_SECONDS after the second request to stop.

    The interpreter writes each signal to a pipe, which this thread reads even while the main thread is blocked.
    """

    counted = frozenset(SIGNALS)  # signals that count as requests to stop in the current context
    at_first = False  # end the program at the first request
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
        # A forked child inherits the pipe, but its signals must not count here.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=cls._watch, args=(reading,), daemon=True, name="openrlhf-last-resort").start()

    @classmethod
    def _watch(cls, pipe: int) -> None:
        requests = Requests()
        while True:
            for number in os.read(pipe, 1):
                if cls.at_first and number in cls.counted:
                    end_program("openrlhf: interrupted", INTERRUPTED)
                if number in cls.counted and requests.add(number):
                    time.sleep(GRACE_SECONDS)
                    frame = sys._current_frames().get(threading.main_thread().ident or 0)
                    place = f" in {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
                    late = f"{GRACE_SECONDS:g} s after the second signal"
                    end_program(f"openrlhf: still running{place} {late}: killing all processes", INTERRUPTED)


def end_program(line: str, code: int) -> NoReturn:
    """Print a line, kill all descendants and exit, from any thread and even while the main thread is blocked."""
    write_line(line)
    for child in descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    os._exit(code)


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all descendants of a process; empty on systems without /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # "pid (name) state parent ...", where the name may contain anything
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [ancestor]
    for parent in found:  # the list grows during the loop
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]


@contextmanager
def end_at_first_signal() -> Iterator[None]:
    """End a command at the first signal while the context is open: for waits in C++ that no exception interrupts."""
    LastResort.at_first = True
    try:
        yield
    finally:
        LastResort.at_first = False


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore our SIGTERM handler after code that installs its own, such as `ray.init`."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # other threads cannot install a handler
            signal.signal(signal.SIGTERM, ours)


def interrupt_on_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on either signal while the context is open; in a command, start `LastResort`.

    The handler is Python's own, which `asyncio.run` recognises and replaces with one that cancels the running task.
    """
    if _is_command and threading.current_thread() is threading.main_thread():
        LastResort.start()
    return handled_by(signal.default_int_handler, not_ignored())


@dataclass
class StopRequest:
    """Flag that the user or the scheduler requested a stop; loops check it at points where they can end cleanly."""

    requested: bool = False


@contextmanager
def stop_request(
    message: str | None = None,
    *,
    signals: Iterable[signal.Signals] = SIGNALS,
    error: type[KeyboardInterrupt] = KeyboardInterrupt,
) -> Iterator[StopRequest]:
    """Treat the first signal as a request to stop and print `message`; raise `error` on a second request."""
    stop = StopRequest()
    requests = Requests()

    def note(number: int, frame: FrameType | None) -> None:
        if requests.add(number):
            raise error
        if not stop.requested:
            stop.requested = True
            if message is not None:
                write_line(message)

    if threading.current_thread() is threading.main_thread():
        with handled_by(note, signals):
            yield stop
        return
    _handlers_elsewhere.append(note)
    try:
        yield stop
    finally:
        _handlers_elsewhere.remove(note)


def forward_signals(interrupt: Callable[[], object]) -> AbstractContextManager[None]:
    """Let the main thread wait for another thread's work: that thread's open `stop_request` handles the signals.

    `interrupt` is called if there is none, or if it raises at the second request. It must make the other thread end.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        try:
            if not _handlers_elsewhere:
                raise KeyboardInterrupt
            _handlers_elsewhere[-1](number, frame)
        except KeyboardInterrupt:
            interrupt()

    return handled_by(forward, not_ignored())
