"""The shell blocks of the documentation, run on tiny models as a reader would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.config.commands import COMMANDS
from tests.warm import warm_children

ROOT = Path(__file__).parents[2]
QUICK = ("commands/train_kto", "commands/interactive_chat")  # run in every test run; the others nightly
PAGES = {path.relative_to(ROOT / "docs").with_suffix("").as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
RUNNING = sorted(name for name, path in PAGES.items() if "\n```bash\n" in path.read_text(encoding="utf-8"))
WATCHDOG = 1200  # seconds for a page; on two idle cores each takes less than a tenth of it


@pytest.fixture
def run_docs(monkeypatch):
    """Return the module tools/run_docs.py."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import run_docs

    return run_docs


def run_pages(folder, *names):
    words = [sys.executable, str(ROOT / "tools/run_docs.py"), "--folder", str(folder)]
    pages = [str(ROOT / "docs" / f"{name}.md") for name in names]
    environ = os.environ | warm_children()
    done = subprocess.run([*words, *pages], capture_output=True, text=True, timeout=WATCHDOG, env=environ, check=False)
    logs = [log.read_text(encoding="utf-8")[-3000:] for log in folder.rglob("log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])


@pytest.mark.slow(seconds=15)
def test_quick_pages_run(tmp_path):
    run_pages(tmp_path, *QUICK)
    assert (tmp_path / "pages/commands/train_kto/kto/config.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNNING)
def test_every_page_runs(name, tmp_path):
    run_pages(tmp_path, name)


def test_a_failing_command_fails_its_page(tmp_path, run_docs):
    """A later command that succeeds must not hide an earlier one that fails."""
    (tmp_path / "models").mkdir()
    page = run_docs.Page("page", ("false\n", "true\n"), {})
    assert "exit 1" in run_docs.run_page(page, tmp_path)


def test_a_page_gets_the_files_that_it_shows(tmp_path, run_docs):
    (tmp_path / "models" / "model").mkdir(parents=True)
    files = {"rows.jsonl": '{"a": 1}\n{"a": 2}\n', "reward.py": "x = 1\n"}
    commands = ('test "$(wc -l < rows.jsonl)" = 64\n', "cmp reward.py <(echo 'x = 1')\n", "test -d ./model\n")
    assert run_docs.run_page(run_docs.Page("page", commands, files), tmp_path) == ""


def test_every_page_of_a_command_has_something_to_run():
    pages = {name for name in PAGES if name.startswith("commands/")} - {"commands/index"}
    assert pages <= set(RUNNING)
    assert {name.removeprefix("commands/") for name in pages} <= set(COMMANDS)
