"""docs/data.md: every row on the page is read by its command, with the flags next to it and without a warning."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig

import openrlhf
from openrlhf.config.preview import PREVIEWED, parse_preview
from openrlhf.inference.preview import run
from tests.tiny import make_tokenizer

PAGE = Path(openrlhf.__file__).parents[1] / "docs" / "data.md"
TABLE_ROW = re.compile(r"^\| `(\{.*\})` \| (?:`(.*)` )?\|$", re.MULTILINE)


def cases():
    """Yield the command, the row and the flags of each table row."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        commands = [word for word in heading.split() if word in PREVIEWED]
        for row, flags in TABLE_ROW.findall(body):
            yield from ((command, row, flags) for command in commands)


CASES = list(cases())


def test_the_page_has_rows_for_every_command():
    assert {command for command, _, _ in CASES} == set(PREVIEWED)
    assert PAGE.read_text(encoding="utf-8").count("| `{") == len({(row, flags) for _, row, flags in CASES})


@pytest.mark.parametrize(("command", "row", "flags"), CASES)
def test_each_row_of_the_page_is_accepted(command, row, flags, tmp_path, capsys):
    make_tokenizer().save_pretrained("model")
    for folder in ("model", "teacher", "reward"):
        LlamaConfig().save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    data = "--prompt_data" if command.startswith("train_ppo") else "--dataset"
    config, shown = parse_preview(command, ["--pretrain", "./model", data, "rows.jsonl", *shlex.split(flags)])
    (preview,) = run(config, shown)
    assert (len(preview.rows), preview.report.dropped.total(), preview.report.truncated) == (1, 0, 0)
    assert preview.report.findings == []
    assert capsys.readouterr().err == ""
