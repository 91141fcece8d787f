"""Fixtures for tests that run commands.

A fixture is visible below the conftest.py that holds it, and several folders run commands, so the fixtures are defined
here and the conftest.py of each such folder imports them. `own_folder` applies to every test in the folder.
"""

import sys
from functools import cache

import datasets
import pytest

from tests.commands import FAST, FinishedRun, run_command, unlisted_metrics
from tests.tiny import make_model


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run the test in an empty folder, with its own datasets cache and without the variables of a launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # wandb reads the environment only when its service starts


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    """Run Weights & Biases without a network, with its files in the test's folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return a function that gives the folder of a tiny model of this kind, shape and seed; each is made once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(kind="llama", **options):
        return make_model(root / str(len(list(root.iterdir()))), kind, **options)

    return make


@pytest.fixture
def train(tmp_path, models):
    """Return a function that runs a command on the tiny model; its flags override the defaults here."""

    def start(command, name="out", **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": models()}
        run_command(command, paths | FAST | flags)
        assert unlisted_metrics(command, tmp_path / name / "run", ["labelled"]) == []  # of rl/toy_task
        return FinishedRun(tmp_path / name, tmp_path / f"{name}_ckpt")

    return start
