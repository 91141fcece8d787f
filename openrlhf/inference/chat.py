"""The interactive_chat command: chat with a model at a terminal or through a pipe.

`Talk` runs the conversation. It reads messages with `chat_input`, builds prompts with `chat_history` and generates
replies with `chat_reply`.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import ChatConfig
from openrlhf.inference.chat_history import History, open_history
from openrlhf.inference.chat_input import QUOTES, CtrlC, Interrupted, Lines
from openrlhf.inference.chat_reply import Speaker
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm, load_tokenizer, read_config, usable_length
from openrlhf.monitor import say
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.device import choose_device, explain_precision
from openrlhf.training.explain import explain_experts

BANNER = (
    "exit or Ctrl-D leaves, clear starts over, Ctrl-C stops a reply;"
    f" {QUOTES} begins and ends a message of several lines"
)


def run(config: ChatConfig) -> None:
    """Load the model and chat until the user exits or the input ends."""
    disable_progress_bar()
    name = str(config.model.pretrain)
    device = choose_device(config.model.device)
    explain_precision(config.model.param_dtype, device)
    explain_experts(config.model, name)
    tokenizer = load_tokenizer(name, config.model)
    history = open_history(config, tokenizer)
    max_len = usable_length(name, read_config(name, config.model), config.chat.max_len)
    model: Any = load_causal_lm(name, config.model, device=device, packing=False)
    if not config.model.load_in_4bit:  # a quantised model is already on its device
        model.to(device)
    engine = HFEngine(Network(model, self_test=not config.model.skip_self_test), tokenizer).prepare()
    with CtrlC() as ctrl_c:
        Talk(Speaker(engine, tokenizer, config.sampling, max_len=max_len), history, ctrl_c).run()


class Talk:
    """Chat loop. Replies go to standard output, notices to standard error."""

    def __init__(self, speaker: Speaker, history: History, ctrl_c: CtrlC) -> None:
        self.speaker = speaker
        self.history = history
        self.ctrl_c = ctrl_c
        self.lines = Lines()

    def run(self) -> None:
        if self.lines.is_terminal:
            say(BANNER)
        going = True
        while going:
            try:
                going = self._turn()
            except Interrupted:
                sys.stdout.write("\n")
                say("interrupted; exit or Ctrl-D leaves")
        if self.lines.is_terminal:
            sys.stdout.write("\n")

    def _turn(self) -> bool:
        """Read one message and handle it; return False to end the chat."""
        said = self.lines.message()
        if said is None or said.strip() == "exit":
            return False
        if said.strip() == "clear":
            self.history.clear()
            say("the conversation starts over")
        elif said.strip():
            self._answer(said)
        return True

    def _answer(self, said: str) -> None:
        """Print a reply and add the turn to the history; reject the message if no room is left for a reply."""
        prompt_ids = self.speaker.read(self.history.prompt(said))
        if len(prompt_ids) >= self.speaker.max_len:
            say(
                f"this would make {len(prompt_ids)} tokens, which leaves no room for a reply within --max_len"
                f" {self.speaker.max_len}, so it was not said: clear starts over, or say less"
            )
            return
        with self.ctrl_c.wishes():
            reply = self.speaker.reply(prompt_ids, show, lambda: self.ctrl_c.wished)
        show("\n")
        self.history.add(said, reply.text)
        if reply.end == "length":
            say(f"the context is full (--max_len {self.speaker.max_len}), which ended the reply: clear starts over")
        elif reply.end == "interrupted":
            say("the reply was interrupted; what is there of it stays in the conversation")


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
