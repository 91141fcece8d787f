"""Context managers that temporarily change a loaded model's attention, kernels, precision, adapters or evaluation mode.

The self-test (self_test.py) and the check of decoding strategies (rollout/decoding_check.py) use them to compute
reference results; the Transformers engine generates in `evaluating`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

Kernel = Callable[..., object]


def attention_in(decoder: PreTrainedModel) -> str:
    """Return the name of the attention implementation that a model uses."""
    return str(decoder.config._attn_implementation)


def set_attention(decoder: PreTrainedModel, attention: str) -> None:
    """Set the attention implementation of a loaded model, if the model supports this."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        decoder.set_attn_implementation(attention)
    finally:
        logging.set_verbosity(before)


@contextmanager
def attention_of(decoder: PreTrainedModel, attention: str) -> Iterator[None]:
    """Set the attention implementation of a model, and restore it on exit."""
    before = attention_in(decoder)
    set_attention(decoder, attention)
    try:
        yield
    finally:
        set_attention(decoder, before)


@contextmanager
def evaluating(decoder: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Put a model into evaluation mode with this attention (None: unchanged), and restore both on exit."""
    training = decoder.training
    decoder.eval()
    try:
        with attention_of(decoder, attention or attention_in(decoder)):
            yield
    finally:
        decoder.train(training)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch off the adapters of a PEFT model, so that it computes the same as its base model, and restore on exit."""
    adapted: Any = model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with adapted.disable_adapter():
        for parameter in trained:  # PEFT freezes them, and FSDP derives its dtypes from the trainable parameters
            parameter.requires_grad_(True)
        yield


def kernel_functions(decoder: PreTrainedModel) -> dict[str, Kernel]:
    """Return the functions of a model's Python module that an installed kernel package has replaced."""
    functions = inspect.getmembers(sys.modules[type(decoder).__module__], inspect.isfunction)
    return {
        name: function
        for name, function in functions
        if inspect.getclosurevars(function).nonlocals.get("is_new_implementation")
    }


def use_reference_kernels(decoder: PreTrainedModel) -> dict[str, Kernel]:
    """Make a model's layers run the PyTorch code of Transformers; return the functions that were replaced."""
    replaced = kernel_functions(decoder)
    for name, function in replaced.items():
        setattr(sys.modules[type(decoder).__module__], name, _with_known_arguments(vars(function)["__wrapped__"]))
    return replaced


@contextmanager
def reference_kernels(decoder: PreTrainedModel) -> Iterator[None]:
    """Make a model's layers run the PyTorch code of Transformers, and restore them on exit."""
    replaced = use_reference_kernels(decoder)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(sys.modules[type(decoder).__module__], name, function)


def _with_known_arguments(function: Kernel) -> Kernel:
    """Wrap a kernel so that it ignores unknown arguments, because layers pass every argument to every kernel."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Run a model in fp32; weights are converted one module at a time to save memory."""
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[object, dict[str, object]]:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and parameter not in narrow:
                narrow[parameter] = parameter.data
                parameter.data = parameter.data.float()
        return _widened(args), {name: _widened(value) for name, value in kwargs.items()}

    def narrow_again(module: nn.Module, args: object, output: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in narrow:
                parameter.data = narrow.pop(parameter)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                for handle in (
                    module.register_forward_pre_hook(widen, with_kwargs=True),
                    module.register_forward_hook(narrow_again, always_call=True),
                ):
                    hooks.callback(handle.remove)
        yield


def _widened(value: object) -> object:
    """Convert half-precision tensors in the arguments of a module to fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if type(value) is tuple:
        return tuple(_widened(item) for item in value)
    if type(value) is list:
        return [_widened(item) for item in value]
    if type(value) is dict:
        return {key: _widened(item) for key, item in value.items()}
    return value
