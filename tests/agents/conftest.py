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
    """Write a .py file with this source and return its path."""

    def make(source, name="user.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return make


@pytest.fixture(autouse=True)
def no_process_left():
    """Check that a test ends every child process that it started; zombies count too."""
    before = children()
    yield
    assert children() == before


@pytest.fixture
def build(tokenizer):
    """Build the executor for these flags; `no_process_left` fails a test that does not close it."""

    def make(context_length=64, processes=1, *, in_lockstep=False, **flags):
        flags = {"reward_timeout": 20.0, "reward_processes": processes} | flags
        return build_executor(RewardFlags(**flags), tokenizer, context_length=context_length, in_lockstep=in_lockstep)

    return make
