"""The interactive_chat command: chat with a model at a terminal or through a pipe.

`ChatLoop` runs the conversation: it reads messages with `chat_input`, builds prompts with `chat_history` and generates
replies with `chat_reply`. Replies go to standard output, notices to standard error.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from types import FrameType

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import ChatConfig
from openrlhf.config.flags import replace_flags
from openrlhf.inference.chat_history import History, open_history
from openrlhf.inference.chat_input import QUOTES, MessageReader
from openrlhf.inference.chat_reply import ReplyGenerator
from openrlhf.inference.converted_card import trained_format
from openrlhf.inference.engine import choose_model_device, open_hf_engine
from openrlhf.models.load import load_tokenizer, read_config, usable_length
from openrlhf.monitor import SHOWN_CONTROLS, say
from openrlhf.signals import handled_by, stop_request

BANNER = (
    "exit or Ctrl-D quits, clear starts over, Ctrl-C stops a reply;"
    f" {QUOTES} begins and ends a message of several lines"
)
CTRL_C = (signal.SIGINT,)  # SIGTERM keeps its handler, so a scheduler can still end the program


class ChatInterrupted(KeyboardInterrupt):
    """Ctrl-C at the prompt, or a second one during a reply; unlike SIGTERM, it does not end the program."""


def run(config: ChatConfig) -> None:
    """Load the model and chat until the user exits or the input ends."""
    disable_progress_bar()
    config = prompted_as_trained(config)
    name = str(config.model.pretrain)
    device = choose_model_device(config.model, name)
    tokenizer = load_tokenizer(name, config.model)
    history = open_history(config, tokenizer)
    max_len = usable_length(name, read_config(name, config.model), config.chat.max_len)
    engine = open_hf_engine(config.model, name, tokenizer, device)
    ChatLoop(ReplyGenerator(engine, tokenizer, config.sampling, max_len), history, MessageReader()).run()


def prompted_as_trained(config: ChatConfig) -> ChatConfig:
    """Return the config with the prompt format of the model's card, unless a template is given."""
    given, default = config.template, ChatConfig().template
    trained = trained_format(str(config.model.pretrain)) if given == default else None
    if trained is None or (not trained.chat and trained.input_template == given.input_template):
        return config
    if trained.chat:
        say("prompts use the chat template, as in training (model card); --input_template overrides it")
        return replace_flags(config, apply_chat_template=True, input_template=None, system_prompt=trained.system_prompt)
    shown = repr(trained.input_template or "{}")
    say(f"prompts use the input template {shown}, as in training (model card); --input_template overrides it")
    return replace_flags(config, input_template=trained.input_template or "{}")


@dataclass(frozen=True)
class ChatLoop:
    """The chat loop, with the model, the conversation so far and the source of messages."""

    model: ReplyGenerator
    history: History
    reader: MessageReader

    def run(self) -> None:
        """Answer messages until the user exits or the input ends; Ctrl-C only drops the current message."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise ChatInterrupted

        if self.reader.is_terminal:
            say(BANNER)
        with handled_by(interrupt, CTRL_C, ends=False):
            while True:
                try:
                    message = self.reader.read()
                    if message is None or message.strip() == "exit":
                        break
                    if message.strip() == "clear":
                        self.history.turns.clear()
                        say("the conversation starts over")
                    elif message.strip():
                        self._answer(message)
                except ChatInterrupted:
                    sys.stdout.write("\n")
                    say("interrupted; exit or Ctrl-D quits")
        if self.reader.is_terminal:
            sys.stdout.write("\n")

    def _answer(self, message: str) -> None:
        """Print a reply and add the turn to the history; reject a message that leaves no tokens for a reply."""
        max_len = self.model.max_len
        prompt_ids = self.model.tokenize(self.history.prompt(message))
        if len(prompt_ids) >= max_len:
            say(
                f"the message was not sent: the conversation would have {len(prompt_ids)} tokens, which leaves no space"
                f" for a reply within --max_len {max_len}. Try: clear to start over, or a shorter message"
            )
            return
        with stop_request(signals=CTRL_C, error=ChatInterrupted) as stop:
            reply = self.model.reply(prompt_ids, show, lambda: stop.requested)
        show("\n")
        self.history.turns.append((message, reply.text))
        if reply.end == "length":
            say(f"the reply ended because the context is full (--max_len {max_len}). Try: clear to start over")
        elif reply.end == "interrupted":
            say("the reply was interrupted; the part shown stays in the conversation")


def show(text: str) -> None:
    """Write a piece of a reply; on a terminal, control characters are shown as escapes and have no effect."""
    sys.stdout.write(text.translate(SHOWN_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
