"""Conversation history of the chat command, and the prompt text that the model continues.

With a chat template, the tokenizer renders the turns as messages. Without one, the prompt is plain text: the turns so
far, each on a new line, then the new message in --input_template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import ChatConfig
from openrlhf.data.messages import Conversation, Message
from openrlhf.data.records import Place
from openrlhf.data.templates import Chat, fill, open_chat


@dataclass
class History:
    """A conversation: its finished turns, and how they become a prompt."""

    chat: Chat | None  # the chat template of --apply_chat_template
    template: str | None  # --input_template, used without a chat template
    first: str | None  # text of --ta_prompt or --system_prompt: the system message, or the beginning of the text
    suffix: str  # text after each message, for --enable_csft
    turns: list[tuple[str, str]] = field(default_factory=list)  # user messages and their replies

    def prompt(self, message: str) -> str:
        """Return the text for the model to continue: the conversation so far, then the new `message`."""
        if self.chat is None:
            text = self.first or ""
            for asked, reply in (*self.turns, (message, "")):
                turn = fill(self.template, asked) + self.suffix + reply
                text = f"{text}\n{turn}" if text else turn
            return text
        messages: list[Message] = [] if self.first is None else [{"role": "system", "content": self.first}]
        for asked, reply in self.turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": message})
        place = Place("this conversation", len(self.turns) + 1)
        return self.chat.render(Conversation(messages, None, place), prompt=True).text + self.suffix


def open_history(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> History:
    """Return an empty history that renders prompts according to the flags and the tokenizer's chat template."""
    file = config.chat.ta_prompt
    first = Path(file).expanduser().read_text(encoding="utf-8") if file else config.template.system_prompt
    suffix = f"{config.sampling.csft_prompt.strip()} " if config.sampling.enable_csft else ""
    return History(open_chat(tokenizer, config.template), config.template.input_template, first, suffix)
