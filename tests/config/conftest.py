import pytest
from huggingface_hub import constants


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    """Unset the variables that flags, rules and the runtime read; a test that needs one sets it."""
    for name in ("RANK", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("OPENRLHF_ASYNC_QUEUE_SIZE", "OPENRLHF_ASYNC_NUM_TASKS", "OPENRLHF_RM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Change to a folder with the smallest files that a command line can name."""
    for folder, file in (("model", "config.json"), ("adapter", "adapter_config.json"), ("empty", "readme.txt")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    for file in ("data.jsonl", "reward.py", "agent.py", "history.txt"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path
