"""Load models and tokenizers from folders or hubs, with precision, attention, adapters and 4-bit weights.

The builders of `training`, `rl` and `inference` call these functions in this order:

    read_config        config.json alone, for checks before anything is loaded
    load_tokenizer
    load_causal_lm     a decoder with its vocabulary head: policies, references, teachers
    load_scalar_model  a decoder with a scalar head: reward models and critics
    add_adapters       wrap the model in LoRA, if requested; freeze modules that training on text does not update

Checkpoints with missing weights, which Transformers would initialise at random, are rejected.
"""

import re
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from openrlhf.config.checks.paths import is_here
from openrlhf.config.sections.model import LoadingFlags, LoraFlags, ModelFlags
from openrlhf.errors import ConfigError, first_line
from openrlhf.models.attention import choose_attention, fitting_attention
from openrlhf.models.deferred import deferred_weights, load_shell, weight_files
from openrlhf.models.experts import number_of_experts
from openrlhf.models.heads import SCALAR_HEAD, init_scalar_head
from openrlhf.models.hub_commits import model_commit
from openrlhf.models.liger import apply_liger, uses_liger
from openrlhf.models.source import cannot_load, find_source
from openrlhf.models.unused import freeze_unused
from openrlhf.monitor import say

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """Return the requested dtype, or fp32 on a CPU, where half precision is many times slower."""
    return torch.float32 if device.type == "cpu" else DTYPES[requested]


def load_tokenizer(name: str, loading: LoadingFlags) -> PreTrainedTokenizerBase:
    """Load a tokenizer; if it has no pad token, use EOS as the pad token."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(**find_source(name, loading))
    except (OSError, ValueError, TypeError) as error:
        raise cannot_load("tokenizer", name, error) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no EOS token to end a response with")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_config(name: str, loading: LoadingFlags) -> PretrainedConfig:
    """Read a model's config.json, without its weights."""
    try:
        return AutoConfig.from_pretrained(**find_source(name, loading))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
        StrictDataclassError,
    ) as error:
        raise cannot_load("model", name, error) from None


def usable_length(name: str, config: PretrainedConfig, max_len: int) -> int:
    """Return --max_len or the number of positions that the model supports, whichever is smaller."""
    known = known_positions(config) or max_len
    if known < max_len:
        say(f"--max_len {max_len} exceeds the {known} positions that {name} supports: {known} is used instead")
    return min(known, max_len)


def known_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a model supports; None if there is no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_causal_lm(
    name: str, loading: LoadingFlags, *, device: torch.device, packing: bool, defer: bool = False
) -> PreTrainedModel:
    """Load a decoder with its vocabulary head on the CPU (if quantised, on the device); the backend moves it.

    With `defer`, the weights are left in their files if possible; the backend must read them (`deferred.py`).
    """
    config = read_config(name, loading)
    model, missing = _from_pretrained(AutoModelForCausalLM, config, name, loading, device, packing, defer=defer)
    _reject_missing(name, missing, "a language model; a model that train_rm saved has no vocabulary head")
    return model


def load_scalar_model(
    name: str,
    loading: LoadingFlags,
    *,
    device: torch.device,
    packing: bool,
    head_prefix: str,
    new_head: bool = False,
    defer: bool = False,
) -> PreTrainedModel:
    """Load a decoder with a scalar head: a saved reward model or, if `new_head`, any language model.

    A new head starts near zero (see `init_scalar_head`). With `defer`, only the head is loaded, as in `load_causal_lm`.
    """
    config = read_config(name, loading)
    check_scalar_family(name, config, loading)
    config.num_labels = 1
    saved_prefix = config.to_dict().get("value_head_prefix", head_prefix)
    renamed: dict[str, Any] = (
        {"key_mapping": {rf"^{saved_prefix}\.": f"{SCALAR_HEAD}."}} if saved_prefix != SCALAR_HEAD else {}
    )
    # Silence warnings about the new or dropped head, which is intended; other missing weights are rejected below.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        auto_class = AutoModelForSequenceClassification
        model, missing = _from_pretrained(auto_class, config, name, loading, device, packing, defer=defer, **renamed)
    finally:
        logging.set_verbosity(verbosity)
    if not hasattr(model, SCALAR_HEAD):
        raise ConfigError(f"{type(model).__name__} has no head called {SCALAR_HEAD}, so it cannot be a reward model")
    _reject_missing(name, [key for key in missing if not key.startswith(f"{SCALAR_HEAD}.")])
    if missing and not new_head:
        raise no_scalar_head(name, saved_prefix)
    if missing:
        init_scalar_head(model)
    deferred_weights(model).fill(model.get_submodule(SCALAR_HEAD).parameters(), copy=True)  # PEFT makes a copy of it
    return model


def check_scalar_family(name: str, config: PretrainedConfig, loading: LoadingFlags) -> None:
    """Reject a model whose family has no class with a scalar head."""
    in_folder = loading.trust_remote_code and "auto_map" in config.to_dict()  # the model's folder contains its code
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not in_folder:
        raise ConfigError(
            f"{name} cannot be a reward model or critic: Transformers has no sequence classifier for the family"
            f" {config.model_type}",
            try_this="a model of another family, or an algorithm without a critic",
        )


def check_scalar_head(name: str, loading: LoadingFlags, head_prefix: str) -> None:
    """Reject a folder without weights for a scalar head, before they are loaded; only safetensors files are checked."""
    saved_prefix = read_config(name, loading).to_dict().get("value_head_prefix", head_prefix)
    files = weight_files(find_source(name, loading)) if is_here(name) else None
    if files is not None and not any(tensor.startswith(f"{saved_prefix}.") for tensor in files):
        raise no_scalar_head(name, saved_prefix)


