"""Fixtures of tests that run commands; the conftest.py of their folders import them."""

import sys
from functools import cache

import datasets
import pytest
import torch

from tests.tiny import make_model
from tests.toys import FAST, Ran, run


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder to stand in, caches inside it, no launcher and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once per session of its own


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Weights & Biases without a network, its files in the test's folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small are faster on one thread than on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Model folders by kind and shape, each made once."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def get(kind="llama", **options):
        return make_model(root / str(len(list(root.iterdir()))), kind, **options)

    return get


@pytest.fixture
def train(tmp_path, models):
    """Runs a command on the tiny model; flags that are given win."""

    def start(command, name="out", **flags):
        paths = {"save_path": f"./{name}", "ckpt_path": f"./{name}_ckpt", "pretrain": models()}
        run(command, paths | FAST | flags)
        return Ran(tmp_path / name, tmp_path / f"{name}_ckpt")

    return start
