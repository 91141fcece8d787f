"""The text of each token, decoded by the tokenizer that the run saved or started from.

A record holds token ids and the text of the whole response. To colour single tokens, the page needs their texts, so the
tokenizer is loaded with `tokenizers`, which is fast, and only from this machine. Without a tokenizer, the page shows
ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.config.checks.paths import split_revision
from openrlhf.view.runs import RunFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"
FLAGS = ("save_path", "pretrain")  # flags that name the run's tokenizer, by folder or hub name; the first is preferred


class TokenTexts:
    """Decoder of a run's tokens, one at a time."""

    def __init__(self, run: RunFolder) -> None:
        self.tokenizer = _load(run)

    def decode(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer.

        Joined, the texts equal the text of all tokens. A character shared by several tokens belongs to the last one.
        """
        if self.tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [_next_text(stream, self.tokenizer, token) for token in ids]


def _next_text(stream: DecodeStream, tokenizer: Tokenizer, token: int) -> str:
    try:
        return stream.step(tokenizer, token) or ""
    except Exception:  # noqa: BLE001  the Rust library raises plain Exceptions, as for bytes that never become text
        return tokenizer.decode([token], skip_special_tokens=False)


def _load(run: RunFolder) -> Tokenizer | None:
    for path in _tokenizer_files(run):
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                return Tokenizer.from_file(str(path))
            except Exception:  # noqa: BLE001  the Rust library raises a plain Exception for a file that it cannot read
                continue
    return None


def _tokenizer_files(run: RunFolder) -> Iterator[Path]:
    """Yield the paths at which the run's tokenizer may be, the best first."""
    config = run.config()
    yield run.folder.parent / TOKENIZER_FILE  # the run is in --save_path, which may have been moved
    for flag in FLAGS:
        name = config.flags.get(flag)
        if not isinstance(name, str) or not name:
            continue
        yield config.folder / os.path.expanduser(name) / TOKENIZER_FILE  # unlike Path's, it accepts unknown users
        cached = _cached(name)
        if cached:
            yield cached


def _cached(name: str) -> Path | None:
    """Return the tokenizer of a hub name in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(name)
    try:
        found = try_to_load_from_cache(repository, TOKENIZER_FILE, revision=revision)
    except HFValidationError:  # a path
        return None
    return Path(found) if isinstance(found, str) else None
