"""A hub that cannot be reached costs one attempt, not a minute of retries, and a mistyped path is recognised."""

import socket

import huggingface_hub
import pytest

from openrlhf.config.sections.model import LoadingFlags
from openrlhf.data.hub import connection_failure, hub_failure
from openrlhf.data.sources import load_dataset_rows
from openrlhf.errors import ConfigError, DataError
from openrlhf.models.load import load_tokenizer, read_config
from tests.hub_cache import FIRST, offline_cache
from tests.tiny import make_model


@pytest.fixture
def dead_hub(tmp_path, monkeypatch):
    """Point the hub's client to a port at which nothing listens, with an empty cache; return the cache."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    cache = offline_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.mark.usefixtures("dead_hub")
def test_an_unreachable_hub_is_named_with_the_probable_folder(tmp_path):
    make_model(tmp_path / "models" / "qwen")
    for load in (load_tokenizer, read_config):
        with pytest.raises(ConfigError) as caught:
            load("models/qwn", LoadingFlags())
        message = str(caught.value)
        assert message.startswith("models/qwn is neither a local folder nor in the cache, and http://127.0.0.1:")
        assert message.endswith("cannot be reached: Connection refused. Try: ./models/qwen")
    with pytest.raises(ConfigError, match=r"Try: a folder on this machine, or HF_ENDPOINT"):
        load_tokenizer("org/model", LoadingFlags())


@pytest.mark.usefixtures("dead_hub")
def test_the_same_holds_for_datasets(tmp_path):
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match=r"^row is neither a local path nor in the cache, and .* Try: ./rows$"):
        load_dataset_rows("row", split="train")


def test_a_cached_model_loads_without_the_hub(dead_hub, tmp_path):
    make_model(tmp_path / "made")
    dead_hub.add("org/model", FIRST, tmp_path / "made", tag="main")
    assert load_tokenizer("org/model", LoadingFlags()).eos_token == "</s>"
    assert read_config("org/model", LoadingFlags()).model_type == "llama"


def test_a_reachable_or_disabled_hub_is_not_a_failure(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connection_failure(f"http://127.0.0.1:{server.getsockname()[1]}") is None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_failure() is None


def test_a_proxy_is_contacted_instead_of_the_hub(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        assert connection_failure("https://hub.invalid") is None
