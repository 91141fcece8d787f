import textwrap

import pytest
from sessions import children

from openrlhf.agents.build import build_executor
from openrlhf.config.sections.rl import RewardFlags
from tests.tiny import make_tokenizer


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def write(tmp_path):
    """A .py file with this source."""

    def make(source, name="user.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return make


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test closes what it opened: no child process stays, not even as a zombie."""
    before = children()
    yield
    assert children() == before


@pytest.fixture
def build(tokenizer):
    """An executor for these flags; what a test forgets is found by `nothing_left`."""

    def make(context_length=64, processes=1, **flags):
        flags = {"reward_timeout": 20.0} | flags
        return build_executor(RewardFlags(**flags), tokenizer, context_length=context_length, processes=processes)

    return make
