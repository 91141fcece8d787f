"""Rules that several commands share: model, template, precision, data and checkpoint flags."""

import json
from collections.abc import Collection

from openrlhf.config.checks.rule import Changed, change
from openrlhf.config.commands import Templated, TrainingConfig
from openrlhf.config.flags import choices_of, flag_values, flags_of
from openrlhf.errors import ConfigError, counted

EMPTY = ("", '""', "''")


def required_flags_are_given(config: object) -> None:
    """Require all flags that are declared as required."""
    require(config, flags_of(type(config)))


def require(config: object, names: Collection[str]) -> None:
    """Raise for the first of these flags that is declared as required and not given."""
    values = flag_values(config)
    for name, item in flags_of(type(config)).items():
        if name in names and item.required and not values[name]:
            fix = item.required if item.positional else f"--{name} {item.required}"
            choices = ", ".join(choices_of(item.type))
            problem = f"{item.spelling} is not given, but this command needs it" + (
                f": one of {choices}" if choices else ""
            )
            raise ConfigError(problem, try_this=fix)


def numbers_are_in_range(config: object) -> None:
    """Check each number against its declared range, so that later rules can rely on it."""
    values = flag_values(config)
    for name, item in flags_of(type(config)).items():
        value = values[name]
        if item.within is None or value is None:
            continue
        for number in value if isinstance(value, tuple) else (value,):
            assert isinstance(number, int | float), f"--{name} has a range but is not a number"
            if not item.within.holds(number):
                raise ConfigError(f"--{name} is {number}, but must be {item.within.wanted}")


def empty_template_is_none(config: Templated) -> Changed[Templated] | None:
    """Treat an empty template as no template: scripts pass '' (even with literal quotes) for complete prompts."""
    if config.template.input_template in EMPTY:
        return change(config, "--input_template is empty: inputs are used unchanged", input_template=None)
    return None


def texts_are_unicode(config: Templated) -> None:
    """Reject text that no tokenizer accepts: Python decodes bytes of another encoding to lone surrogates."""
    for name, value in vars(config.template).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--{name} {value!r} is not UTF-8", try_this="the same text in UTF-8") from None


def template_has_a_placeholder(config: Templated) -> None:
    """Reject a template without {}: every prompt would become the same text."""
    if not config.template.apply_chat_template:
        must_have_placeholder(config.template.input_template)


def must_have_placeholder(template: str | None) -> None:
    if template and "{}" not in template:
        raise ConfigError(
            f"--input_template {template!r} has no {{}} for the input",
            try_this="--input_template $'User: {}\\nAssistant: '",
        )


def template_has_line_breaks(config: Templated) -> str | None:
    r"""Warn if the shell passed `\n` as two characters, which would become part of the prompt."""
    if "\\n" in (config.template.input_template or ""):
        return "--input_template contains a backslash and an n; for a line break, write $'...\\n...' in the shell"
    return None


def chat_template_kwargs_are_json(config: Templated) -> None:
    """Parse the JSON here, so that a typo is reported before the data loads."""
    given = config.template.chat_template_kwargs
    if given is None:
        return
    try:
        kwargs = json.loads(given)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--chat_template_kwargs {given!r} is not JSON: {error}") from None
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f"--chat_template_kwargs {given!r} is not a JSON object", try_this="""'{"enable_thinking": false}'"""
        )


def four_bit_needs_bf16(config: object) -> None:
    """Require bf16 with 4-bit weights, which are dequantised to bf16 for every matrix product."""
    values = flag_values(config)
    if values["load_in_4bit"] and values["param_dtype"] != "bf16":
        raise ConfigError(f"--load_in_4bit computes in bf16: expected --param_dtype bf16, got {values['param_dtype']}")


def four_bit_trains_adapters(config: TrainingConfig) -> None:
    """Require LoRA with 4-bit weights: quantised weights have no gradient, so only adapters can be trained."""
    if config.model.load_in_4bit and config.lora.lora_rank == 0:
        raise ConfigError("--load_in_4bit freezes the base model, so only LoRA can train", try_this="--lora_rank 16")


