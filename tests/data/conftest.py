import datasets
import pytest

from openrlhf.data.sources import load_dataset_rows
from tests.data.chat_words import word_tokenizer, write_lines


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path, monkeypatch):
    """A folder to stand in, the datasets cache inside it, and one process that speaks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def records(tmp_path):
    """Rows as they come out of data.jsonl."""

    def make(*rows):
        write_lines(tmp_path / "data.jsonl", rows)
        return load_dataset_rows("data.jsonl", split="train")

    return make
