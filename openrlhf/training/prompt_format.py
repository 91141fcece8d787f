"""The prompt format of training, recorded so that the model can later be prompted the same way.

A model card holds the format twice: as text and example code for people (`card_example`), and in its metadata, from
which `openrlhf export` reads it to write the template of a Modelfile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from openrlhf.config.commands import PRMConfig, TrainingConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.sections.data import TemplateFlags
from openrlhf.data.templates import fill

TEXT = (str, type(None))
FIELD_TYPES = {  # types of the metadata, which people may edit
    "chat": bool,
    "input_template": TEXT,
    "chat_template": TEXT,
    "chat_template_kwargs": dict,
    "system_prompt": TEXT,
}


@dataclass(frozen=True)
class PromptFormat:
    """A chat template with its settings, or an input template; by default, prompts are plain text."""

    chat: bool = False
    input_template: str | None = None  # without a chat template
    chat_template: str | None = None  # Jinja text that replaced the tokenizer's own
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    system_prompt: str | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> PromptFormat:
        """Return the format that a training command used."""
        flags = getattr(config, "template", None)
        if isinstance(config, PRMConfig) or not isinstance(flags, TemplateFlags):
            return cls()
        if flag_values(config).get("pretrain_mode"):
            return cls()
        if not flags.apply_chat_template:
            return cls(input_template=flags.input_template)
        return cls(
            chat=True,
            chat_template=flags.tokenizer_chat_template,
            chat_template_kwargs=flags.template_kwargs,
            system_prompt=flags.system_prompt,
        )

    @classmethod
    def from_metadata(cls, saved: object) -> PromptFormat | None:
        """Read the metadata of a model card, which people may have edited; None if it holds no usable format."""
        if not isinstance(saved, dict):
            return None
        if not all(isinstance(value, FIELD_TYPES.get(name, ())) for name, value in saved.items()):
            return None
        if "{}" not in (saved.get("input_template") or "{}"):
            return None
        return cls(**saved)

    def metadata(self) -> dict[str, object]:
        """Return the fields that differ from plain text, for the metadata of a model card."""
        return {name: value for name, value in asdict(self).items() if value}

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """Return the conversation that asks a chat model one question."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    def text(self, prompt: str) -> str:
        """Return the prompt as the model reads it, without a chat template."""
        return fill(self.input_template, prompt)
