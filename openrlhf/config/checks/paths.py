"""Rules about files and folders: a path that is clearly local must exist before anything is loaded."""

import difflib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from openrlhf.config.commands import LoraCombinerConfig, RLConfig, ViewConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.sections.data import split_names
from openrlhf.errors import ConfigError

MODEL_FLAGS = ("pretrain", "ref_pretrain", "critic_pretrain", "reward_pretrain", "teacher_model", "model_path")
OUTPUT_FLAGS = ("save_path", "ckpt_path", "run_dir")
# Bytes: file systems allow 255, and temporary folders have longer names: see `training/atomic_folder.py`.
LONGEST_NAME = 255 - len("._critic.exporting-0123456789ab")
DATA_FLAGS = ("dataset", "eval_dataset", "prompt_data")
INPUT_FLAGS = (*MODEL_FLAGS, *DATA_FLAGS, "agent_func_path", "replay", "ta_prompt", "lora_path")
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".py")


def looks_local(name: str) -> bool:
    """Return True for `/x`, `./x`, `../x` and `~/x`; a hub name cannot start like this."""
    return name.startswith(("/", "./", "../", "~"))


def cannot_be_on_a_hub(name: str) -> bool:
    """Return True for a name that only a path can have: hub names are `model` or `org/model`."""
    return looks_local(name) or name.endswith("/") or name.partition("@")[0].count("/") > 1 or "\\" in name


def nearest_path(name: str) -> str | None:
    """Return the existing path that a mistyped one probably means: one of its folders, or its last part, differs."""
    path = Path(name).expanduser()
    existing = next((parent for parent in path.parents if parent.is_dir()), None)
    if existing is None:
        return None
    wrong, *rest = path.relative_to(existing).parts
    for match in difflib.get_close_matches(wrong, sorted(item.name for item in existing.iterdir()), n=3, cutoff=0.75):
        if (existing / match).joinpath(*rest).exists():
            found = str((existing / match).joinpath(*rest))
            return found if looks_local(found) else f"./{found}"
    return None


def is_here(name: str) -> bool:
    """Return True for a model or dataset on this machine, which is loaded without contacting a hub."""
    return looks_local(name) or is_in_memory(name) or Path(name.partition("@")[0]).expanduser().exists()


def split_revision(name: str) -> tuple[str, str | None]:
    """Split the hub name `org/model@revision`; a path on this machine stays whole."""
    if looks_local(name) or Path(name).exists():
        return name, None
    repository, _, revision = name.partition("@")
    return repository, revision or None


