"""Run the shell blocks of documentation pages, as if a reader copied them one after another.

    python tools/run_docs.py                             # every page with shell blocks
    python tools/run_docs.py docs/commands/train_sft.md  # some of them

A fence marked `bash` is run; one marked `sh` is not, and the text around it says why (eight GPUs, Docker). A fence with
a title is a file: it is written before the first command, so that a page shows the data, reward or config that its
commands read. Rows of a `.jsonl` file are repeated up to ROWS.

Commands run unchanged, so their sizes are those of the page. They stay quick because `./model`, `./teacher` and
`./reward_model` are tiny models with random weights, and because the data has only ROWS rows. All blocks of a page run
in one shell that stops at the first failure, in a new folder with `examples/` in it. The shell gets:

- `openrlhf`, run by this interpreter from this checkout;
- PORT, a free port, for pages that start a server on `${PORT:-5000}`;
- its own datasets cache, no hub, and settings for Ray and vLLM on a CPU.
"""

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from run_examples import execute, free_port, surroundings
from tiny_examples import CHAT_TEMPLATE, SHAPE, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[1]
ROWS = 64
POSITIONS = 4096  # room for the default lengths of every command
STEP_END = "ки"  # the placeholder of process reward models, which must be a single token
FENCE = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<file>[^\"]+)\")?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """The shell blocks and files of a page."""

    name: str  # relative to docs/, without .md
    commands: tuple[str, ...]  # shell blocks, in order
    files: dict[str, str]  # file name -> content


def read_page(path: Path) -> Page:
    """Collect the shell blocks and files of a page."""
    fences = list(FENCE.finditer(path.read_text(encoding="utf-8")))
    commands = tuple(fence["text"] for fence in fences if fence["kind"] == "bash" and not fence["file"])
    files = {fence["file"]: fence["text"] for fence in fences if fence["file"]}
    return Page(path.relative_to(ROOT / "docs").with_suffix("").as_posix(), commands, files)


def pages_with_commands() -> list[Page]:
    """Return every page of docs/ that has something to run."""
    pages = [read_page(path) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if page.commands]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages (default: all with shell blocks)")
    parser.add_argument("--folder", type=Path, help="folder for all files, which is kept (default: a new one)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # `execute` then also ends the page's processes
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="docs-"))).resolve()
    pages = [read_page(path.resolve()) for path in args.pages] or pages_with_commands()
    make_models(folder / "models")
    failed = 0
    for page in pages:
        began = time.monotonic()
        wrong = run_page(page, folder)
        print(f"{page.name:30}{time.monotonic() - began:6.0f} s  {wrong or 'ok'}", flush=True)
        failed += bool(wrong)
    print(f"everything is in {folder}")
    sys.exit(1 if failed else 0)


def make_models(folder: Path) -> None:
    """Write the models that pages name; a page gets links to them."""
    disable_progress_bar()
    tokenizer, shape = byte_tokenizer(), partial(LlamaConfig, **SHAPE | {"max_position_embeddings": POSITIONS})
    for name in ("model", "teacher"):
        save_model(folder / name, tokenizer, shape, AutoModelForCausalLM)
    save_model(folder / "reward_model", tokenizer, shape, AutoModelForSequenceClassification, num_labels=1)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, so that it can represent the text of every page."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([STEP_END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def run_page(page: Page, folder: Path) -> str:
    """Run all blocks of a page in one shell; return what went wrong, or an empty string."""
    work = folder / "pages" / page.name
    prepare(work, page, folder / "models")
    # Blocks may start background jobs, so the shell runs them as they are; -x shows in the log which line failed.
    script = "set -x\n" + "\n".join(page.commands)
    # A short path, because socket paths are limited in length.
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp", ignore_cleanup_errors=True) as ray:
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PORT": str(free_port()),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(work / ".cache"),
            "RAY_TMPDIR": ray,
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with (work / "log").open("w", encoding="utf-8") as log:
            code = execute(script, surroundings(folder) | settings, work, log)
    return f"exit {code}: {work}/log" if code else ""


def prepare(work: Path, page: Page, made: Path) -> None:
    """Fill the folder of a page: its files, links to models and examples, and the program `openrlhf`."""
    work.mkdir(parents=True)
    for place in (*made.iterdir(), ROOT / "examples"):
        (work / place.name).symlink_to(place)
    for name, text in page.files.items():
        rows = text.splitlines(keepends=True)
        repeated = (rows * ROWS)[:ROWS] if name.endswith(".jsonl") else rows
        (work / name).write_text("".join(repeated), encoding="utf-8")
    program = made.parent / "bin" / "openrlhf"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m openrlhf.cli.main "$@"\n', encoding="utf-8")
    program.chmod(0o755)


if __name__ == "__main__":
    main()
