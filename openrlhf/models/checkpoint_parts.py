"""Which tensors of a checkpoint make up each parameter of a model in memory.

Transformers may rename, join and transpose tensors while it loads them: the matrices of all experts of a layer are
separate in a checkpoint, and one tensor in memory. Saving undoes this. `checkpoint_parts` runs that conversion on
tensors of consecutive numbers in place of the parameters, and finds out where each number ends up:

    experts.gate_up_proj [experts, 2 x width, hidden]  ->  experts.0.gate_proj.weight = block [0, 0 : width]
                                                           experts.0.up_proj.weight   = block [0, width : 2 x width]

Most conversions treat small and large tensors alike, so small ones can take the place of large parameters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, permutations
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.models.agreement import FAILURES

SIDE = 4  # size of a dimension of a small tensor; conversions split a dimension into two or three parts at most


class ScatteredTensorError(ValueError):
    """A tensor of a checkpoint is not a block of one parameter; the message is its name."""


class CheckpointPart(NamedTuple):
    """A tensor of a checkpoint, and the block of a parameter that it fills."""

    name: str
    block: tuple[slice, ...]
    order: tuple[int, ...]  # order of the dimensions in the checkpoint
    shape: tuple[int, ...]  # shape of the tensor in the checkpoint

    def is_whole(self, parameter: Tensor) -> bool:
        """Return whether the tensor is the parameter, with its dimensions in the same order."""
        return self.shape == tuple(parameter.shape) and self.order == tuple(range(parameter.ndim))

    def of(self, parameter: Tensor) -> Tensor:
        """Return the block as a view of the parameter, in the shape of the checkpoint."""
        return parameter[self.block].permute(self.order).view(self.shape)


def checkpoint_parts(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]], *, exact: bool = False
) -> dict[str, list[CheckpointPart]]:
    """Return the parts of each parameter, given their shapes in memory; raise if one is not made up of blocks.

    With `exact`, the parameters are not replaced by small ones: a few conversions depend on the sizes of the model.
    """
    small = {name: tuple(shape) if exact else _small_shape(shape) for name, shape in shapes.items()}
    sizes = [math.prod(shape) for shape in small.values()]
    names, starts = list(small), list(accumulate(sizes, initial=0))
    parts = zip(small.items(), torch.arange(sum(sizes)).split(sizes), strict=True)
    numbers = {name: part.view(shape) for (name, shape), part in parts}
    try:
        saved = revert_weight_conversion(model, dict(numbers))
    except FAILURES as error:  # a conversion that depends on the sizes of the model
        raise ScatteredTensorError(f"{min(shapes)}") from error
    found: dict[str, list[CheckpointPart]] = {name: [] for name in small}
    for saved_name, tensor in saved.items():
        place = bisect_right(starts, int(tensor[(0,) * tensor.ndim])) - 1  # the number of the parameter's first element
        name = names[place]
        found[name].append(_find_block(saved_name, tensor, numbers[name], shapes[name], starts[place]))
    for name, own in found.items():
        if sum(math.prod(part.shape) for part in own) != math.prod(shapes[name]):
            raise ScatteredTensorError(name)
    return found


def _small_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a small shape for a parameter; the first of three dimensions numbers experts, so its size is kept."""
    small = [SIDE if size % SIDE == 0 else size for size in shape]
    return (shape[0], *small[1:]) if len(shape) > 2 else tuple(small)


def _find_block(name: str, tensor: Tensor, whole: Tensor, shape: Sequence[int], start: int) -> CheckpointPart:
    """Return the block of a parameter that a checkpoint tensor fills.

    `whole` has the numbers of the parameter, which begin at `start`, in its small version; `shape` is its true shape.
    """
    if not whole.ndim:  # a parameter with a single number
        return CheckpointPart(name, (), (), ())
    corners = (tensor[(place,) * tensor.ndim] - start for place in (0, -1))
    first, last = (torch.unravel_index(corner, whole.shape) for corner in corners)
    block = tuple(slice(int(low), int(high) + 1) for low, high in zip(first, last, strict=True))
    expected = whole[block]
    orders = permutations(range(expected.ndim)) if expected.numel() == tensor.numel() else ()
    order = next((one for one in orders if expected.permute(one).reshape(tensor.shape).equal(tensor)), None)
    if order is None:
        raise ScatteredTensorError(name)
    if whole.shape == tuple(shape):
        return CheckpointPart(name, block, order, tuple(tensor.shape))
    factors = [size // little for size, little in zip(shape, whole.shape, strict=True)]
    scaled = tuple(slice(one.start * by, one.stop * by) for one, by in zip(block, factors, strict=True))
    sizes = [scaled[place].stop - scaled[place].start for place in order]
    return CheckpointPart(name, scaled, order, tuple(sizes[len(sizes) - tensor.ndim :]))
