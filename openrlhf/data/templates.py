"""Chat templates: render a conversation and find the character spans that the assistant wrote.

Spans come from the template's own {% generation %} blocks, or from rendering the conversation up to each turn and
comparing prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from openrlhf.data.messages import Conversation, Message, calls_as_text, read_tools
from openrlhf.data.tokens import Marked
from openrlhf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.config.sections.data import TemplateFlags
    from openrlhf.data.records import Record

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]

# Annotated as returning a str, but it returns the texts and, per text, the spans of its {% generation %} blocks.
render_template: Callable[..., tuple[list[str], list[list[Span]]]] = cast("Any", render_jinja_template)


class RewritesHistory(Exception):
    """Raised if the rendered prompt of a turn is not a prefix of the full conversation."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans that the template marks as generated; None if it has no such marks."""

    text: str
    generated: tuple[Span, ...] | None


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, or the override from the flags, with the settings of a run."""

    tokenizer: PreTrainedTokenizerBase
    override: str | None
    kwargs: Mapping[str, Any]
    system_prompt: str | None

    def conversation(self, record: Record, messages: Sequence[Message]) -> Conversation:
        """Combine messages with the row's tools; prepend the run's system prompt if they have none."""
        if self.system_prompt is not None and messages and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return Conversation(messages, read_tools(record), record.place)

    def render(self, talk: Conversation, *, prompt: bool = False) -> Rendered:
        """Render the conversation as text; with `prompt`, end where the assistant's answer starts."""
        tools = None if talk.tools is None else [dict(tool) for tool in talk.tools]
        template = self.tokenizer.get_chat_template(self.override, tools)
        marks = GENERATION.search(template) is not None
        try:
            texts, generated = render_template(
                conversations=[for_template(talk.messages, template)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self.tokenizer.special_tokens_map, **self.kwargs},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is no Jinja text: line {error.lineno}: {error.message}") from None
        except (TemplateError, TypeError, ValueError) as error:
            raise talk.place.error(f"the chat template refuses this conversation: {error}") from None
        return Rendered(texts[0], tuple(generated[0]) if marks else None)

    def mark_turns(self, talk: Conversation, since: int) -> Marked:
        """Return the full text with the assistant's turns from message `since` on as spans.

        Spans are the template's own {% generation %} blocks. Without them, a span reaches from the end of a turn's
        prompt to the end of the turn; RewritesHistory is raised if either is not a prefix of the full text.
        """
        whole = self.render(talk)
        if whole.generated is not None:
            earlier = self.render(talk.first(since)).generated if since else ()
            spans = whole.generated[len(earlier or ()) :]
            if not spans:
                raise talk.place.error("the chat template marks nothing that the assistant says by {% generation %}")
            return Marked(whole.text, spans)
        turns = [turn for turn in talk.assistant_turns if turn >= since]
        return Marked(whole.text, tuple(self._span(talk, whole.text, turn) for turn in turns))

    def _span(self, talk: Conversation, text: str, turn: int) -> Span:
        prompt = self.render(talk.first(turn), prompt=True).text
        is_last = turn + 1 == len(talk.messages)
        through = text if is_last else self.render(talk.first(turn + 1)).text
        if not text.startswith(prompt) or not text.startswith(through):
            raise RewritesHistory
        return len(prompt), self._end_of_turn(text, len(prompt), len(through))

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Exclude newlines that the template adds after EOS: a model stops at EOS, so they are not learned."""
        written = text[start:end].rstrip("\n")
        return start + len(written) if written.endswith(str(self.tokenizer.eos_token)) else end

    def mark_response(self, talk: Conversation, since: int) -> Marked:
        """Like `mark_turns`, but raise a DataError that explains the remedies if the template rewrites history."""
        try:
            return self.mark_turns(talk, since)
        except RewritesHistory:
            raise talk.place.error(
                "the chat template opens a response with text that it leaves out of the finished conversation,"
                " or rewrites what came before, so what is to be learned cannot be told; give a template that does not"
                " by --tokenizer_chat_template, or mark the assistant's part in it by {% generation %}"
            ) from None


def open_chat(tokenizer: PreTrainedTokenizerBase, settings: TemplateFlags) -> Chat | None:
    """Return the chat template that the flags ask for; None without --apply_chat_template."""
    if not settings.apply_chat_template:
        return None
    if settings.tokenizer_chat_template is None and not tokenizer.chat_template:
        raise ConfigError(
            "--apply_chat_template: the tokenizer brings no chat template", try_this="--tokenizer_chat_template '...'"
        )
    return Chat(tokenizer, settings.tokenizer_chat_template, settings.template_kwargs, settings.system_prompt)


def for_template(messages: Sequence[Message], template: str) -> list[Message]:
    """Pass tool calls as structure if the template handles them, otherwise as text."""
    if "tool_calls" in template:
        return [{key: value for key, value in message.items() if key != "call_text"} for message in messages]
    return [{**message, "content": message["content"] + calls_as_text(message)} for message in messages]


def fill(template: str | None, text: str) -> str:
    """Insert text at the {} of an input template."""
    return text if template is None else template.replace("{}", text)
