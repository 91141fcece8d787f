"""What a decoder is called with for a batch of sequences, and where its answers belong.

The layout of a call is the network's choice, whatever the layout of the batch, because not every architecture keeps
sequences apart in every layout (`self_test.py` finds out which it does):

    packed         one row, sequences one after another, bounded by cumulative lengths: no padding is computed
    padded         one row per sequence, filled up on the right and masked
    row by row     one call per sequence

Convolutions look a few tokens back, across the boundary of a packed sequence. So each sequence is followed by as many
masked tokens as the widest kernel reaches back: zeros, as at the start of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from openrlhf.types import Batch

CallLayout = Literal["packed", "padded", "row by row"]


@dataclass(frozen=True)
class DecoderCall:
    """One call: its arguments, and which token of the flattened batch each place of the output belongs to."""

    arguments: dict[str, Any]
    batch_places: Tensor | None = None  # [tokens] in the flattened batch; None: every place, in order
    output_places: Tensor | None = None  # [tokens] in the flattened output


def decoder_calls(batch: Batch, layout: CallLayout, gap: int = 0) -> Iterator[DecoderCall]:
    """The calls that together give the hidden states of every token of a batch; `gap` is `convolution_reach`."""
    if layout == "packed":
        yield packed_call(batch, gap)
    elif layout == "padded":
        yield padded_call(batch)
    else:
        yield from single_calls(batch)


def convolution_reach(decoder: nn.Module) -> int:
    """How many tokens back the widest convolution of a decoder looks."""
    kernels = (module.kernel_size[0] for module in decoder.modules() if isinstance(module, nn.Conv1d))
    return max(kernels, default=1) - 1


def packed_call(batch: Batch, gap: int) -> DecoderCall:
    real = batch.sequence_ids >= 0
    ids, positions = batch.input_ids[real], batch.position_ids[real]  # [tokens]
    starts = (positions == 0).nonzero().squeeze(-1)
    total, longest = len(ids), int(batch.position_ids.max()) + 1
    extra: dict[str, Any] = {"attention_mask": None}
    output_places = None
    if gap:
        number = (positions == 0).cumsum(0) - 1  # [tokens]: which sequence each is of
        output_places = torch.arange(total, device=ids.device) + gap * number
        starts = starts + gap * torch.arange(len(starts), device=ids.device)
        total, longest = total + gap * len(starts), longest + gap
        ids, positions = _spaced(ids, output_places, total), _spaced(positions, output_places, total)
        mask = _spaced(torch.ones_like(output_places), output_places, total)
        sequence = torch.bucketize(torch.arange(total, device=ids.device), starts, right=True) - 1
        extra = {"attention_mask": mask[None], "seq_idx": sequence[None].to(torch.int32)}
    bounds = torch.nn.functional.pad(starts, (0, 1), value=total).to(torch.int32)
    arguments = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    batch_places = None if len(batch.input_ids) == 1 else real.flatten().nonzero().squeeze(-1)
    return DecoderCall(arguments | extra, batch_places, output_places)


def _spaced(values: Tensor, places: Tensor, total: int) -> Tensor:
    """[tokens] at their places among [total], zero elsewhere."""
    return values.new_zeros(total).index_put((places,), values)


def padded_call(batch: Batch) -> DecoderCall:
    """Rows as they are if there is one for each sequence; a packed row is cut into its sequences.

    Positions are the model's own affair: some families do not count them from zero.
    """
    real = batch.sequence_ids >= 0
    if len(batch.input_ids) == batch.num_sequences:
        return DecoderCall({"input_ids": batch.input_ids, "attention_mask": real.long()})
    shape = (batch.num_sequences, int(batch.position_ids.max()) + 1)
    places = batch.sequence_ids[real] * shape[1] + batch.position_ids[real]
    total = shape[0] * shape[1]
    arguments = {
        "input_ids": _spaced(batch.input_ids[real], places, total).view(shape),
        "attention_mask": _spaced(torch.ones_like(places), places, total).view(shape),
    }
    return DecoderCall(arguments, real.flatten().nonzero().squeeze(-1), places)


def single_calls(batch: Batch) -> Iterator[DecoderCall]:
    for number in range(batch.num_sequences):
        places = (batch.sequence_ids.flatten() == number).nonzero().squeeze(-1)
        yield DecoderCall({"input_ids": batch.input_ids.flatten()[places][None], "attention_mask": None}, places)
