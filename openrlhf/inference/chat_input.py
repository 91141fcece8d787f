"""Input of the chat command, from a terminal or a pipe: one message per line, or several lines in triple quotes."""

from __future__ import annotations

import sys

from openrlhf.monitor import say

QUOTES = '"""'


class MessageReader:
    """Reader of messages from standard input; at a terminal it shows a prompt and offers line history."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            import readline  # noqa: F401 - importing it gives `input` arrow keys and history

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        line = self._read_line("> ")
        if line is None or not line.startswith(QUOTES):
            return line
        first = line.removeprefix(QUOTES)
        if first.rstrip().endswith(QUOTES):
            return first.rstrip().removesuffix(QUOTES)
        lines = [first] if first else []
        while (line := self._read_line(". ")) is not None:
            if line.rstrip().endswith(QUOTES):
                last = line.rstrip().removesuffix(QUOTES)
                return "\n".join([*lines, last] if last else lines)
            lines.append(line)
        say(f"the input ended before the closing {QUOTES}; the lines so far are sent")
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            return None
