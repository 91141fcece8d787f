"""The model card (README.md) of a saved model: its kind, how to prompt it, and how it was trained.

`training_card` describes the result of a training run; `inference/converted_card.py` describes a model that was merged
or converted, and carries over the section on training. `write_card` puts a card into a folder that is being saved: the
card appears together with the model, and a failure to make the card never stops the save.

The metadata at the top follows the Hugging Face Hub, which rejects local paths as names of models and datasets: those
appear only in the text. `prompt_format` is our own key (`prompt_format.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from openrlhf.config import commands
from openrlhf.config.checks.paths import OUTPUT_FLAGS, is_here, split_revision
from openrlhf.config.checks.revisions import dataset_revisions
from openrlhf.config.commands import COMMANDS, RLConfig, TrainingConfig
from openrlhf.config.flags import flag_values, flags_of
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.runtime import critic_model
from openrlhf.errors import counted
from openrlhf.models.hub_commits import as_text, cached_commit, model_commit
from openrlhf.monitor import say
from openrlhf.training.card_example import CARDS, Example, Kind
from openrlhf.training.card_file import CARD_FILE, TAG, folder_card, load_card, sealed
from openrlhf.training.prompt_format import PromptFormat
from openrlhf.training.run_directory import SECRET, package_versions, shown_flags

MakeCard = Callable[[], ModelCard]
TRAINING_SECTION = "## Training"  # cards of converted models copy the text that starts here
# Flags that affect only where a run writes and reports.
NOT_REPRODUCED = {*OUTPUT_FLAGS, *SECRET, "load_checkpoint", "local_rank", "use_tensorboard", "use_trackio"}
NOT_REPRODUCED |= {"push_to_hub", "hub_private", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name"}
PROCESS_REWARD_TAG = "process-reward-model"
ESTIMATORS = {  # name of the algorithm, tag of the card
    "gae": ("PPO", "ppo"),
    "reinforce": ("REINFORCE++", "reinforce"),
    "rloo": ("RLOO", "rloo"),
    "reinforce_baseline": ("REINFORCE++ with a baseline", "reinforce"),
    "group_norm": ("GRPO", "grpo"),
    "dr_grpo": ("Dr. GRPO", "dr-grpo"),
}
ALGORITHMS: dict[type, tuple[str, str]] = {
    commands.SFTConfig: ("supervised fine-tuning", "sft"),
    commands.RMConfig: ("pairwise reward modelling", "reward-model"),
    commands.DPOConfig: ("direct preference optimisation (DPO)", "dpo"),
    commands.KTOConfig: ("Kahneman-Tversky optimisation (KTO)", "kto"),
    commands.KDConfig: ("knowledge distillation", "distillation"),
    commands.PRMConfig: ("process reward modelling", PROCESS_REWARD_TAG),
}


@dataclass(frozen=True)
class Outcome:
    """The amount of data and the results of a run when a model is saved."""

    rows: int  # training rows, or prompts in reinforcement learning
    eval_rows: int = 0
    step: int | None = None  # None if not known
    train: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    evaluation: Mapping[str, float] = field(default_factory=dict)


def write_card(folder: Path, make: MakeCard) -> None:
    """Write a card into a folder that is being saved; if it cannot be made, print a line and continue."""
    try:
        (folder / CARD_FILE).write_text(sealed(str(make())), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - nothing about a card is worth losing a trained model
        say(f"the model is saved without a model card: {type(error).__name__}: {error}")


def training_card(
    config: TrainingConfig, outcome: Outcome, *, folder: Path | None = None, kind: Kind | None = None
) -> ModelCard:
    """Return the card of a model that a run saves.

    Pass `folder` and `kind` if it is not the finished model, but the model of a checkpoint, or a critic.
    """
    kind = kind or kind_of(config)
    # A critic starts from --critic_pretrain or from a reward model.
    is_critic = isinstance(config, RLConfig) and kind is Kind.CRITIC
    base = str(critic_model(config) if is_critic else config.model.pretrain)
    path = str(folder) if folder else config.hub.push_to_hub or config.checkpoints.save_path
    example = example_of(config, path, kind)
    algorithm, tag = algorithm_of(config)
    metadata = base_metadata(base)
    metadata.datasets = [name.partition("@")[0] for name, _ in training_data(config) if not is_here(name)] or None
    metadata.library_name = "peft" if example.is_adapter else "transformers"
    metadata.pipeline_tag = "text-classification" if kind.scores else "text-generation"
    metadata.tags = [TAG, tag, *(["lora"] if example.is_adapter else [])]
    metadata["prompt_format"] = example.prompt.metadata()
    command = command_of(config)
    what = f"the LoRA adapter of a {kind.value}" if example.is_adapter else f"a {kind.value}"
    return fill_card(
        metadata,
        title=Path(path).name,
        summary=f"This is {what}, trained from `{base}` by {algorithm} with OpenRLHF (`openrlhf {command}`).",
        example=example,
        prompt=example.prompt if kind is not Kind.PROCESS_REWARD else None,
        run=facts_of_run(config, outcome, base),
    )


def fill_card(metadata: ModelCardData, **facts: object) -> ModelCard:
    """Return a card with this metadata; cards/model_card.md.jinja shows which facts its text may contain."""
    given: dict[str, object] = dict.fromkeys(("example", "gguf", "prompt", "run", "training")) | facts
    text = CARDS.get_template("model_card.md.jinja").render(
        given,
        needs_license=metadata.get("license_name") == "unknown",
        versions=", ".join(f"{name} {number}" for name, number in package_versions().items() if number),
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text.strip()}\n", ignore_metadata_errors=True)


def example_of(config: TrainingConfig, path: str, kind: Kind) -> Example:
    """Collect the facts that the example code of a trained model depends on."""
    example = Example(
        path,
        kind,
        PromptFormat.of(config),
        is_adapter=config.lora.lora_rank > 0,
        head=as_text(flag_values(config).get("value_head_prefix")) or "score",
    )
    if not isinstance(config, commands.PRMConfig):
        return example
    fields = config.fields
    return replace(example, step_token=str(fields.placeholder_token), step_labels=fields.reward_tokens)


def command_of(config: TrainingConfig) -> str:
    return next(name for name, kind in COMMANDS.items() if kind is type(config))


def kind_of(config: TrainingConfig) -> Kind:
    if isinstance(config, commands.RMConfig):
        return Kind.REWARD
    return Kind.PROCESS_REWARD if isinstance(config, commands.PRMConfig) else Kind.LANGUAGE


def algorithm_of(config: TrainingConfig) -> tuple[str, str]:
    """Return the name and the tag of the training algorithm."""
    match config:
        case RLConfig(advantage=advantage):
            name, tag = ESTIMATORS[advantage.advantage_estimator]
            return f"reinforcement learning ({name})", tag
        case commands.DPOConfig(objective=objective) if objective.ipo:
            return "identity preference optimisation (IPO)", "ipo"
        case commands.SFTConfig(fields=fields) if fields.pretrain_mode:
            return "continued pre-training", "pretraining"
    return ALGORITHMS[type(config)]


def read_card(name: str) -> ModelCard | None:
    """Return the card of a model folder, or of a hub name whose card is in the local cache; None without one."""
    repository, revision = split_revision(name)
    cached = None if is_here(name) else try_to_load_from_cache(repository, CARD_FILE, revision=revision)
    return load_card(Path(cached)) if isinstance(cached, str) else folder_card(Path(name).expanduser())


def warn_if_prompted_differently(config: RLConfig) -> None:
    """Print a line if the card of --pretrain names a different prompt format from this run's."""
    name, used = str(config.model.pretrain), PromptFormat.of(config)
    card = read_card(name)
    trained = PromptFormat.from_metadata(card.data.get("prompt_format")) if card else None
    if trained is None or (trained.chat, trained.text("")) == (used.chat, used.text("")):
        return
    before, now = (
        "the chat template" if form.chat else f"the input template {form.input_template or '{}'!r}"
        for form in (trained, used)
    )
    fix = "--apply_chat_template" if trained.chat else f"--input_template {shlex.quote(trained.input_template or '{}')}"
    say(f"{name} was trained with {before}, but this run prompts it with {now}. Try: {fix}")


