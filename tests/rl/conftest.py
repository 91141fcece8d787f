"""Tests of this folder run commands."""

from tests.command_fixtures import models, one_thread, own_folder, train, wandb_offline  # noqa: F401
