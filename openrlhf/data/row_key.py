"""The key of rows in the cache: a hash of everything that determines them.

Rows follow from the records, the fields of their reader (flags, templates, tokenizer) and the code. `row_key` returns
None if one of them has no exact description, and such rows are not cached: making rows again only costs time, but rows
of another dataset or template would ruin a run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.data.json_text import is_exact
from openrlhf.data.records import Records
from openrlhf.data.report import Budget
from openrlhf.data.rows import RowReader
from openrlhf.data.templates import Chat

PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")
CLOCK = "strftime_now"  # the function with which chat templates, such as Llama's, ask for the date
TIME_OF_DAY = re.compile(r"%[-_]?[HIklMSfpPrRsTXcz]")
RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")  # random text that Jinja offers to templates


class NoKey(ValueError):
    """Raised for a setting that does not determine the rows."""


def row_key(records: Records, reader: RowReader[object], budget: Budget) -> str | None:
    """Return the name of these rows in the cache, or None if they must not be cached."""
    try:
        settings = [f"{type(reader).__module__}.{type(reader).__name__}", describe(reader), describe(budget)]
    except NoKey:
        return None
    digests = [source.digest(records.rows_used(number)) for number, source in enumerate(records.sources)]
    if None in digests:
        return None
    order = hashlib.sha256(records.order.tobytes()).hexdigest()
    text = json.dumps([code_version(), settings, digests, order])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def describe(value: object) -> object:
    """Return a setting of a reader as JSON; raise NoKey if that would not determine the rows."""
    if isinstance(value, PreTrainedTokenizerBase):
        return describe_tokenizer(value)
    if is_dataclass(value):
        clock = clock_of(value) if isinstance(value, Chat) else []
        return [*clock, {field.name: describe(getattr(value, field.name)) for field in fields(value)}]
    if isinstance(value, tuple):
        return [describe(item) for item in value]
    if not is_exact(value):
        raise NoKey(f"a {type(value).__name__} has no exact description")
    return value


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Return a hash of the tokenizer's rules, its special tokens, chat templates and other settings.

    Classes outside Transformers may change their code, and slow tokenizers have no complete description.
    """
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        raise NoKey(f"a {type(tokenizer).__name__} has no exact description")
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = json.dumps(known | {"truncation": None, "padding": None})  # every call sets both
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name != "name_or_path"}
    return [
        type(tokenizer).__name__,
        hashlib.sha256(rules.encode()).hexdigest(),
        json.dumps([settings, tokenizer.special_tokens_map], sort_keys=True, default=repr),
        tokenizer.chat_template,
        tokenizer.split_special_tokens,
    ]


def clock_of(chat: Chat) -> list[str]:
    """Return today's date if a chat template asks for it; raise NoKey if one asks for the time, or is random."""
    text = json.dumps([chat.override, chat.tokenizer.chat_template])
    if RANDOM.search(text) or (CLOCK in text and TIME_OF_DAY.search(text)):
        raise NoKey("the chat template renders differently each time")
    return [date.today().isoformat()] if CLOCK in text else []


def code_version() -> Mapping[str, str]:
    """Return the versions of the packages that make rows, and a hash of our own code, which may be edited."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return {name: version(name) for name in PACKAGES} | {"openrlhf.data": code.hexdigest()}
