"""Rules about revisions: commits, tags and branches of models and datasets on a hub.

After these rules, the name of a model includes its revision (`org/model@revision`); only the loaders split it again
(`paths.split_revision`). In the name of a dataset, @ selects a folder, so the revision stays in a separate flag.
"""

from pathlib import Path

from openrlhf.config.checks.paths import MODEL_FLAGS, is_here, named_by
from openrlhf.config.checks.rule import Changed, change
from openrlhf.config.flags import flag_values
from openrlhf.config.sections.data import split_names
from openrlhf.errors import ConfigError, counted

OWN_MODEL = ("pretrain", "model_path", "reward_pretrain")  # the first one that a command has is its model
DATASETS = (("dataset", "dataset_revision"), ("prompt_data", "dataset_revision"), ("eval_dataset", "eval_revision"))


def dataset_revisions(names: str | None, revisions: str | None) -> list[tuple[str, str | None]]:
    """Return each dataset with its revision; revisions are matched with hub names by position."""
    left = iter(split_names(revisions))
    return [(name, None if is_here(name) else next(left, None)) for name in split_names(names)]


def revisions_are_not_empty(config: object) -> None:
    """Reject empty revisions: an unset shell variable would load the default branch."""
    values = flag_values(config)
    for flag in ("revision", "dataset_revision", "eval_revision"):
        if values.get(flag) is not None and not split_names(str(values[flag])):
            raise ConfigError(
                f"--{flag} is empty: expected a commit hash, tag or branch",
                try_this=f"without --{flag} for the default branch",
            )


def revision_becomes_part_of_the_name(config: object) -> Changed[object] | None:
    """Append --revision to the name of the command's model, wherever that name is given."""
    values = flag_values(config)
    revision = values.get("revision")
    if not revision:
        return None
    flag = next(name for name in OWN_MODEL if name in values)
    model = str(values[flag])
    if is_here(model):
        raise ConfigError(
            f"--revision {revision} needs a model on a hub, but --{flag} {model} is a folder on this machine",
            try_this="without --revision, or a hub name such as org/model",
        )
    if "@" in model:
        raise ConfigError(f"--revision {revision} conflicts with --{flag} {model}, which already contains a revision")
    pinned = f"{model}@{revision}"
    changed = {
        name: ",".join(pinned if item == model else item for item in split_names(str(values[name])))
        for name, item in named_by(config, MODEL_FLAGS)
        if item == model
    }
    line = f"--revision {revision}: " + ", ".join(f"--{name} is {value}" for name, value in changed.items())
    return change(config, line, revision=None, **changed)


def models_with_a_revision_are_on_a_hub(config: object) -> None:
    """Reject `folder@revision`: a folder has no revisions, so loaders would ignore this one."""
    for name, item in named_by(config, MODEL_FLAGS):
        before, at, revision = item.partition("@")
        if not at or Path(item).expanduser().exists():
            continue
        if Path(before).expanduser().exists():
            raise ConfigError(
                f"--{name} {item}: {before} is a folder on this machine, which has no revisions",
                try_this=f"--{name} {before}",
            )
        if not revision:
            raise ConfigError(f"--{name} {item} ends with @ but names no revision", try_this=f"--{name} {before}")


def each_hub_dataset_has_a_revision(config: object) -> None:
    """Require one revision per hub name, matched by position; files and folders have none."""
    values = flag_values(config)
    for data, flag in DATASETS:
        given = split_names(str(values.get(flag) or ""))
        if not given or not values.get(data):
            continue
        hub = [name for name in split_names(str(values[data])) if not is_here(name)]
        if not hub:
            raise ConfigError(
                f"--{flag} needs a dataset on a hub, but --{data} {values[data]} is on this machine",
                try_this=f"without --{flag}",
            )
        if len(given) != len(hub):
            raise ConfigError(
                f"--{flag} has {counted(len(given), 'value')}, but --{data} has {counted(len(hub), 'hub name')}"
            )


def the_same_dataset_has_the_same_revision(config: object) -> Changed[object] | None:
    """Pin the evaluation data too if it is another split of the pinned training data."""
    values = flag_values(config)
    revision, given = values.get("dataset_revision"), values.get("eval_dataset")
    if not revision or not given or values["eval_revision"]:
        return None
    if given != values.get("dataset", values.get("prompt_data")):
        return None
    line = f"--eval_revision is set to {revision}: --eval_dataset names the same datasets as the training data"
    return change(config, line, eval_revision=revision)
