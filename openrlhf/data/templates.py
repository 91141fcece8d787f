"""Chat templates: render a conversation and find the character spans that the assistant wrote.

`open_format` makes a `TextFormat` from the flags, with a `Chat` if they ask for a chat template. `Chat.render` returns
the text of a prompt; `mark_turns` and `mark_response` return the text of a whole conversation with its learned spans.
Spans are taken from the template's {% generation %} blocks or, without them, found by rendering the conversation up to
each turn and comparing prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from openrlhf.config.sections.data import TemplateFlags
from openrlhf.data.messages import Conversation, Message, read_tools
from openrlhf.data.records import Record
from openrlhf.data.tokens import Marked
from openrlhf.errors import ConfigError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
# Exceptions that expressions in a template raise for messages that it does not support.
TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

# The function is annotated to return a str, but returns the texts and, for each, the spans of its {% generation %}
# blocks.
render_template: Callable[..., tuple[list[str], list[list[Span]]]] = cast("Any", render_jinja_template)


class RewritesHistory(Exception):
    """Raised if the rendered prompt of a turn is not a prefix of the full conversation."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and its {% generation %} spans; None if the template has no such blocks."""

    text: str
    generated: tuple[Span, ...] | None


@dataclass(frozen=True)
class Chat:
    """A chat template (the tokenizer's, or the one from the flags) with the settings of a run."""

    tokenizer: PreTrainedTokenizerBase
    override: str | None  # --tokenizer_chat_template
    kwargs: Mapping[str, object]  # --chat_template_kwargs
    system_prompt: str | None
    system_key: str | None = None

    def conversation(self, record: Record, messages: Sequence[Message]) -> Conversation:
        """Combine messages with the row's tools and, if they do not start with a system message, with its own.

        A row without text in the field --system_key gets --system_prompt.
        """
        system = self.system_prompt
        if self.system_key is not None and self.system_key in record.row:
            system = record.text(self.system_key, "--system_key") or system
        if system is not None and messages and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        return Conversation(messages, read_tools(record), record.place)

    def render(self, conversation: Conversation, *, prompt: bool = False) -> Rendered:
        """Render the conversation as text; with `prompt`, end with the start of the assistant's next message."""
        tools = None if conversation.tools is None else [dict(tool) for tool in conversation.tools]
        template = self.tokenizer.get_chat_template(self.override, tools)
        marks = GENERATION.search(template) is not None
        try:
            texts, generated = render_template(
                conversations=[for_template(conversation.messages, template)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                try_this="check --tokenizer_chat_template, or the template in the tokenizer's folder",
            ) from None
        except TEMPLATE_FAULTS as error:
            raise conversation.place.error(f"the chat template rejects this conversation: {error}") from None
        return Rendered(texts[0], tuple(generated[0]) if marks else None)

    def mark_turns(self, conversation: Conversation, since: int) -> Marked:
        """Return the full text with the assistant's turns from message `since` on as spans.

        Spans are the template's {% generation %} blocks. Without them, a span extends from the end of the text before a
        turn to the end of the turn; RewritesHistory is raised if either text is not a prefix of the full text.
        """
        whole = self.render(conversation)
        if whole.generated is not None:
            earlier = self.render(conversation.first(since)).generated if since else ()
            spans = whole.generated[len(earlier or ()) :]
            if not spans:
                raise conversation.place.error(
                    "the chat template does not mark the assistant's messages with {% generation %}"
                )
            return Marked(whole.text, spans)

        spans = []
        for turn in (turn for turn in conversation.assistant_turns if turn >= since):
            prompt = self.render(conversation.first(turn), prompt=True).text
            is_last = turn + 1 == len(conversation.messages)
            through = whole.text if is_last else self.render(conversation.first(turn + 1)).text
            if not whole.text.startswith(prompt) or not whole.text.startswith(through):
                raise RewritesHistory
            # A model stops at EOS, so newlines after EOS are not learned.
            written = through[len(prompt) :].rstrip("\n")
            ends_in_eos = written.endswith(str(self.tokenizer.eos_token))
            spans.append((len(prompt), len(prompt) + len(written) if ends_in_eos else len(through)))
        return Marked(whole.text, tuple(spans))

    def mark_response(self, conversation: Conversation, since: int) -> Marked:
        """Like `mark_turns`, but raise a DataError with a remedy if the template rewrites history."""
        try:
            return self.mark_turns(conversation, since)
        except RewritesHistory:
            raise conversation.place.error(
                "the chat template starts a response with text that the finished conversation does not contain, or"
                " rewrites earlier messages, so the response cannot be located",
                try_this="a --tokenizer_chat_template that does neither, or one that marks assistant messages with"
                " {% generation %}",
            ) from None


@dataclass(frozen=True)
class TextFormat:
    """How a row becomes text and tokens: a chat template or, without one, an input template; and the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    chat: Chat | None  # None without --apply_chat_template
    input_template: str | None

    def fill(self, text: str) -> str:
        """Insert text at the {} of the input template."""
        return fill(self.input_template, text)


def open_format(tokenizer: PreTrainedTokenizerBase, settings: TemplateFlags) -> TextFormat:
    """Return the format that the flags select."""
    return TextFormat(tokenizer, open_chat(tokenizer, settings), settings.input_template)


def open_chat(tokenizer: PreTrainedTokenizerBase, settings: TemplateFlags) -> Chat | None:
    """Return the chat template that the flags select, or None without --apply_chat_template."""
    if not settings.apply_chat_template:
        return None
    if settings.tokenizer_chat_template is None and not tokenizer.chat_template:
        raise ConfigError(
            "--apply_chat_template: the tokenizer has no chat template", try_this="--tokenizer_chat_template '...'"
        )
    return Chat(
        tokenizer,
        settings.tokenizer_chat_template,
        settings.template_kwargs,
        settings.system_prompt,
        settings.system_key,
    )


def for_template(messages: Sequence[Message], template: str) -> list[Message]:
    """Convert tool calls to text (the original text, or JSON) if the template does not support them."""
    if "tool_calls" in template:
        return [{key: value for key, value in message.items() if key != "call_text"} for message in messages]
    converted: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        as_json = "\n".join(json.dumps(call.get("function", call), ensure_ascii=False) for call in calls)
        converted.append({**message, "content": message["content"] + message.get("call_text", as_json)})
    return converted


def fill(template: str | None, text: str) -> str:
    """Insert text at the {} of an input template."""
    return text if template is None else template.replace("{}", text)
