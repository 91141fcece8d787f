"""Checks for data that loads without an error but is probably not what the user meant.

Each check is a pure function that returns a `Finding` or None. Those on fields look at the first rows before they are
formatted (`first_rows`); those on texts look at the first formatted rows (`DataReport.texts`).
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from openrlhf.config.sections.data import PairFlags, TemplateFlags, split_names
from openrlhf.data.records import Records
from openrlhf.data.report import CHECKED, DataReport, Finding

PROMPT_FIELDS = ("prompt", "question", "instruction", "query", "input", "conversations", "messages")
LABEL_FIELDS = ("label", "answer", "ground_truth", "solution", "target", "reference", "expected")
# Text that chat templates write around messages; data that contains it has already been formatted.
CHAT_MARKUP = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "[INST]", "<｜User｜>")
LONGEST = 5000  # maximum characters to check per text
BEFORE = 20  # characters to quote before the first lost one
QUOTED = 60  # maximum characters of a quotation

FieldValues = Mapping[str, object]


def first_rows(records: Records) -> list[FieldValues]:
    """Return the fields of the first rows."""
    return [records[position].row for position in range(min(CHECKED, len(records)))]


def field_findings(
    rows: Sequence[FieldValues], fields: Sequence[str | None], template: TemplateFlags
) -> tuple[Finding | None, ...]:
    """Return the findings that any command with a template may have, from the fields that it reads."""
    read = [field for field in fields if field is not None]
    if template.apply_chat_template and template.system_key is not None:
        read.append(template.system_key)
    names = [name for field in read for name in names_in(field, rows)]
    texts = [text for row in rows for name in names for text in texts_in(row.get(name))]
    return unknown_field(rows, read), messages_as_text(texts), formatted_twice(texts, template)


def names_in(field: str, rows: Sequence[FieldValues]) -> tuple[str, ...]:
    """Return the fields that a flag names: one, whose name may contain commas, or a list like `instruction,input`."""
    return (field,) if any(field in row for row in rows) else split_names(field)


def unknown_field(rows: Sequence[FieldValues], fields: Sequence[str]) -> Finding | None:
    """Find a field that no row has; in a list such as `instruction,input`, only the first field is required."""
    for field in fields:
        for place, name in enumerate(names_in(field, rows)):
            if rows and not any(name in row for row in rows):
                problem = f"none of the first {len(rows)} rows has a field {name!r}"
                if place:
                    return Finding(f"{problem} (optional in {field!r})", "leave it out if no row has it")
                return Finding(problem, "check its spelling")
    return None


def template_ends_in_space(report: DataReport, template: TemplateFlags) -> Finding | None:
    """Find a space at the end of the prompt that the tokenizer joins with the response.

    At generation time, the prompt ends in a token for the space alone, which the model never saw in training.
    """
    text = template.input_template or ""
    if template.apply_chat_template or not text.endswith(" ") or report.joined_prompts <= len(report.lengths) / 2:
        return None
    problem = (
        f"--input_template ends in a space, which the tokenizer joins with the first word of the response in"
        f" {report.joined_prompts} of {len(report.lengths)} rows, but a prompt without a response ends in a lone space"
    )
    return Finding(problem, f"--input_template ${text.rstrip(' ')!r}, here and in every later command")


def texts_in(value: object) -> Iterator[str]:
    """Yield the text itself, or the text of each message in a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for content in value.values():
            yield from texts_in(content)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def messages_as_text(texts: Iterable[str]) -> Finding | None:
    """Find message lists that were stored as text, which would be trained on as plain text."""
    for text in texts:
        if text.lstrip().startswith("[{") and ('"role"' in text or "'role'" in text or '"from"' in text):
            return Finding(
                f"the text {quote(text)} looks like a message list that was stored as text",
                "store it as a list, and use --apply_chat_template",
            )
    return None


def formatted_twice(texts: Iterable[str], template: TemplateFlags) -> Finding | None:
    """Find text that is already formatted as a chat and would be formatted again."""
    if not template.apply_chat_template and template.input_template is None:
        return None
    outer = "the chat template" if template.apply_chat_template else f"--input_template {template.input_template!r}"
    for text in texts:
        marks = [mark for mark in CHAT_MARKUP if mark in text]
        if marks:
            return Finding(
                f"the text {quote(text)} already contains chat markup ({marks[0]}) and is formatted again with {outer}",
                f"--input_template ''{', without --apply_chat_template' if template.apply_chat_template else ''}",
            )
    return None