def named_by(config: object, flags: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (flag, item) for each item in the comma-separated values of these flags."""
    values = flag_values(config)
    for name in flags:
        value = values.get(name)
        if isinstance(value, str):
            yield from ((name, item) for item in split_names(value))


def paths_are_valid(config: object) -> None:
    """Reject text that cannot be a path, such as a whole document or the home of an unknown user."""
    for name, item in named_by(config, INPUT_FLAGS):
        try:
            Path(item).expanduser().stat()
        except (ValueError, RuntimeError) as error:  # a null character; no such user
            problem = str(error).rstrip(".")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                continue  # other rules say which paths must exist
            problem = "this name is too long"
        else:
            continue
        start = repr(item[:60]) + ("..." if len(item) > 60 else "")
        raise ConfigError(f"--{name} {start} cannot be a path: {problem}", try_this="the path of a file or folder")


def model_folders_exist(config: object) -> None:
    """Reject local paths that do not exist, are files, contain only an adapter, or are not models."""
    for name, item in named_by(config, MODEL_FLAGS):
        folder = Path(item).expanduser()
        if cannot_be_on_a_hub(item) and not folder.exists():
            fix = nearest_path(item) or "a model folder, or a hub name such as org/model"
            raise ConfigError(f"--{name} {item}: no such folder", try_this=fix)
        if folder.is_file():
            raise ConfigError(f"--{name} {item} is a file, but a model is a folder with config.json")
        if looks_local(item) and (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
            raise ConfigError(
                f"--{name} {item} is a LoRA adapter without its base model",
                try_this=f"openrlhf lora_combiner --model_path BASE --lora_path {item} --output_path MERGED",
            )
        if looks_local(item) and not (folder / "config.json").exists():
            raise ConfigError(f"--{name} {item} has no config.json, so it is not a model folder")


def adapter_folder_exists(config: LoraCombinerConfig) -> None:
    """Reject a local --lora_path that is not a LoRA adapter."""
    path = str(config.merge.lora_path)
    if looks_local(path) and not (Path(path).expanduser() / "adapter_config.json").exists():
        raise ConfigError(f"--lora_path {path} has no adapter_config.json, so it is not a LoRA adapter")


def dataset_files_exist(config: object) -> None:
    """Reject missing dataset files, which would otherwise be looked up on the hub."""
    for name, item in named_by(config, DATA_FLAGS):
        path = item.partition("@")[0]
        local = cannot_be_on_a_hub(path) or path.endswith(DATA_SUFFIXES)
        if local and not Path(path).expanduser().exists():
            raise ConfigError(f"--{name} {path}: no such file or folder", try_this=nearest_path(path))


def named_files_exist(config: object) -> None:
    """Reject missing reward, agent and chat history files before the run starts."""
    for name, item in named_by(config, ("remote_rm_url", "agent_func_path", "ta_prompt")):
        if (item.endswith(".py") or name == "ta_prompt") and not Path(item).expanduser().is_file():
            raise ConfigError(f"--{name} {item}: no such file", try_this=nearest_path(item))


def run_folders_exist(config: ViewConfig) -> None:
    """Reject a RUN_DIR that is not a folder."""
    for item in config.runs.run_dirs:
        if not Path(item).expanduser().is_dir():
            raise ConfigError(f"RUN_DIR {item}: no such folder", try_this="the --save_path or --run_dir of a run")


def replay_is_of_another_run(config: RLConfig) -> None:
    """Require a folder of rollouts recorded by another run: a run moves its own earlier record aside when it starts."""
    replay = config.rollout.replay
    if not replay:
        return
    folder = Path(replay).expanduser()
    own = Path(config.run.run_dir or Path(config.checkpoints.save_path) / "run") / "rollouts"
    if own.expanduser().resolve() == folder.resolve():
        raise ConfigError(
            f"--replay {replay} is the folder that this run writes its rollouts to",
            try_this="another --save_path or --run_dir",
        )
    if not folder.is_dir():
        raise ConfigError(f"--replay {replay}: no such folder", try_this="--replay ./ckpt/run/rollouts")
    if not any(file.suffix in (".parquet", ".jsonl") for file in folder.glob("step_*")):
        raise ConfigError(f"--replay {replay} has no step_*.parquet, so it is not a folder of recorded rollouts")


def must_keep(output: str, flag: str, source: object, *, try_this: str) -> None:
    """Reject an --output_path that would overwrite what another flag names."""
    if Path(output).expanduser().resolve() == Path(str(source)).expanduser().resolve():
        raise ConfigError(
            f"--output_path {output} is the same as --{flag}, which would be overwritten", try_this=try_this
        )


def outputs_can_be_written(config: object) -> None:
    """Check output folders now, not after hours of training when the result is saved."""
    for name, item in named_by(config, OUTPUT_FLAGS):
        must_be_writable(name, item)


def must_be_writable(flag: str, item: str) -> None:
    """Reject an output folder that cannot be created or written to."""
    try:
        folder = Path(item).expanduser()
        if (length := len(os.fsencode(folder.name))) > LONGEST_NAME:
            raise ConfigError(
                f"--{flag} {item}: the name is too long: expected at most {LONGEST_NAME} bytes, got {length}"
            )
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # such as another part that is too long
        raise ConfigError(f"--{flag} {item}: {error.strerror}") from None
    except RuntimeError as error:  # the home of an unknown user
        problem = str(error).rstrip(".")
        raise ConfigError(f"--{flag} {item}: {problem}", try_this=f"--{flag} ./ckpt") from None
    if not nearest.is_dir():
        raise ConfigError(f"--{flag} {item}: {nearest} is a file, not a folder to write to")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"--{flag} {item}: {nearest} cannot be written to")
