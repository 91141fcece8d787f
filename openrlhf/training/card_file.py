"""The README.md with a model card, which people may edit, and which may exist before the model.

Our cards end with a digest of their text, which distinguishes edited cards from those that may be replaced.
`keep_readme` protects the user's files when a model moves into a folder: a README.md that is not our card stays, and an
edited card (for example, with its license filled in) is renamed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from openrlhf.monitor import say

CARD_FILE = "README.md"
EDITED_CARD = "README.md.old"  # an edited card that a new one has replaced
OTHER_CARD = "README.openrlhf.md"  # our card in a folder whose README.md is not ours
TAG = "openrlhf"  # in the metadata of all our cards
SEAL = "\n<!-- openrlhf "


def sealed(text: str) -> str:
    """Append a digest to the text of a card, from which later edits can be detected."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def load_card(file: Path) -> ModelCard | None:
    """Return the card in a file; None if there is no file, or it has no metadata that can be read."""
    try:
        text = file.read_text(encoding="utf-8")
        return ModelCard(text, ignore_metadata_errors=True) if text.lstrip().startswith("---") else None
    except (OSError, ValueError, TypeError, yaml.YAMLError):  # TypeError: `tags: 5`
        return None


def folder_card(folder: Path) -> ModelCard | None:
    """Return the card of a folder, ours if there are two."""
    card = load_card(folder / CARD_FILE)
    return card if is_ours(card) else load_card(folder / OTHER_CARD) or card


def is_ours(card: ModelCard | None) -> bool:
    tags = card.data.get("tags") if card else None
    return isinstance(tags, list) and TAG in tags


def keep_readme(folder: Path, aside: Path) -> None:
    """Keep the README.md of `folder`, unless it is our own and unchanged, before the files of `aside` move there."""
    card, present = aside / CARD_FILE, folder / CARD_FILE
    if not card.exists() or not present.exists():
        return
    if not is_ours(load_card(present)):
        card.rename(aside / OTHER_CARD)
        say(f"{present} is not a model card of OpenRLHF and is kept: the card of the model is {folder / OTHER_CARD}")
    elif (text := present.read_text(encoding="utf-8")) != sealed(text.rpartition(SEAL)[0]):  # it was edited
        present.replace(folder / EDITED_CARD)
        say(f"the edited model card in {folder} is now {EDITED_CARD}: copy your edits from it to the new card")
