"""Every error that a user can cause or must act on, in one tree.

Each is also the nearest standard error, so that `except ValueError` around a call from Python works as expected.
"""


class OpenRLHFError(Exception):
    """What went wrong in one line, and where it is known, what to type instead."""

    exit_code = 1

    def __init__(self, message: str, *, try_this: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.try_this = try_this

    def __str__(self) -> str:
        return f"{self.message}. Try: {self.try_this}" if self.try_this else self.message


class ConfigError(OpenRLHFError, ValueError):
    """A flag, or flags together, that cannot mean anything; found before a model loads."""

    exit_code = 2


class DataError(OpenRLHFError, ValueError):
    """A dataset, row or field that cannot be used; names file, row and field."""

    exit_code = 2


class MissingExtraError(OpenRLHFError, ImportError):
    """A part that is an extra is not installed; says what needs it and the pip command."""

    exit_code = 2


class RewardError(OpenRLHFError, RuntimeError):
    """A reward function, server or model that failed, with the sample that caused it."""


class RolloutError(OpenRLHFError, RuntimeError):
    """An engine or an agent episode that failed."""


class EngineError(RolloutError):
    """An engine that generates no more: no sample's fault, and skipping samples does not help."""


class BackendError(OpenRLHFError, RuntimeError):
    """Training that cannot go on: a dead worker, a loss that is not a number, a checkpoint that does not fit."""
