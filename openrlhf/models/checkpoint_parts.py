"""Which tensors of a checkpoint make up each parameter of a model in memory.

Transformers may rename and join tensors while it loads them: the matrices of all experts of a layer are separate in a
checkpoint, and one tensor in memory. Saving undoes this. `checkpoint_parts` runs that conversion on small tensors of
consecutive numbers in place of the parameters, and finds out where each number ends up:

    experts.gate_up_proj [experts, 2 x width, hidden]  ->  experts.0.gate_proj.weight = block [0, 0 : width]
                                                           experts.0.up_proj.weight   = block [0, width : 2 x width]

The conversions only stack, split and rename, so they treat small and large tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.models.agreement import FAILURES

SIDE = 4  # size of a dimension of a small tensor; conversions split a dimension into two or three parts at most


class CheckpointPart(NamedTuple):
    """A tensor of a checkpoint, and the block of a parameter that it fills."""

    name: str
    block: tuple[slice, ...]
    shape: tuple[int, ...]  # shape of the tensor in the checkpoint


def checkpoint_parts(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[CheckpointPart]] | None:
    """Return the parts of each parameter, given their shapes in memory; None if one is not made up of blocks."""
    small = {name: _small_shape(shape) for name, shape in shapes.items()}
    sizes = [math.prod(shape) for shape in small.values()]
    starts = dict(zip(small, accumulate(sizes, initial=0), strict=False))
    numbers = dict(zip(small, torch.arange(sum(sizes)).split(sizes), strict=True))
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))  # the parameter of each number
    try:
        saved = revert_weight_conversion(model, {name: numbers[name].view(shape) for name, shape in small.items()})
    except FAILURES:  # a conversion that depends on the sizes of the model
        return None
    found: dict[str, list[CheckpointPart]] = {name: [] for name in small}
    names = list(small)
    for saved_name, tensor in saved.items():
        name = names[int(owners[int(tensor.flatten()[0])])]
        part = _find_block(saved_name, tensor - starts[name], small[name], shapes[name])
        if part is None:
            return None
        found[name].append(part)
    for name, parts in found.items():
        if sum(math.prod(part.shape) for part in parts) != math.prod(shapes[name]):
            return None
    return found


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a small shape for a parameter; the first of three dimensions numbers experts, so its size is kept."""
    small = [SIDE if size % SIDE == 0 else size for size in shape]
    return (shape[0], *small[1:]) if len(shape) > 2 else tuple(small)


def _find_block(name: str, numbers: Tensor, small: tuple[int, ...], shape: Sequence[int]) -> CheckpointPart | None:
    """Return the block of a parameter that a checkpoint tensor fills, from the numbers in its small version."""
    if not small:  # a parameter with a single number
        return CheckpointPart(name, (), ())
    whole = torch.arange(math.prod(small)).view(small)
    first, last = (torch.unravel_index(numbers.flatten()[place], small) for place in (0, -1))
    block = tuple(slice(int(start), int(end) + 1) for start, end in zip(first, last, strict=True))
    expected = whole[block]
    if expected.numel() != numbers.numel() or not torch.equal(expected.reshape(numbers.shape), numbers):
        return None
    factors = [size // little for size, little in zip(shape, small, strict=True)]
    scaled = tuple(slice(one.start * by, one.stop * by) for one, by in zip(block, factors, strict=True))
    sizes = [one.stop - one.start for one in scaled]
    return CheckpointPart(name, scaled, tuple(sizes[len(sizes) - numbers.ndim :]))
