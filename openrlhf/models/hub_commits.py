"""Resolve hub names to commits: a branch or tag may move, so runs and adapters record the commit."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from openrlhf.config.checks.paths import MODEL_FLAGS, is_here, named_by, split_revision
from openrlhf.config.checks.revisions import DATASETS, dataset_revisions
from openrlhf.config.flags import flag_values


def hub_commits(config: object) -> dict[str, str]:
    """Return the commits in the Hugging Face cache of each model and of each dataset with a revision, by name.

    Datasets without a revision are omitted, because `datasets` may load an older version than the cache names.
    """
    found = {item: model_commit(item) for _, item in named_by(config, MODEL_FLAGS)}
    values = flag_values(config)
    for data, flag in DATASETS:
        for name, revision in dataset_revisions(as_text(values.get(data)), as_text(values.get(flag))):
            if revision is not None:
                found[name] = cached_commit("dataset", name.partition("@")[0], revision)
    return {name: commit for name, commit in found.items() if commit is not None}


def model_commit(name: str) -> str | None:
    """Return the commit of a model that was loaded from the Hugging Face Hub; None for a local folder."""
    return None if is_here(name) else cached_commit("model", *split_revision(name))


def cached_commit(kind: str, repository: str, revision: str | None) -> str | None:
    """Return the commit that a revision was resolved to when it was last downloaded; None if it never was."""
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type=kind))
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    return commit if commit and (folder / "snapshots" / commit).is_dir() else None


def as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None
