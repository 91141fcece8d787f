"""A Hugging Face cache built by hand, so that revisions can be tested without a network.

    hub.add("org/model", commit, files=folder, tag="v1")   a commit of a model, with an optional tag or branch

Loaders look there first, and with the hub switched off they look nowhere else.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import datasets
import huggingface_hub

FIRST, SECOND = "1" * 40, "2" * 40  # commit hashes


@dataclass(frozen=True)
class HubCache:
    folder: Path

    def add(self, name, commit, files, *, tag=None, kind="models"):
        """Store the files of a folder as one commit."""
        repository = self.folder / f"{kind}--{name.replace('/', '--')}"
        shutil.copytree(files, repository / "snapshots" / commit)
        if tag is not None:
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / tag).write_text(commit)


def offline_cache(folder, monkeypatch):
    """Return an empty cache, used instead of the user's while the hub is switched off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    return HubCache(folder / "hub")
