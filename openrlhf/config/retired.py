"""Flags of older versions that no longer exist: ignored with a message, or rejected with an alternative.

Flags that only changed how a run is computed are ignored; flags that changed what is learned are rejected.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from openrlhf.errors import ConfigError

TRAINING = "gradient_checkpointing"  # a flag that all training commands have
RL = "prompt_data"  # a flag that only RL commands have


@dataclass(frozen=True)
class Retired:
    """A retired flag of the commands that have the flag `of`, and the message about it."""

    of: str
    line: str
    try_this: str | None = None  # if set, the flag is rejected
    harmless: Collection[str] = ()  # values that are ignored, not rejected


TEXT_ONLY = "has no effect: models are trained on text only"
RETIRED: Mapping[str, Retired] = {
    "disable_trace_cache": Retired(TRAINING, "has no effect: DeepSpeed's parameter trace works without it"),
    "torch_compile": Retired(TRAINING, "has no effect; --deepcompile compiles the decoder layers"),
    "perf": Retired(RL, "has no effect: timings are always logged"),
    "actor_init_on_gpu": Retired(RL, "has no effect"),
    "ptx_coef": Retired(RL, "has no effect: there is no pre-training loss to weight"),
    "pretrain_data": Retired(
        RL,
        "would mix a pre-training loss into PPO, which is not supported",
        try_this="train_sft on that data first, then RL with --init_kl_coef to stay near the result",
        harmless=("", '""', "''", "None"),
    ),
    "pretrain_data_probs": Retired(RL, "has no effect without --pretrain_data"),
    "pretrain_split": Retired(RL, "has no effect without --pretrain_data"),
    **{
        name: Retired(
            RL,
            "would put images into prompts, but models are trained on text only",
            "--max_images_per_prompt 0",
            ("0",),
        )
        for name in ("max_images_per_prompt", "data.max_images_per_prompt")
    },
    **{name: Retired(RL, TEXT_ONLY) for name in ("image_key", "data.image_key")},
    **{name: Retired(RL, TEXT_ONLY) for name in ("freeze_visual_encoder", "actor.freeze_visual_encoder")},
}

# The three flags of 0.11.2 that --vllm_is_correction_type replaces.
LEVEL, MODE, GATING = (f"algo.advantage.is_correction_{name}" for name in ("level", "mode", "gating"))
CORRECTION = (LEVEL, MODE, GATING)
CORRECTION_TYPES = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}


def retired_names(flags: Collection[str]) -> list[str]:
    """List the retired flags of the command whose current flags are `flags`."""
    of = {name: item.of for name, item in RETIRED.items()} | dict.fromkeys(CORRECTION, "enable_vllm_is_correction")
    return [name for name, own in of.items() if own in flags]


def retire(name: str, value: str) -> str:
    """Return the message for an ignored flag; raise for a rejected one."""
    item = RETIRED[name]
    if item.try_this is not None and value not in item.harmless:
        raise ConfigError(f"--{name} {value} {item.line}", try_this=item.try_this)
    return f"--{name} has no effect" if item.try_this else f"--{name} {item.line}"


def correction_words(given: Mapping[str, str]) -> list[str]:
    """Translate the three correction flags of 0.11.2 to the current ones."""
    if not given:
        return []
    level, mode, gating = given.get(LEVEL, "off"), given.get(MODE, "mask"), given.get(GATING, "ratio")
    if level == "off":
        return ["--enable_vllm_is_correction=false"]
    if gating != "ratio":
        raise ConfigError(f"--{GATING} {gating} is not supported", try_this=f"--{GATING} ratio")
    kind = CORRECTION_TYPES.get((level, mode))
    if kind is None:
        known = " or ".join(f"--{LEVEL} {level} --{MODE} {mode}" for level, mode in CORRECTION_TYPES)
        raise ConfigError(f"--{LEVEL} {level} --{MODE} {mode} is not a supported correction", try_this=known)
    return ["--enable_vllm_is_correction", f"--vllm_is_correction_type={kind}"]
