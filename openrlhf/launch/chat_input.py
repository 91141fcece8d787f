"""What a person types or a pipe brings: one message a line, or several lines between triple quotes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from openrlhf.monitor import say

QUOTES = '"""'


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at the prompt, which a SIGTERM is not."""


class CtrlC:
    """Within it Ctrl-C at the prompt is `Interrupted`; during a reply it is a wish, and the second one stops at once.

    SIGTERM stays what it is, so that a scheduler still ends the program. Only a program's main thread hears signals.
    """

    def __init__(self) -> None:
        self.replying = False
        self.wished = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self.replying or self.wished:
            raise Interrupted
        self.wished = True

    @contextmanager
    def wishes(self) -> Iterator[None]:
        """During a reply."""
        self.replying, self.wished = True, False
        try:
            yield
        finally:
            self.replying = False


class Lines:
    """Messages from standard input; at a terminal with a prompt and a history of lines, else silently."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            import readline  # noqa: F401 - gives `input` its arrow keys and its history

    def message(self) -> str | None:
        """The next message; None at the end of the input."""
        line = self._line("> ")
        if line is None or not line.startswith(QUOTES):
            return line
        rest = line.removeprefix(QUOTES)
        if rest.rstrip().endswith(QUOTES):
            return rest.rstrip().removesuffix(QUOTES)
        return "\n".join([rest, *self._block()] if rest else self._block())

    def _block(self) -> list[str]:
        """The lines up to the one that ends in triple quotes."""
        lines: list[str] = []
        while (line := self._line(". ")) is not None:
            if line.rstrip().endswith(QUOTES):
                last = line.rstrip().removesuffix(QUOTES)
                return [*lines, last] if last else lines
            lines.append(line)
        say(f"the input ended before {QUOTES} closed the block, which is taken as it stands")
        return lines

    def _line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None
