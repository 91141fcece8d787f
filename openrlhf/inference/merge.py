"""The lora_combiner command: merge a LoRA adapter into its base model and save the result."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import LoraCombinerConfig
from openrlhf.inference.export import converting_to, merged_source, save_for_transformers
from openrlhf.models.load import DTYPES


def run(config: LoraCombinerConfig) -> Path:
    """Merge the adapter and save the model; the output folder is created only when it is complete.

    The config must already be checked.
    """
    disable_progress_bar()
    flags, dtype = config.merge, config.model.param_dtype
    folder = Path(str(flags.output_path)).expanduser()
    with converting_to(folder):
        source = merged_source(str(flags.model_path), str(flags.lora_path), DTYPES[dtype], is_rm=flags.is_rm)
        save_for_transformers(folder, source, dtype)
    return folder
