"""Arguments of the decoder calls for a batch, and the mapping from their outputs to the batch's tokens.

The layout of the calls is independent of the layout of the batch, because not every architecture keeps sequences
separate in every layout (`self_test.py` chooses one that works):

    packed         all sequences in one row, separated by cumulative lengths, without padding
    padded         one row per sequence, padded on the right and masked
    row by row     one call per sequence

A convolution reads a few previous tokens, even across the start of a packed sequence. So each sequence is followed by
as many masked tokens as the widest convolution reads; they act like the zeros at the start of a row. For sequences a
and b and a gap of 2:

    input_ids       a a a . . b b b b . .
    attention_mask  1 1 1 0 0 1 1 1 1 0 0
    seq_idx         0 0 0 0 0 1 1 1 1 1 1
    cu_seq_lens_q   0, 5, 11
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from openrlhf.types import Batch, SharedPrefixes

CallLayout = Literal["packed", "padded", "row by row"]
# Keyword arguments of a decoder's forward; which ones it accepts depends on the model family.
Arguments: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class DecoderCall:
    """Arguments of one decoder call, and the mapping from its output positions to tokens of the flattened batch."""

    arguments: Arguments
    batch_places: Tensor | None = None  # [tokens] in the flattened batch; None: every position, in order
    output_places: Tensor | None = None  # [tokens] in the flattened output; None: every position, in order


def batch_tokens(call: DecoderCall, batch: Batch) -> Tensor:
    """Return, for each position of a call, the place of its token in the flattened batch, or -1 if it has no token."""
    ids = batch.input_ids
    source = torch.arange(ids.numel(), device=ids.device) if call.batch_places is None else call.batch_places
    if call.output_places is None:
        return source
    found = torch.full((call.arguments["input_ids"].numel(),), -1, device=ids.device)
    # A token of a shared prefix has one place in each sequence that begins with it: take the last of these places.
    return found.scatter_reduce(0, call.output_places, source, "amax")


def packed_call(batch: Batch, gap: int) -> DecoderCall:
    """Return one call with all sequences in a single row, each followed by `gap` masked tokens."""
    places = batch.places
    ids, positions = batch.input_ids.flatten()[places.tokens], batch.position_ids.flatten()[places.tokens]  # [tokens]
    starts, total, longest = places.starts, len(ids), places.longest
    extra: Arguments = {"attention_mask": None}
    output_places = None
    if gap:
        number = (positions == 0).cumsum(0) - 1  # [tokens]: index of the sequence
        output_places = torch.arange(total, device=ids.device) + gap * number  # [tokens]
        starts = starts + gap * torch.arange(len(starts), device=ids.device)
        total, longest = total + gap * len(starts), longest + gap
        ids, positions = _spaced(ids, output_places, total), _spaced(positions, output_places, total)
        # ids, positions, mask: [tokens and gaps]
        mask = _spaced(torch.ones_like(output_places), output_places, total)
        sequence = torch.bucketize(torch.arange(total, device=ids.device), starts, right=True) - 1  # [total]
        extra = {"attention_mask": mask[None], "seq_idx": sequence[None].to(torch.int32)}
    bounds = torch.nn.functional.pad(starts, (0, 1), value=total).to(torch.int32)  # [sequences + 1]
    arguments = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    batch_places = None if len(batch.input_ids) == 1 else places.tokens
    return DecoderCall(arguments | extra, batch_places, output_places)


def shared_call(batch: Batch, prefixes: SharedPrefixes) -> DecoderCall:
    """Return one call with all sequences in a single row that holds each shared prefix once."""
    tokens = batch.places.tokens
    kept = tokens[prefixes.kept.long()]  # [row]
    arguments = {
        "input_ids": batch.input_ids.flatten()[kept][None],
        "position_ids": batch.position_ids.flatten()[kept][None],
        "attention_mask": None,
        "cu_seq_lens_q": prefixes.segment_bounds,
        "cu_seq_lens_k": prefixes.segment_bounds,
        "max_length_q": prefixes.longest_segment,
        "max_length_k": prefixes.longest_segment,
        "prefixes": prefixes,
    }
    return DecoderCall(arguments, None if len(batch.input_ids) == 1 else tokens, prefixes.places.long())


def _spaced(values: Tensor, places: Tensor, total: int) -> Tensor:
    """Scatter [tokens] to their positions in [total], zero elsewhere."""
    return values.new_zeros(total).index_put((places,), values)


def padded_call(batch: Batch) -> DecoderCall:
    """Return one call with a row per sequence; a packed row is split into its sequences.

    No position ids are passed, because some model families do not count from zero.
    """
    if len(batch.input_ids) == batch.num_sequences:
        return DecoderCall({"input_ids": batch.input_ids, "attention_mask": (batch.sequence_ids >= 0).long()})
    tokens, shape = batch.places.tokens, (batch.num_sequences, batch.places.longest)
    ids, numbers, positions = (
        tensor.flatten()[tokens] for tensor in (batch.input_ids, batch.sequence_ids, batch.position_ids)
    )
    places = numbers * shape[1] + positions  # [tokens] in the flattened rows
    total = shape[0] * shape[1]
    arguments = {
        "input_ids": _spaced(ids, places, total).view(shape),
        "attention_mask": _spaced(torch.ones_like(places), places, total).view(shape),
    }
    return DecoderCall(arguments, tokens, places)


def single_calls(batch: Batch) -> Iterator[DecoderCall]:
    """Yield one call per sequence, without padding."""
    for number in range(batch.num_sequences):
        places = (batch.sequence_ids.flatten() == number).nonzero().squeeze(-1)
        yield DecoderCall({"input_ids": batch.input_ids.flatten()[places][None], "attention_mask": None}, places)
