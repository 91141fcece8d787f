"""Tests of this folder run commands."""

from tests.command_fixtures import alone, models, offline, one_thread, train  # noqa: F401
