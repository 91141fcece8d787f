"""A commented YAML file for a first run of a task, and the reward or agent file that it names.

The file is generated from the config: every essential flag of the task's command with its help as a comment. Flags that
the task sets (`tasks.py`) are active; the others are commented out, with their defaults. So a new essential flag
appears in it without a change here.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from openrlhf.cli.starter.skeletons import AGENT, REWARD
from openrlhf.cli.starter.tasks import TASKS, Starter, Value
from openrlhf.config.commands import COMMANDS, InitConfig
from openrlhf.config.flags import Flag, in_reading_order
from openrlhf.errors import ConfigError
from openrlhf.monitor import say

WIDTH = 100
PLAIN = re.compile(r"[\w./@-]*[a-zA-Z/][\w./@-]*$")  # text that YAML reads as text without quotes
WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "~")
SKELETONS = {"remote_rm_url": ("reward.py", REWARD), "agent_func_path": ("agent.py", AGENT)}  # flag -> file, content


def run(config: InitConfig) -> None:
    """Print the YAML file, or write it and the code file next to it."""
    flags, starter = config.starter, TASKS[str(config.starter.task)]
    code = next((SKELETONS[name] for name in SKELETONS if name in starter.values), None)
    if flags.output is None:
        sys.stdout.write(yaml_text(starter, "run.yaml"))
        if code:
            say(f"you write ./{code[0]}; openrlhf init {flags.task} --output run.yaml writes one to start from")
        return
    path = Path(flags.output).expanduser()
    placed = {name: beside(path, file) for name, (file, _) in SKELETONS.items() if name in starter.values}
    text = yaml_text(replace(starter, values={**starter.values, **placed}), str(path))
    files = {path: text} | ({path.parent / code[0]: code[1]} if code else {})
    if path.is_dir() or (code and path.name == code[0]):
        raise ConfigError(f"--output {flags.output}: expected the name of a YAML file", try_this="--output run.yaml")
    existing = [file for file in files if file.exists()]
    if not flags.overwrite and existing:
        raise ConfigError(
            f"{' and '.join(map(str, existing))} would be overwritten",
            try_this="--overwrite, or --output in another folder",
        )
    for file, content in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}", try_this="another --output") from error
        say(f"{'replaced' if file in existing else 'wrote'} {file}")
    say(f"next: edit {' and '.join(map(str, files))}, then run openrlhf {starter.command} --config {path} --dry_run")


def beside(path: Path, name: str) -> str:
    """Return the path of a file next to `path`, in a form that cannot be taken for a hub name."""
    neighbour = path.parent / name
    return str(neighbour) if neighbour.is_absolute() else f"./{neighbour}"


def yaml_text(starter: Starter, path: str) -> str:
    """Return the YAML file of a task; `path` is where it will be stored."""
    call = f"openrlhf {starter.command} --config {path}"
    lines = [
        f"# {starter.what}.",
        "#",
        f"#   {call} --dry_run    # checks flags, data and reward without loading a model",
        f"#   {call}",
        "#",
        f"# A row of the dataset: {starter.rows}",
        *comment(
            f"Lines that are commented out show defaults. Flags on the command line override this file; openrlhf "
            f"{starter.command} --help all lists every flag."
        ),
    ]
    title = ""
    for item in in_reading_order(COMMANDS[starter.command]):
        listed = item.essential or item.required or item.name in starter.values
        if not listed or item.name == "dry_run":  # belongs on the command line
            continue
        if item.title != title:
            title = item.title
            lines += ["", f"# ---- {title}"]
        lines += flag_lines(item, starter.values)
    return "\n".join(lines) + "\n"


def flag_lines(item: Flag, values: Mapping[str, Value]) -> list[str]:
    """Return a flag's help as a comment, then the flag: active if the task sets it, else commented out."""
    if item.name in values:
        return [*comment(item.help), f"{item.name}: {scalar(values[item.name])}"]
    shown = "" if item.default is None else scalar(item.default)
    return [*comment(item.help), f"#{item.name}: {shown}".rstrip()]


def comment(text: str) -> list[str]:
    return fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False).splitlines()


def scalar(value: object) -> str:
    """Return a value in YAML: JSON is valid YAML, and quotes are left out if they are not needed."""
    if isinstance(value, str) and PLAIN.match(value) and value.lower() not in WORDS_OF_YAML:
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
