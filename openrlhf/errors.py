"""Errors that users can cause or must act on, in one hierarchy.

Each error also derives from a standard error, so that `except ValueError` works as expected for calls from Python.
Commands print the message and exit with `exit_code`: 2 for invalid input, 1 for a failed run.
"""

from collections.abc import Sequence
from typing import Self

RESUME = "the same command with --load_checkpoint, to resume from the last checkpoint"


class OpenRLHFError(Exception):
    """Base class with a one-line message and, if known, a fix in `try_this`."""

    exit_code = 1

    def __init__(self, message: str, *, try_this: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.try_this = try_this

    def __str__(self) -> str:
        return f"{self.message}. Try: {self.try_this}" if self.try_this else self.message


class ConfigError(OpenRLHFError, ValueError):
    """An invalid flag or combination of flags, usually detected before a model is loaded."""

    exit_code = 2


class DataError(OpenRLHFError, ValueError):
    """An unusable dataset, row or field; the message names the file, row and field."""

    exit_code = 2


class MissingExtraError(OpenRLHFError, ImportError):
    """A missing optional dependency; the message names the feature that needs it and the pip command."""

    exit_code = 2


class RewardError(OpenRLHFError, RuntimeError):
    """A failed reward function, server or model; the message names the sample that caused it."""


class RolloutError(OpenRLHFError, RuntimeError):
    """A failed engine or agent episode."""


class EngineError(RolloutError):
    """An unusable engine; no single sample caused it, so skipping samples will not help."""


class BackendError(OpenRLHFError, RuntimeError):
    """A failure that stops training: a dead worker, a non-finite loss or a checkpoint that does not match the run."""


class DeathError(BackendError):
    """A process that died, or that missed a deadline and counts as dead."""

    @classmethod
    def of_late(cls, process: str, seconds: float, timeout_flag: str | None) -> Self:
        """Return the error for a process that did not answer in time; `timeout_flag` set the deadline, if any did."""
        message = f"{process} did not answer within {seconds:g} seconds"
        if timeout_flag is None:
            return cls(message, try_this=RESUME)
        try_this = f"{RESUME}; with a larger {timeout_flag} if it was only slow"
        return cls(f"{message} ({timeout_flag})", try_this=try_this)


class DiskError(BackendError):
    """A file that cannot be written: the disk is full, the folder is read-only, or the user lacks permission."""


class DeviceMemoryError(BackendError):
    """A full device; once `explained`, the message names the phase, what takes the memory and the flags that help."""

    def __init__(self, message: str, *, try_this: str | None = None, explained: bool = False) -> None:
        super().__init__(message, try_this=try_this)
        self.explained = explained


class HubError(OpenRLHFError, RuntimeError):
    """A failed upload; the model is complete on this machine, and the message says how to upload it later."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__


def listed(items: Sequence[str], last: str = "and") -> str:
    """Return items as words of a message, such as `a`, `a and b` or `a, b or c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun for a message, such as `1 row` or `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
