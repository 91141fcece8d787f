"""Flags for sharing a model: upload to the Hugging Face Hub, and conversion to other formats."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag

GGUFType = Literal["f16", "bf16", "f32", "q8_0"]


@dataclass(frozen=True, kw_only=True)
class HubFlags:
    """Hugging Face Hub"""

    push_to_hub: str | None = flag(
        None,
        "Upload the finished model to this repository, such as org/name (log in with `hf auth login` or HF_TOKEN).",
    )
    hub_private: bool = flag(False, "Make the repository private when it is created.", needs="push_to_hub")


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Export"""

    pretrain: str | None = flag(
        None,
        "Folder of a model or of a LoRA adapter, which is merged into its base; or the hub name of a model.",
        required="./ckpt",
    )
    revision: str | None = flag(None, "Commit hash, tag or branch of the model on its hub.")
    output_path: str | None = flag(
        None, "Folder for the exported model (default: upload --pretrain as it is).", essential=True
    )
    gguf: GGUFType | None = flag(
        None,
        "Write model.gguf with weights of this type and a Modelfile, for llama.cpp, Ollama and LM Studio.",
        essential=True,
    )
    input_template: str | None = flag(
        None,
        "Prompt template of the Modelfile, with {} for the input (default: as in training, or the chat template).",
        needs="gguf",
    )
    skip_self_test: bool = flag(
        False, "Do not load the GGUF file again to compare its outputs with the model's.", needs="gguf"
    )
