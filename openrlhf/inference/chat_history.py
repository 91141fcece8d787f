"""Conversation history of the chat command, and the prompt text that the model continues.

With a chat template the history is a list of messages (`Messages`); without one it is a growing string
(`Transcript`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import ChatConfig
from openrlhf.data.messages import Conversation, Message
from openrlhf.data.records import Place
from openrlhf.data.templates import Chat, fill, open_chat


class History(Protocol):
    """A conversation. `prompt` only builds text; `add` records a turn once both its sides are known."""

    def prompt(self, said: str) -> str:
        """Return the text for the model to continue: the conversation so far, then the new message `said`."""
        ...

    def add(self, said: str, reply: str) -> None:
        """Record a finished turn."""
        ...

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        ...


@dataclass
class Messages:
    """History for --apply_chat_template; the text of --ta_prompt or --system_prompt is the system message."""

    chat: Chat
    first: str | None
    suffix: str
    turns: list[Message] = field(default_factory=list)

    def prompt(self, said: str) -> str:
        system = [] if self.first is None else [{"role": "system", "content": self.first}]
        messages = [*system, *self.turns, {"role": "user", "content": said}]
        place = Place("this conversation", len(self.turns) // 2 + 1)
        return self.chat.render(Conversation(messages, None, place), prompt=True).text + self.suffix

    def add(self, said: str, reply: str) -> None:
        self.turns += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]

    def clear(self) -> None:
        self.turns = []


@dataclass
class Transcript:
    """History without a chat template: the text so far, a line break, and the message in --input_template."""

    template: str | None
    first: str | None
    suffix: str
    text: str = ""

    def prompt(self, said: str) -> str:
        before = self.text or self.first
        asked = fill(self.template, said) + self.suffix
        return f"{before}\n{asked}" if before else asked

    def add(self, said: str, reply: str) -> None:
        self.text = self.prompt(said) + reply

    def clear(self) -> None:
        self.text = ""


def open_history(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> History:
    """Return an empty history of the kind that the flags and the tokenizer's chat template select."""
    file = config.chat.ta_prompt
    first = Path(file).expanduser().read_text(encoding="utf-8") if file else config.template.system_prompt
    suffix = f"{config.sampling.csft_prompt.strip()} " if config.sampling.enable_csft else ""
    chat = open_chat(tokenizer, config.template)
    return Messages(chat, first, suffix) if chat else Transcript(config.template.input_template, first, suffix)
