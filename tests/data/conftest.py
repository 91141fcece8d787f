"""Fixtures for tests that read rows from files."""

import pytest

from openrlhf.data.sources import load_dataset_rows
from tests.command_fixtures import own_folder  # noqa: F401
from tests.data.chat_words import word_tokenizer
from tests.toy_data import write_rows


@pytest.fixture
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def records(tmp_path):
    """Return a function that writes rows to data.jsonl and loads them."""

    def make(*rows):
        write_rows(tmp_path / "data.jsonl", rows)
        return load_dataset_rows("data.jsonl", split="train")

    return make