def no_scalar_head(name: str, prefix: str) -> ConfigError:
    return ConfigError(
        f"{name} has no weights for a scalar head called {prefix}, so its rewards would be random",
        try_this="a folder that train_rm saved, or --value_head_prefix with the head's name",
    )


def _reject_missing(name: str, missing: Collection[str], try_this: str | None = None) -> None:
    """Reject a checkpoint with missing tensors, which Transformers would initialise at random."""
    if missing:
        raise ConfigError(
            f"the weights of {name} lack {len(missing)} of the model's tensors, such as {min(missing)}",
            try_this=try_this,
        )


def add_adapters(model: PreTrainedModel, lora: LoraFlags, *, scalar: bool) -> nn.Module:
    """Wrap the model in LoRA unless the rank is 0, and freeze the modules that training on text does not update."""
    unused = freeze_unused(model)
    if lora.lora_rank == 0:
        return model
    from peft import LoraConfig, TaskType, get_peft_model, prepare_model_for_kbit_training
    from peft.tuners.lora import LoraLayer

    if vars(model).get("_hf_peft_config_loaded"):  # Transformers has loaded the adapter of a hub name with its base
        raise ConfigError(
            "--pretrain is a LoRA adapter, which the new one would replace",
            try_this="openrlhf lora_combiner to merge it into its base first",
        )
    if vars(model).get("is_loaded_in_4bit"):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    all_linear = lora.target_modules == ("all-linear",)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules="all-linear" if all_linear else list(lora.target_modules),
        exclude_modules=rf"({'|'.join(map(re.escape, unused))})(\..*)?" if unused else None,
        bias="none",
    )
    # Collected first, because get_peft_model wraps some layers before it fails.
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        adapted = get_peft_model(model, config, revision=vars(model).get("hub_commit"))
    except ValueError as error:
        reason = first_line(error).rstrip(".")
        if "lora_dropout" in reason:  # of experts
            raise ConfigError(
                f"--lora_dropout {lora.lora_dropout:g} cannot be applied to experts that are stored as one tensor",
                try_this="--lora_dropout 0, or --target_modules with layers outside the experts",
            ) from None
        raise ConfigError(
            f"--target_modules {' '.join(lora.target_modules)}: {reason}",
            try_this=f"all-linear, or some of {', '.join(sorted(linear))}",
        ) from None
    # Two layers that share a weight cannot both have adapters, because only one adapter can be merged into a weight.
    seen: dict[int, str] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer) and not name.endswith(".base_layer"):  # adapters of experts are nested
            weight = id(next(module.get_base_layer().parameters()))
            if seen.setdefault(weight, name) != name:
                raise ConfigError(
                    f"--target_modules {' '.join(lora.target_modules)}: {seen[weight]} and {name} share their weights,"
                    " so their adapters could not be merged",
                    try_this="other --target_modules, or --lora_rank 0",
                )
    return adapted


def recompute_activations(model: nn.Module, *, reentrant: bool) -> None:
    """Enable gradient checkpointing: store only each layer's input, and recompute the rest in the backward pass."""
    module: Any = model  # a Transformers or PEFT model
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _from_pretrained(
    auto_class: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    config: PretrainedConfig,
    name: str,
    loading: LoadingFlags,
    device: torch.device,
    packing: bool,
    *,
    defer: bool = False,
    **more: Any,
) -> tuple[PreTrainedModel, Collection[str]]:
    """Load a model with the precision, attention and kernels that the flags request.

    Return the model and the names of the tensors missing in its checkpoint. `more` is passed to `from_pretrained`.
    """
    attention, line = choose_attention(loading.attn_implementation, device, packing)
    if line:
        say(line)
    dtype = choose_dtype(loading.param_dtype, device)
    if attention != loading.attn_implementation:  # not the user's explicit choice
        classes: Any = auto_class._model_mapping  # config class -> model class
        attention = fitting_attention(attention, classes.get(type(config), None), config)
    options = {"config": config, "dtype": dtype, "attn_implementation": attention} | more
    if loading.experts_implementation and number_of_experts(config):  # a run may also load dense models
        options["experts_implementation"] = loading.experts_implementation
    if loading.load_in_4bit:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        options["device_map"] = {"": device}
    try:
        source = find_source(name, loading)
        load = partial(auto_class.from_pretrained, **source, output_loading_info=True, **options)
        shell = load_shell(load, source) if defer else None
        if defer and shell is None:
            say(f"{name} is loaded as a whole in each process, because its files differ from the model in memory")
        model, report = shell or load()
    except KeyError as error:  # some classes have their own table of attention implementations
        raise ConfigError(
            f"cannot load the model {name}: it has no attention implementation {error}",
            try_this="--attn_implementation eager",
        ) from None
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise cannot_load("model", name, error) from None
    if isinstance(loading, ModelFlags) and vars(model).get("is_loaded_in_4bit"):
        # Keep 4-bit weights in the layout that supports a backward pass on CPUs. With AVX512-BF16, bitsandbytes would
        # permanently repack them for inference at the first forward in eval mode, and its kernel for that layout
        # does not propagate gradients.
        from bitsandbytes.nn import Linear4bit

        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = False
    vars(model)["hub_commit"] = model_commit(name)  # read when the config of an adapter is saved
    if uses_liger(loading, model.config.model_type, device):
        apply_liger(model)
    return model, report["missing_keys"]
