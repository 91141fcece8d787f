"""Rules of uploading to a hub and of the export command: mistakes should cost seconds, not a finished run."""

from pathlib import Path

from openrlhf.config.checks.common import must_have_placeholder
from openrlhf.config.checks.paths import looks_local, must_be_writable, must_keep
from openrlhf.config.commands import ExportConfig, TrainingConfig
from openrlhf.errors import ConfigError

MODEL_FILES = ("config.json", "adapter_config.json", "model.gguf")  # a folder with one of these holds a model


def repository_name_is_valid(config: TrainingConfig | ExportConfig) -> None:
    """Reject a --push_to_hub that cannot be the name of a repository."""
    name = config.hub.push_to_hub
    if name is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(
            f"--push_to_hub {name} is not the name of a repository: expected NAME or ORG/NAME, with letters, digits,"
            " '-', '_' and '.'",
            try_this="--push_to_hub my-org/my-model",
        ) from None


def uploading_needs_a_login(config: TrainingConfig | ExportConfig) -> None:
    """Require a token and a hub that is not switched off; only the token's presence is checked here."""
    name = config.hub.push_to_hub
    if name is None:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"--push_to_hub {name} needs the hub, but HF_HUB_OFFLINE is set", try_this="unset HF_HUB_OFFLINE"
        )
    if get_token() is None:
        raise ConfigError(
            f"--push_to_hub {name} needs a login, but there is no token on this machine",
            try_this="hf auth login, or HF_TOKEN in the environment",
        )


def something_is_exported(config: ExportConfig) -> None:
    """Require an output folder, or a repository to upload the folder to."""
    flags = config.export
    if flags.output_path:
        must_be_writable("output_path", flags.output_path)
    elif flags.gguf is not None:
        raise ConfigError("--gguf needs a folder to write to", try_this="--output_path ./exported")
    elif config.hub.push_to_hub is None:
        raise ConfigError(
            "nothing to do: neither --output_path nor --push_to_hub is given",
            try_this="--output_path ./exported --gguf q8_0",
        )


def input_template_has_a_placeholder(config: ExportConfig) -> None:
    """Reject a template without {}, which would drop the user's prompt."""
    must_have_placeholder(config.export.input_template)


def source_is_a_model_or_an_adapter(config: ExportConfig) -> None:
    """Require a model or an adapter; a folder that is only uploaded may also hold a GGUF file."""
    name = str(config.export.pretrain)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or looks_local(name):
            raise ConfigError(f"--pretrain {name}: no such folder")
        if not config.export.output_path:
            raise ConfigError(
                f"--pretrain {name} is not a folder on this machine, so there is nothing to upload",
                try_this="--output_path ./exported",
            )
        return
    accepted = MODEL_FILES[:2] if config.export.output_path else MODEL_FILES
    if not any((folder / file).is_file() for file in accepted):
        raise ConfigError(f"--pretrain {name} is not a model: it has no {' or '.join(accepted)}")


def exporting_keeps_its_source(config: ExportConfig) -> None:
    """Reject an output path that would overwrite the exported model."""
    if config.export.output_path:
        must_keep(config.export.output_path, "pretrain", config.export.pretrain, try_this="./exported")
