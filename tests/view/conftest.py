"""Fixtures for the page of runs: real runs, made once."""

import pytest

from tests.command_fixtures import own_folder  # noqa: F401
from tests.view.made_runs import train_supervised, train_with_agent


@pytest.fixture(scope="session")
def agent_run(tmp_path_factory):
    """The --save_path of a real run whose episodes have two turns."""
    return train_with_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="session")
def supervised_run(tmp_path_factory):
    """The --save_path of a real SFT run."""
    return train_supervised(tmp_path_factory.mktemp("supervised"))
