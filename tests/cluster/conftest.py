"""Fixtures for tests that run commands on Ray."""

import shutil

import pytest

from tests.cluster.ray_machine import end, make_machine
from tests.command_fixtures import models, own_folder, train, wandb_offline  # noqa: F401


@pytest.fixture
def machine():
    """A Machine for Ray drivers; all processes that a test leaves there are killed."""
    made = make_machine()
    yield made
    end(made.processes())
    shutil.rmtree(made.folder)
