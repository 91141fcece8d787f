"""Fixtures for tests that run commands."""

from tests.command_fixtures import models, own_folder, train, wandb_offline  # noqa: F401
