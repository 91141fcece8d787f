"""The Modelfile of Ollama: which file to run, how to write the prompt, and where to stop.

Ollama writes prompts with a Go template, while chat templates are Jinja programs. Most chat templates put a fixed text
before and after each message. `ChatShape.of` finds these texts by rendering conversations of marker messages, and
checks them on a longer conversation: a template that does more (rewrites history, counts turns) is not expressed here.
The GGUF file then still carries the Jinja template, which llama.cpp executes and Ollama recognises for well-known
models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from openrlhf.errors import ConfigError
from openrlhf.training.prompt_format import PromptFormat

QUOTES = '"""'
SYSTEM, USER, ASSISTANT, NEXT = "«system»", "«user»", "«assistant»", "«next»"  # contents of marker messages


@dataclass(frozen=True)
class ChatShape:
    """A chat template as fixed texts: `before` and `after` a message of each role, and the start of a reply."""

    before: dict[str, str]
    after: dict[str, str]
    reply: str  # text that the template adds to request a reply
    default_system: str = ""  # system message of conversations that do not start with one

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prompt: PromptFormat) -> ChatShape | None:
        """Find the shape of a chat template; None if fixed texts cannot express it."""
        render = Renderer(tokenizer, prompt)
        try:
            shape = cls._guess(render)
            conversations = (
                [("system", SYSTEM), ("user", USER), ("assistant", ASSISTANT), ("user", NEXT), ("assistant", USER)],
                [("user", USER), ("assistant", ASSISTANT), ("user", NEXT), ("assistant", SYSTEM), ("user", USER)],
            )
            right = all(shape.render(turns) == render(turns, reply=True) for turns in conversations)
        except (TemplateError, ValueError):  # the template rejects such turns, or does more than add fixed texts
            return None
        return shape if right and QUOTES not in shape.go_template() else None

    @classmethod
    def _guess(cls, render: Renderer) -> ChatShape:
        """Infer the fixed texts from a few renderings; raise ValueError if they are inconsistent."""
        asked = [("user", USER)]
        answered = [*asked, ("assistant", ASSISTANT)]
        before_user, after_user = render(asked).split(USER)
        reply = cut_start(render(asked, reply=True), before_user + USER + after_user)
        between, after_assistant = cut_start(render(answered), before_user + USER).split(ASSISTANT)
        before_assistant = cut_start(between, after_user)
        again = cut_start(render([*answered, ("user", NEXT)]), render(answered))
        before_next = cut_end(again, NEXT + after_user)
        before_system, rest = render([("system", SYSTEM), *asked]).split(SYSTEM)
        after_system = cut_end(rest, before_next + USER + after_user)
        # A conversation without a system message starts with nothing, or with a default system message.
        start = cut_end(before_user, before_next)
        default = cut_end(cut_start(start, before_system), after_system) if start else ""
        return cls(
            before={"system": before_system, "user": before_next, "assistant": before_assistant},
            after={"system": after_system, "user": after_user, "assistant": after_assistant},
            reply=reply,
            default_system=default,
        )

    def render(self, turns: Sequence[tuple[str, str]]) -> str:
        """Render a conversation, up to the start of a reply, as the template of the Modelfile will."""
        if self.default_system and turns[0][0] != "system":
            turns = [("system", self.default_system), *turns]
        return "".join(self.before[role] + content + self.after[role] for role, content in turns) + self.reply

    def go_template(self) -> str:
        """Return the template in Go's language."""
        roles = [
            f'{{{{ {"if" if place == 0 else "else if"} eq .Role "{role}" }}}}'
            f"{literal(self.before[role])}{{{{ .Content }}}}{literal(self.after[role])}"
            for place, role in enumerate(self.before)
        ]
        return f"{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{{{{ end }}}}{literal(self.reply)}"