def unused_prompt(rows: Sequence[FieldValues], fields: PairFlags) -> Finding | None:
    """Find pairs whose prompts would be lost: no flag names their field, and the responses do not contain them."""
    if fields.prompt_key is not None:
        return None
    for row in rows:
        name = next((name for name in PROMPT_FIELDS if row.get(name)), None)
        if name is not None and not contains_prompt(row.get(fields.chosen_key), row[name]):
            return Finding(
                f"the rows have a field {name!r}, but --prompt_key is not given: responses are trained on without their"
                " prompts",
                f"--prompt_key {name}",
            )
    return None


def contains_prompt(response: object, prompt: object) -> bool:
    """Return whether a response starts with its prompt: text that contains it, or a list of several messages."""
    if isinstance(response, list):
        return len(response) > 1
    return isinstance(response, str) and isinstance(prompt, str) and prompt.strip() in response


def missing_labels(rows: Sequence[FieldValues], label_key: str | None) -> Finding | None:
    """Find labels that a reward would receive as empty text: no flag names their field, or the field is empty."""
    if label_key is not None:
        empty = sum(row.get(label_key) in (None, "") for row in rows)
        problem = f"{empty} of the first {len(rows)} rows have an empty label in the field {label_key!r}"
        return Finding(problem, "fill the field, or name another with --label_key") if empty else None
    name = next((name for name in LABEL_FIELDS if any(row.get(name) not in (None, "") for row in rows)), None)
    if name is None:
        return None
    return Finding(
        f"the rows have a field {name!r}, but --label_key is not given: the reward receives empty labels",
        f"--label_key {name}",
    )


def lost_text(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """Find characters that the tokenizer drops or replaces: decoding the tokens does not give the text back."""
    lossy: list[str] = []
    lost: Counter[str] = Counter()
    for text in texts:
        missing = lost_characters(text[:LONGEST], tokenizer)
        lost += missing
        if missing:
            lossy.append(text)
    if not lossy:
        return None
    # Quote from shortly before the first loss, which may be far into the text.
    text, decoded = lossy[0][:LONGEST], decode(lossy[0][:LONGEST], tokenizer)
    same = next((place for place, pair in enumerate(zip(text, decoded, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - BEFORE)
    characters = " ".join(json.dumps(character, ensure_ascii=False)[1:-1] for character, _ in lost.most_common(10))
    return Finding(
        f"the tokenizer cannot represent all of the text: {quote(text[start:])} becomes {quote(decoded[start:])}, in"
        f" {len(lossy)} of the first {len(texts)} texts; lost characters: {characters}",
        "a tokenizer that knows these characters, or templates and data without them",
    )


def lost_characters(text: str, tokenizer: PreTrainedTokenizerBase) -> Counter[str]:
    """Count the characters that are missing after decoding; empty if only case, spaces or Unicode forms differ."""
    decoded = decode(text, tokenizer)
    if not Counter(comparable(text)) - Counter(comparable(decoded)):
        return Counter()
    lost = Counter(text) - Counter(decoded)
    return Counter(
        {character: count for character, count in lost.items() if character == "\n" or not character.isspace()}
    )


def decode(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Encode and decode text, without unknown tokens."""
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    known = [token for token in ids if token != tokenizer.unk_token_id]
    return str(tokenizer.decode(known, clean_up_tokenization_spaces=False))


def comparable(text: str) -> str:
    """Reduce text to what any tokenizer should keep: newlines and visible characters, case-folded and normalised."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(character for character in plain if character == "\n" or not character.isspace())


def check_texts(report: DataReport, tokenizer: PreTrainedTokenizerBase) -> DataReport:
    """Add the findings about the formatted texts, once all rows are made, and return the report."""
    report.add(lost_text(report.texts, tokenizer), missing_eos(report))
    return report


def missing_eos(report: DataReport) -> Finding | None:
    """Find templates whose responses do not end in the EOS token, so that the model never learns to stop."""
    if not report.without_eos:
        return None
    return Finding(
        f"{report.without_eos} of {len(report.lengths)} rows do not train on an EOS token, so the model does not learn"
        " to stop",
        "a chat template that ends the assistant's messages with the tokenizer's EOS token",
    )


def quote(text: str) -> str:
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}...")
