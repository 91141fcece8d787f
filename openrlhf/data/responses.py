"""Rows with one prompt and one response: the format shared by SFT, distillation, KTO and scoring.

Without a chat template, prompt and response are texts in two fields. With a chat template, they are messages: the input
field contains the whole conversation, or the response has its own field. `mark_response` reads either form and returns
the text that `tokens.encode` turns into a row.
"""

from __future__ import annotations

import shlex

from openrlhf.config.sections.data import ResponseFlags, split_names
from openrlhf.data.messages import Message, read_messages, read_text, says_something
from openrlhf.data.records import MAX_SUGGESTED_FIELDS, Record, Records
from openrlhf.data.rows import EMPTY_PROMPT, EMPTY_RESPONSE, NO_ANSWER, Dropped
from openrlhf.data.templates import TextFormat
from openrlhf.data.tokens import Marked
from openrlhf.errors import ConfigError


def check_fields(fields: ResponseFlags, form: TextFormat, records: Records) -> None:
    """Raise if the flags do not name a field for the response; suggest the other fields of the first row."""
    if form.chat is None and fields.output_key is None:
        row = records[0].row
        others = [name for name in row if name not in split_names(fields.input_key)]
        names = " or ".join(map(shlex.quote, others[:MAX_SUGGESTED_FIELDS])) or "output"
        fix = f"--output_key {names}, or --apply_chat_template"
        if isinstance(row.get(fields.input_key), list):  # a conversation, which contains the response
            fix = "--apply_chat_template"
        raise ConfigError("without a chat template, the response needs its own field", try_this=fix)


def mark_response(record: Record, fields: ResponseFlags, form: TextFormat) -> Marked:
    """Return the full text of a row, with its response as the learned span."""
    if form.chat is not None:
        messages = read_conversation(record, fields)
        if messages and messages[-1]["role"] != "assistant":
            raise Dropped(NO_ANSWER)
        if not any(says_something(message) for message in messages[:-1]):
            raise Dropped(EMPTY_PROMPT)
        if not says_something(messages[-1]):
            raise Dropped(EMPTY_RESPONSE)
        conversation = form.chat.conversation(record, messages)
        return form.chat.mark_response(conversation, len(conversation.messages) - 1)
    prompt = read_text(record, fields.input_key, "--input_key")
    response = read_text(record, str(fields.output_key), "--output_key")
    if not prompt.strip():
        raise Dropped(EMPTY_PROMPT)
    if not response.strip():
        raise Dropped(EMPTY_RESPONSE)
    return mark_plain(form.fill(prompt), response)


def mark_plain(prompt: str, response: str) -> Marked:
    """Join prompt and response; the response is the learned span."""
    return Marked(prompt + response, ((len(prompt), len(prompt) + len(response)),))


def read_conversation(record: Record, fields: ResponseFlags) -> list[Message]:
    """Return prompt and response as one message list; the response may be in the input field or in its own field."""
    if fields.output_key is None:
        return read_messages(record, fields.input_key, "--input_key")
    prompt = read_messages(record, fields.input_key, "--input_key", speaker="user")
    return prompt + read_messages(record, fields.output_key, "--output_key", speaker="assistant")