def tensor_parallel_needs_bf16(config: TrainingConfig) -> None:
    """Require bf16 weights for DeepSpeed's tensor parallelism, as upstream does."""
    size = config.sharding.ds_tensor_parallel_size
    if size > 1 and config.model.param_dtype != "bf16" and config.sharding.backend != "fsdp":
        raise ConfigError(f"--ds_tensor_parallel_size {size} needs --param_dtype bf16, not {config.model.param_dtype}")


def ring_attention_is_our_own(config: TrainingConfig) -> Changed[TrainingConfig] | None:
    """Replace flash attention with ring attention, which uses the same kernel; reject other implementations."""
    size, asked = config.sharding.ring_attn_size, config.model.attn_implementation
    if size == 1 or asked == "auto":
        return None
    if not asked.startswith("flash_attention"):
        raise ConfigError(
            f"--ring_attn_size {size} needs ring attention, which --attn_implementation {asked} would replace",
            try_this="--attn_implementation auto",
        )
    line = f"--attn_implementation {asked} is set to auto: --ring_attn_size uses ring attention"
    return change(config, line, attn_implementation="auto")


def packing_needs_our_attention(config: TrainingConfig) -> str | None:
    """Report that sequences are padded if the attention is one that cannot keep packed sequences apart."""
    asked = config.model.attn_implementation
    if not config.batches.packing_samples or asked == "auto" or asked.startswith("flash_attention"):
        return None
    return (
        f"--attn_implementation {asked} does not support packing, so sequences are padded. "
        "Try: --attn_implementation auto"
    )


def probabilities_match_datasets(config: object) -> None:
    """Require one probability per dataset, with a sum of 1."""
    values = flag_values(config)
    for data, probs in (("dataset", "dataset_probs"), ("prompt_data", "prompt_data_probs")):
        given = values.get(probs)
        if not isinstance(given, str):
            continue
        count = len(str(values[data] or "").split(","))
        try:
            shares = [float(item) for item in given.split(",")]
        except ValueError:
            raise ConfigError(
                f"--{probs} {given!r} is not a comma-separated list of numbers", try_this=f"--{probs} 0.7,0.3"
            ) from None
        if len(shares) != count:
            raise ConfigError(
                f"--{probs} has {counted(len(shares), 'value')}, but --{data} names {counted(count, 'dataset')}"
            )
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
            raise ConfigError(f"--{probs} {given}: each probability must be 0 or more, and they must sum to 1")


def evaluation_data_has_one_source(config: object) -> None:
    """Reject --eval_size next to --eval_dataset, and a size that was given as the name of a split."""
    values = flag_values(config)
    size, split = values.get("eval_size"), str(values.get("eval_split"))
    if size is not None and values["eval_dataset"]:
        raise ConfigError(
            f"--eval_size {size:.10g} conflicts with --eval_dataset {values['eval_dataset']}, whose rows are evaluated",
            try_this="only one of them",
        )
    if split.replace(".", "", 1).isdigit():
        raise ConfigError(f"--eval_split {split}: expected the name of a split", try_this=f"--eval_size {split}")


def resuming_needs_checkpoints(config: TrainingConfig) -> str | None:
    """Warn about a run that resumes from a checkpoint but does not write resumable ones itself."""
    if config.checkpoints.load_checkpoint and config.checkpoints.disable_ds_ckpt:
        return "--disable_ds_ckpt writes no resumable checkpoints: --load_checkpoint will find only older ones"
    return None


def keys_fit_into_a_header(config: object) -> None:
    """Reject keys that are not valid in an HTTP header before the first request fails with an obscure error."""
    values = flag_values(config)
    for name in ("api_key", "reward_api_key"):
        key = str(values.get(name) or "")
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"--{name} must be ASCII without spaces or line breaks", try_this="openssl rand -hex 16")
