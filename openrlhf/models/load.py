"""Loading of models and tokenizers from folders or hubs: precision, attention, adapters, 4-bit, recomputation.

The builders of `training`, `rl` and `inference` call it. It loads a decoder with a vocabulary head or a scalar head,
and rejects checkpoints that Transformers would complete with random weights.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
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

from openrlhf.config.checks.paths import looks_local
from openrlhf.config.sections.model import LoadingFlags, LoraFlags, ModelFlags
from openrlhf.errors import ConfigError
from openrlhf.models.attention import choose_attention, fitting_attention
from openrlhf.models.heads import SCALAR_HEAD, init_scalar_head
from openrlhf.models.liger import apply_liger, uses_liger
from openrlhf.models.unused import freeze_unused
from openrlhf.monitor import say

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Return the requested dtype, but fp32 on a CPU, on which half precision is many times slower."""
    return torch.float32 if device.type == "cpu" else DTYPES[asked]


def load_tokenizer(name: str, loading: LoadingFlags) -> PreTrainedTokenizerBase:
    """Load a tokenizer; if it has no pad token, EOS becomes its pad token."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            _resolve(name, loading),
            trust_remote_code=loading.trust_remote_code,
        )
    except (OSError, ValueError, TypeError) as error:
        raise _cannot_load("tokenizer", name, error) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no EOS token, so nothing can end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_config(name: str, loading: LoadingFlags) -> PretrainedConfig:
    """Read a model's config.json, without its weights."""
    try:
        return AutoConfig.from_pretrained(_resolve(name, loading), trust_remote_code=loading.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", name, error) from None


def usable_length(name: str, config: PretrainedConfig, asked: int) -> int:
    """Return --max_len or, if that is less, the number of positions that the model supports."""
    known = known_positions(config) or asked
    if known < asked:
        say(f"--max_len {asked} is more than the {known} positions that {name} knows: {known} is used")
    return min(known, asked)


def known_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions a model supports, whatever its family calls the setting; None: no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_causal_lm(name: str, loading: LoadingFlags, *, device: torch.device, packing: bool) -> PreTrainedModel:
    """Load a decoder with its vocabulary head, on the CPU unless it is quantised; the backend moves it."""
    options = _options(name, loading, device, packing, MODEL_FOR_CAUSAL_LM_MAPPING)
    model, report = _from_pretrained(AutoModelForCausalLM, name, loading, options | {"output_loading_info": True})
    keep_training_layout(model, loading)
    _refuse_lacking(name, report["missing_keys"], "a language model; one that train_rm saved has no vocabulary head")
    if uses_liger(loading, model.config.model_type, device):
        apply_liger(model)
    return model


def load_scalar_model(
    name: str, loading: LoadingFlags, *, device: torch.device, packing: bool, head_prefix: str, new_head: bool = False
) -> PreTrainedModel:
    """Load a decoder with a scalar head: a saved reward model or, if `new_head`, any language model.

    A new head starts near zero (see `init_scalar_head`).
    """
    options = _options(name, loading, device, packing, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    _refuse_family_without_classifier(name, options["config"], loading)
    options["config"].num_labels = 1
    saved_prefix = options["config"].to_dict().get("value_head_prefix", head_prefix)
    if saved_prefix != SCALAR_HEAD:
        options["key_mapping"] = {rf"^{saved_prefix}\.": f"{SCALAR_HEAD}."}
    with _without_load_report():
        model, report = _from_pretrained(
            AutoModelForSequenceClassification, name, loading, options | {"output_loading_info": True}
        )
    keep_training_layout(model, loading)
    if not hasattr(model, SCALAR_HEAD):
        raise ConfigError(
            f"{type(model).__name__} has no head called {SCALAR_HEAD}, so it cannot be a reward model here"
        )
    missing = report["missing_keys"]
    _refuse_lacking(name, [key for key in missing if not key.startswith(f"{SCALAR_HEAD}.")])
    if missing and not new_head:
        raise ConfigError(
            f"{name} holds no weights for a scalar head called {saved_prefix}, so its rewards would be noise",
            try_this="a folder that train_rm saved, or --value_head_prefix with the head's name",
        )
    if missing:
        init_scalar_head(model)
    if uses_liger(loading, model.config.model_type, device):
        apply_liger(model)
    return model


def _refuse_family_without_classifier(name: str, config: PretrainedConfig, loading: LoadingFlags) -> None:
    """Reject a family without a sequence classifier, in Transformers or in the model's folder."""
    known = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not known and not (loading.trust_remote_code and "auto_map" in config.to_dict()):
        raise ConfigError(
            f"{name} cannot be a reward model or critic: Transformers has no sequence classifier for the family"
            f" {config.model_type}",
            try_this="a model of another family, or an algorithm without a critic",
        )


def keep_training_layout(model: nn.Module, loading: LoadingFlags) -> None:
    """Keep the 4-bit weights of training commands in the layout that has a backward pass on CPUs.

    On CPUs with AVX512-BF16, bitsandbytes repacks them for inference at the first forward in eval mode and never back.
    Its kernel for that layout passes no gradient to the layers below.
    """
    if not (isinstance(loading, ModelFlags) and vars(model).get("is_loaded_in_4bit")):
        return
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _refuse_lacking(name: str, lacking: Collection[str], try_this: str | None = None) -> None:
    """Reject a checkpoint that lacks tensors: Transformers would initialise them at random and continue."""
    if lacking:
        raise ConfigError(
            f"the weights of {name} lack {len(lacking)} of the model's tensors, such as {min(lacking)}",
            try_this=try_this,
        )


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence Transformers' report about a new and a dropped head: both are intended, and anything else is an error."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def add_adapters(model: PreTrainedModel, lora: LoraFlags, *, scalar: bool) -> nn.Module:
    """Wrap the model in LoRA, or return it as it is at rank 0; modules that text does not train are frozen."""
    unused = freeze_unused(model)
    if lora.lora_rank == 0:
        return model
    from peft import LoraConfig, TaskType, get_peft_model, prepare_model_for_kbit_training

    if vars(model).get("is_loaded_in_4bit"):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    targets: Any = lora.target_modules[0] if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if scalar else TaskType.CAUSAL_LM,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        exclude_modules=rf"({'|'.join(map(re.escape, unused))})(\..*)?" if unused else None,
        bias="none",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"--target_modules {' '.join(lora.target_modules)}: {_first_line(error)}") from None
    _refuse_shared_weights(adapted, lora)
    return adapted


def _refuse_shared_weights(adapted: nn.Module, lora: LoraFlags) -> None:
    """Reject adapters on layers that share a weight: a single weight could not hold both adapters after merging."""
    from peft.tuners.lora import LoraLayer

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


def recompute_activations(model: nn.Module, *, reentrant: bool) -> None:
    """Enable gradient checkpointing: keep a layer's input, and recompute the rest in the backward pass."""
    module: Any = model
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _options(name: str, loading: LoadingFlags, device: torch.device, packing: bool, classes: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`; `classes` maps configs to model classes."""
    attention, line = choose_attention(loading.attn_implementation, device, packing)
    if line:
        say(line)
    dtype = choose_dtype(loading.param_dtype, device)
    config = read_config(name, loading)
    if attention != loading.attn_implementation:  # not the user's explicit choice
        attention = fitting_attention(attention, classes.get(type(config), None), config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "config": config}
    if loading.experts_implementation:
        options["experts_implementation"] = loading.experts_implementation
    if loading.load_in_4bit:
        options |= {"quantization_config": _four_bit(dtype), "device_map": {"": device}}
    return options


def _four_bit(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _from_pretrained(kind: Any, name: str, loading: LoadingFlags, options: dict[str, Any]) -> Any:
    try:
        return kind.from_pretrained(_resolve(name, loading), trust_remote_code=loading.trust_remote_code, **options)
    except KeyError as error:  # some classes look up their attention in a table of their own
        raise ConfigError(
            f"cannot load the model {name}: it has no {error}", try_this="--attn_implementation eager"
        ) from None
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise _cannot_load("model", name, error) from None


def _resolve(name: str, loading: LoadingFlags) -> str:
    """Return a local folder or a hub name; with --use_ms, the folder to which ModelScope downloads the model."""
    folder = Path(name).expanduser()
    if looks_local(name) or folder.is_dir() or not loading.use_ms:
        return str(folder) if looks_local(name) else name
    from modelscope import snapshot_download  # pyrefly: ignore[missing-import]

    return snapshot_download(name)


def _cannot_load(what: str, name: str, error: Exception) -> ConfigError:
    nor_here = "" if Path(name).exists() else f" There is no folder {name} here either."
    return ConfigError(f"cannot load the {what} {name}: {_first_line(error)}{nor_here}")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
