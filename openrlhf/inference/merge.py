"""The lora_combiner command: merge a LoRA adapter into its base model and save the result."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from openrlhf.config.commands import LoraCombinerConfig
from openrlhf.inference.converted_card import merged_card
from openrlhf.models.export import save_model
from openrlhf.models.forward import Network
from openrlhf.models.load import DTYPES
from openrlhf.models.merge import merge_adapter
from openrlhf.monitor import say
from openrlhf.training.atomic_folder import exporting, remove_leftovers
from openrlhf.training.folder_lock import hold_folder
from openrlhf.training.model_card import write_card
from openrlhf.training.processes import choose_device


def run(config: LoraCombinerConfig) -> Path:
    """Merge the adapter and save the model; the output folder is created only when it is complete.

    The config must already be checked.
    """
    disable_progress_bar()
    choose_device("cpu")  # merging does not need a GPU
    flags = config.merge
    folder = Path(str(flags.output_path)).expanduser()
    with hold_folder(folder, "--output_path"):
        remove_leftovers(folder.parent, lambda name: name == folder.name)
        model, tokenizer = merge_adapter(
            str(flags.model_path),
            Path(str(flags.lora_path)).expanduser(),
            is_rm=flags.is_rm,
            dtype=DTYPES[config.model.param_dtype],
        )
        with exporting(folder) as aside:
            save_model(Network(model), aside)
            tokenizer.save_pretrained(aside)
            write_card(aside, partial(merged_card, folder, str(flags.lora_path), str(flags.model_path), model))
    say(f"saved {folder} in {config.model.param_dtype}")
    return folder