@dataclass(frozen=True)
class Renderer:
    """Renderer of conversations with a chat template; adding a BOS token at the start is left to the runtime."""

    tokenizer: PreTrainedTokenizerBase
    prompt: PromptFormat

    def __call__(self, turns: Sequence[tuple[str, str]], *, reply: bool = False) -> str:
        bos = self.tokenizer.bos_token if self.starts_with_bos() else ""
        return self._text(turns, reply=reply).removeprefix(bos)

    def starts_with_bos(self) -> bool:
        """Return whether conversations start with BOS; SmolLM's BOS starts every message, so it is not counted."""
        text = self._text([("user", USER), ("assistant", ASSISTANT), ("user", NEXT)])
        bos = self.tokenizer.bos_token
        return bos is not None and text.startswith(bos) and text.count(bos) == 1

    def _text(self, turns: Sequence[tuple[str, str]], *, reply: bool = False) -> str:
        settings: dict[str, Any] = dict(self.prompt.chat_template_kwargs)
        text = self.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns],
            tokenize=False,
            add_generation_prompt=reply,
            chat_template=self.prompt.chat_template,
            **settings,
        )
        return str(text)


def starts_with_bos(tokenizer: PreTrainedTokenizerBase, prompt: PromptFormat | None) -> bool:
    """Return whether the runtime should start prompts with BOS: as in training or, if that is not known, as usual.

    Training adds no special tokens, so the token is there only if the template writes it.
    """
    if tokenizer.bos_token is None:
        return False
    if prompt is None:
        ids: list[int] = tokenizer("a")["input_ids"]
        return ids[0] == tokenizer.bos_token_id
    return prompt.chat and Renderer(tokenizer, prompt).starts_with_bos()


def modelfile(file: str, tokenizer: PreTrainedTokenizerBase, prompt: PromptFormat) -> tuple[str, bool]:
    """Return the Modelfile, and whether it has a template; without one, Ollama uses the template in the GGUF file."""
    lines, system = [f"FROM ./{file}"], prompt.system_prompt or ""
    stops = [tokenizer.eos_token]
    shape = ChatShape.of(tokenizer, prompt) if prompt.chat else None
    if shape is not None:
        lines.append(f"TEMPLATE {QUOTES}{shape.go_template()}{QUOTES}")
        system = system or shape.default_system
        stops.append(shape.after["assistant"].strip())
    elif not prompt.chat:
        template = "{{ .Prompt }}".join(literal(part) for part in (prompt.input_template or "{}").split("{}"))
        lines.append(f"TEMPLATE {quoted(template, 'input template')}")
    if system:
        lines.append(f"SYSTEM {quoted(system, 'system prompt')}")
    lines += [f"PARAMETER stop {stop_text(stop)}" for stop in dict.fromkeys(stops) if stop]
    return "\n".join(lines) + "\n", shape is not None or not prompt.chat


def quoted(text: str, what: str) -> str:
    """Return multi-line text as a Modelfile value; there is no way to write three quotes inside it."""
    if QUOTES in text:
        raise ConfigError(
            f"the {what} contains {QUOTES}, which cannot be written in a Modelfile",
            try_this="--input_template with another text, or edit prompt_format in the model's README.md",
        )
    return f"{QUOTES}{text}{QUOTES}"


def stop_text(text: str) -> str:
    """Return a stop sequence as a Modelfile value; quotes cannot be escaped: one before a line break would end it."""
    return quoted(text, "stop sequence") if re.search(r'["\r\n]', text) else f'"{text}"'


def literal(text: str) -> str:
    """Return text that a Go template prints unchanged, even if it ends in a brace and a placeholder follows."""
    return re.sub(r"\{{2,}|\{\Z", lambda braces: f'{{{{ "{braces[0]}" }}}}', text)


def cut_start(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError(f"{text!r} does not start with {start!r}")
    return text[len(start) :]


def cut_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError(f"{text!r} does not end with {end!r}")
    return text[: len(text) - len(end)]
