"""Input of the chat command, from a terminal or a pipe: one message per line, or several lines in triple quotes.

`Lines` reads the messages; `CtrlC` makes Ctrl-C stop a reply instead of the program.
"""

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
    """Ctrl-C at the prompt, or a second one during a reply; unlike SIGTERM, it does not end the program."""


class CtrlC:
    """Handler of Ctrl-C while the context is open.

    At the prompt, Ctrl-C raises `Interrupted`. During a reply, the first Ctrl-C sets `wished`, a request to stop, and
    the second raises `Interrupted`. SIGTERM is left alone, so a scheduler can still end the program. Signals arrive
    only in the main thread; in other threads the context does nothing.
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
        """Mark a reply in progress: the first Ctrl-C sets `wished` instead of raising."""
        self.replying, self.wished = True, False
        try:
            yield
        finally:
            self.replying = False


class Lines:
    """Reader of messages from standard input; at a terminal it shows a prompt and offers line history."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            import readline  # noqa: F401 - importing it gives `input` arrow keys and history

    def message(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        line = self._line("> ")
        if line is None or not line.startswith(QUOTES):
            return line
        rest = line.removeprefix(QUOTES)
        if rest.rstrip().endswith(QUOTES):
            return rest.rstrip().removesuffix(QUOTES)
        return "\n".join([rest, *self._block()] if rest else self._block())

    def _block(self) -> list[str]:
        """Read the lines up to and including the one that ends in triple quotes."""
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
