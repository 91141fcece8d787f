"""Rows become padded or packed batches with the same tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.data.collate import collate, pack, pad
from openrlhf.types import LabelledRow, PairRow, StepRow, TokenRow


def row(ids, mask):
    return TokenRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


TWO = [row([5, 6, 7], [0, 1, 1]), row([8, 9], [1, 1])]


def test_padding_matches_hand_computation():
    batch = pad(TWO, pad_id=1)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0], [1, 1, -1]]
    assert batch.target_mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.num_sequences == 2
    assert not batch.filler
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.sequence_ids.dtype == torch.int64


def test_packing_matches_hand_computation():
    batch = pack(TWO)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.target_mask.tolist() == [[False, True, True, False, True]]
    assert batch.num_sequences == 2


def rows_of_any_length():
    tokens = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6)
    return st.lists(tokens.map(lambda items: row(*zip(*items, strict=True))), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(rows_of_any_length())
def test_packed_equals_padded_token_for_token(rows):
    packed, padded = pack(rows), pad(rows, pad_id=1)
    real = padded.sequence_ids >= 0
    for name in ("input_ids", "position_ids", "sequence_ids", "target_mask"):
        assert getattr(packed, name)[0].tolist() == getattr(padded, name)[real].tolist()
    assert not packed.target_mask[packed.position_ids == 0].any()
    assert not padded.target_mask[~real].any()


@pytest.mark.parametrize("packing", [False, True])
def test_pairs_become_all_chosen_then_all_rejected_rows(packing):
    pairs = [PairRow(row([5], [0]), row([6], [0]), 0.5), PairRow(row([7], [0]), row([8], [0]))]
    batch = collate(pairs, packing=packing, pad_id=1)
    assert batch.input_ids.flatten().tolist() == [5, 7, 6, 8]
    assert batch.sequence_ids.flatten().tolist() == [0, 1, 2, 3]
    assert batch.num_sequences == 4
    assert batch.margin.tolist() == [0.5, 0.0]


def test_labels_are_collated():
    rows = [LabelledRow(TWO[0], 1, True), LabelledRow(TWO[1], 1, False)]
    batch = collate(rows, packing=False, pad_id=1)
    assert batch.label.tolist() == [True, False]
    assert batch.input_ids.tolist() == pad(TWO, 1).input_ids.tolist()


@pytest.mark.parametrize("packing", [False, True])
def test_step_labels_are_at_their_token_positions(packing):
    rows = [
        StepRow(np.array([5, 6, 7], np.int32), np.array([1, 2], np.int32), np.array([0.25, 1], np.float32)),
        StepRow(np.array([8, 9], np.int32), np.array([1], np.int32), np.array([0], np.float32)),
    ]
    batch = collate(rows, packing=packing, pad_id=1)
    labels = batch.step_labels
    assert labels.shape == batch.input_ids.shape
    assert labels[batch.target_mask].tolist() == [0.25, 1.0, 0.0]
    assert labels[~batch.target_mask].isnan().all()
    assert batch.input_ids[batch.target_mask].tolist() == [6, 7, 9]


@pytest.mark.parametrize("packing", [False, True])
def test_token_rows_are_padded_or_packed(packing):
    want = pack(TWO) if packing else pad(TWO, 1)
    assert collate(TWO, packing=packing, pad_id=1).input_ids.tolist() == want.input_ids.tolist()
