"""docs/flags.md is what tools/write_reference.py writes, and has every flag of every command."""

import re

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of
from tools.write_reference import DOCS, flags_page

PAGE = (DOCS / "flags.md").read_text(encoding="utf-8")


def test_the_committed_page_is_current():
    assert flags_page() == PAGE, "run: python tools/write_reference.py"


def test_every_flag_of_every_command_has_a_row_and_essential_ones_are_bold():
    sections = [part.partition("\n| flag")[::2] for part in PAGE.split("\n## ")[2:]]
    for name, command in COMMANDS.items():
        tables = "".join(table for head, table in sections if f"`{name}`" in head)
        rows = {flag: bold for bold, flag in re.findall(r"^\| (\**)`(?:--)?(\w+)`", tables, re.MULTILINE)}
        flags = {item.spelling.removeprefix("--"): item for item in flags_of(command).values()}
        assert rows.keys() == flags.keys()
        assert {flag for flag, bold in rows.items() if bold} == {
            flag for flag, item in flags.items() if item.essential or item.required
        }
