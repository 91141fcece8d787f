"""Fixtures for tests that run training functions."""

from tests.command_fixtures import models, own_folder, train  # noqa: F401
