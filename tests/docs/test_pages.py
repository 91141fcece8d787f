"""The documentation pages: the site builds, links work on it and on GitHub, and flags and messages exist."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from openrlhf.config.aliases import known_spellings
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of
from openrlhf.config.plan import PlanFlags
from openrlhf.config.preview import PreviewFlags

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^]\[]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][\w.-]*\w)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MESSAGE = re.compile(r"^```message\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
LONG = 10  # minimum length of a message's fragment to look up

# Flags of programs that pages mention, besides our own.
OTHER_PROGRAMS = {
    "argparse": "config help version flag",
    "curl": "data fail header silent",
    "docker": "gpus security-opt",
    "git": "sign",
    "pip and its tools": "disable-pip ignore-requires-python index-url no-deps require-hashes requirement strict yes",
    "launchers": "module num_gpus nproc_per_node",
    "pytest": "random-order",
    "ray": "address block head working-dir",
    "Slurm": "exclusive gpus-per-node nodes ntasks ntasks-per-node overlap",
}
SCRIPTS = ("benchmarks/", "examples/pipelines", "make drill")  # a page with one of these may name flags of our scripts


def page_name(path):
    return path.relative_to(ROOT).as_posix()


def slugs(path):
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow(seconds=4)
def test_the_site_builds_without_a_warning(tmp_path):
    """In strict mode, mkdocs fails on a page outside the navigation and on broken links and anchors."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "openrlhf" in page
    loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(\w+:)?//', page)
    assert not loaded, "a reader's browser would fetch something from the network"


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_resolve_on_github(path):
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), f"{page_name(path)} links to {target}"
        if anchor:
            assert anchor in slugs(place), f"{page_name(path)} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_flag_exists(path):
    text = path.read_text(encoding="utf-8")
    known = {name for config in COMMANDS.values() for name in known_spellings(config)}
    known |= {item.name for section in (PreviewFlags, PlanFlags) for item in fields(section)}
    known |= {name for names in OTHER_PROGRAMS.values() for name in names.split()}
    if any(script in text for script in SCRIPTS):
        known |= script_flags()
    unknown = {name for name in FLAG.findall(text) if name not in known}
    assert not unknown


def script_flags():
    """Return the flags of the scripts in examples/, benchmarks/ and tools/."""
    files = [path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    return {name for path in files for name in re.findall(r'"--(\w+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("path", sorted((ROOT / "docs/commands").glob("*_*.md")), ids=lambda path: path.stem)
def test_tables_state_the_defaults(path):
    """Numbers, `off`, `none` and quoted texts are compared; descriptions of a default are not."""
    flags = flags_of(COMMANDS[path.stem])
    text = path.read_text(encoding="utf-8")
    table = text.partition("| flag | default |")[2].partition("\n\n")[0]
    for first, second in re.findall(r"^\| (`--.*?) \| (.*?) \|", table, re.MULTILINE):
        names, shown = re.findall(r"`--(\w+)`", first), second.split(", ")
        for name, value in zip(names, shown, strict=False):
            assert states(value, flags[name].default), f"--{name} is {flags[name].default!r}, not {value}"


def states(shown, default):
    """Return whether a cell agrees with a default, as far as it can be compared."""
    known = {"off": (False,), "none": (None, "", ())}
    if shown in known:
        return default in known[shown]
    if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", shown):
        return default is None or float(shown) == default  # None: the table shows the value derived from other flags
    quoted = re.fullmatch(r"`([^-].*)`", shown)
    return quoted is None or quoted[1].replace("\\n", "\n") == default


@pytest.mark.slow(seconds=2)
def test_every_quoted_message_exists():
    """Messages are split at `...`; each longer fragment must be part of a text in the package."""
    messages = MESSAGE.findall((ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) > 40
    texts = "\n".join(text for path in (ROOT / "openrlhf").rglob("*.py") for text in texts_of(path))
    missing = [part for message in messages for part in fragments_of(message) if part not in texts]
    assert not missing


def fragments_of(message):
    """Return the parts of a message that are long enough to look up, or the longest if none is."""
    parts = [part.strip() for part in message.split("...")]
    return [part for part in parts if len(part) >= LONG] or [max(parts, key=len)]


def texts_of(path):
    """Yield the string literals of a file, with adjacent ones joined and the values of an f-string left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "\0".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_migration_names_arguments_of_trl():
    """The first column of TRL's tables, looked up in its sources: importing it would take seconds."""
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    section = page.partition("## From TRL")[2].partition("## From LLaMA-Factory")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) > 40
    files = [*package("trl").glob("trainer/*.py"), package("transformers") / "training_args.py"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    defined = set(re.findall(r"^ +(\w+): |^class (\w+)", sources, re.MULTILINE))
    assert not names - {name for pair in defined for name in pair}


def package(name):
    return Path(find_spec(name).origin).parent
