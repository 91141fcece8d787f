"""Write the pages of docs/ that are generated from the code: `python tools/write_reference.py`.

One function returns one page; a test checks that the committed pages are current.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import Flag, flags_of, summary_of, typical_use, without_none
from openrlhf.config.help import default_text

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = "<!-- Written by tools/write_reference.py; do not edit. -->"
GENERATED_BELOW = "<!-- The rest of this page is written by tools/write_reference.py; do not edit. -->"
FLAGS_INTRODUCTION = """
Every flag of every command. **Bold** flags are the essential ones, which `--help` shows; `--help all` shows all of
them, and `--help FLAG` also lists older and dotted spellings. A switch needs no value. In a YAML file (`--config`),
write the names without dashes."""
VALUES: Mapping[object, str] = {int: "integer", float: "number", str: "text"}


def flags_page() -> str:
    """The flag reference: each command with a typical command line, then each section of flags once."""
    lines = ["# Flags", GENERATED, FLAGS_INTRODUCTION, "\n## Commands"]
    sections: dict[Any, list[str]] = {}  # class of a section -> commands that have it
    for name, command in COMMANDS.items():
        use = typical_use(command, f"openrlhf {name}")
        lines.append(f"\n### {name}\n\n{summary_of(command)}\n\n```sh\n{use}\n```")
        for part in fields(command):
            sections.setdefault(type(getattr(command(), part.name)), []).append(name)
    for section, names in sections.items():
        title = str(section.__doc__).strip()
        lines.append(f"\n## {title}: {names[0]}\n" if len(names) == 1 else f"\n## {title}\n")
        lines.append(f"Of {', '.join(f'`{name}`' for name in names)}.\n")
        lines += ["| flag | values | default | meaning |", "|---|---|---|---|"]
        lines += [flag_row([(name, flags_of(COMMANDS[name])[item.name]) for name in names]) for item in fields(section)]
    return "\n".join(lines) + "\n"


def flag_row(in_commands: Sequence[tuple[str, Flag]]) -> str:
    """A row of the flag reference; defaults that differ between commands are listed by command."""
    item = in_commands[0][1]
    by_default: dict[str, list[str]] = {}
    for name, own in in_commands:
        shown = "required" if own.required and not own.default else default_text(own)
        by_default.setdefault(shown if shown in ("required", "not set") else f"`{shown}`", []).append(name)
    usual = max(by_default, key=lambda default: len(by_default[default]))
    others = [f"{', '.join(names)}: {default}" for default, names in by_default.items() if default != usual]
    name = f"**`{item.spelling}`**" if item.essential or item.required else f"`{item.spelling}`"
    needed = " or ".join(f"`--{name}`" for name in item.needed)
    meaning = f"{item.help} Needs {needed}." if needed else item.help
    cells = (name, allowed_values(item), "; ".join([usual, *others]), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def allowed_values(item: Flag) -> str:
    """The values of a flag as words: a type, choices, a range."""
    kind = without_none(item.type)
    if kind is bool:
        return "switch"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        element, second = get_args(kind)[:2]
        text = f"{VALUES[element]} ..." if second is Ellipsis else f"two {VALUES[element]}s"
    else:
        text = VALUES[kind]
    return f"{text}, {item.within.wanted.partition(':')[0]}" if item.within else text


def scale_page() -> str:
    """The page on memory: the part that people write, then tables of plans."""
    from tools.scale_page import tables as page  # imports PyTorch and Transformers

    written = (DOCS / "scale.md").read_text(encoding="utf-8").partition(GENERATED_BELOW)[0]
    return f"{written}{GENERATED_BELOW}\n\n{page()}"


PAGES: dict[str, Callable[[], str]] = {"flags.md": flags_page, "scale.md": scale_page}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