def base_metadata(base: str) -> ModelCardData:
    """Return the metadata that a model inherits from its base: license, language and, for a folder, its own base.

    A base without a card has an unknown license.
    """
    card = read_card(base)
    known = card.data if card else ModelCardData()
    licence = known.get("license")
    return ModelCardData(
        base_model=known.get("base_model") if is_here(base) else split_revision(base)[0],
        license=licence or "other",
        license_name=known.get("license_name") if licence else "unknown",
        license_link=known.get("license_link"),
        language=known.get("language"),
    )


def training_data(config: TrainingConfig) -> list[tuple[str, str | None]]:
    """Return the names of the training datasets with their revisions."""
    values = flag_values(config)
    names = as_text(values.get("dataset")) or as_text(values.get("prompt_data"))
    return dataset_revisions(names, as_text(values.get("dataset_revision")))


def facts_of_run(config: TrainingConfig, outcome: Outcome, base: str) -> dict[str, object]:
    """Return base model, data, flags and results for the section on training."""
    data: list[str] = []
    for name, revision in training_data(config):
        resolved = cached_commit("dataset", name.partition("@")[0], revision) if revision else None
        data.append(f"`{name}`" + (f" at revision `{resolved or revision}`" if revision else ""))
    unit = "prompt" if isinstance(config, RLConfig) else "row"
    return {
        "base": base,
        "commit": model_commit(base),
        "data": data,
        "amount": counted(outcome.rows, unit),
        "eval_amount": evaluation_text(config, outcome, unit) if outcome.eval_rows else None,
        "algorithm": algorithm_of(config)[0],
        "outcome": outcome,
        "last_step": {name: value for name, value in outcome.train.items() if not name.startswith("timing/")},
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        # Objects of a Python program cannot be flags of a command.
        "in_memory": any(isinstance(value, str) and is_in_memory(value) for value in flag_values(config).values()),
        "command": reproduction(config),
    }


def evaluation_text(config: TrainingConfig, outcome: Outcome, unit: str) -> str:
    """Return how many rows the run was evaluated on, and where they come from if no flag names them."""
    size = flag_values(config)["eval_size"]
    held_out = "" if size is None else f" held out of the data above by `--eval_size {size:.10g}`"
    return counted(outcome.eval_rows, unit) + held_out


def reproduction(config: TrainingConfig) -> str:
    """Return the command line with every flag that differs from its default, without outputs and API keys."""
    shown, flags, values = shown_flags(config), flags_of(type(config)), flag_values(config)
    words = [f"openrlhf {command_of(config)}"]
    for name, item in flags.items():
        value = shown[name]
        if name in NOT_REPRODUCED or values[name] == item.default:
            continue
        if value is None:
            words.append(f"--{name} ''")  # an empty value unsets a flag
        elif value is True:
            words.append(f"--{name}")
        else:
            parts = value if isinstance(value, list) else ["false" if value is False else value]
            words.append(" ".join((f"--{name}", *(shlex.quote(str(part)) for part in parts))))
    return " \\\n    ".join(words)
