"""Grouped attention: the results of SDPA on repeated keys and values, without the copies."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from openrlhf.models import grouped_attention as grouped

ROWS, KEY_HEADS, GROUPS, COLUMNS, DIM = 3, 2, 4, 7, 8


class Layer(nn.Module):
    num_key_value_groups = GROUPS
    is_causal = True


def states(tokens):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, KEY_HEADS * GROUPS, tokens, DIM, generator=generator)
    key, value = torch.randn(2, ROWS, KEY_HEADS, COLUMNS, DIM, generator=generator).unbind()
    visible = torch.arange(COLUMNS) >= torch.tensor([[0], [2], [5]])  # left-padded rows
    return query, key, value, visible[:, None, None].expand(-1, -1, tokens, -1)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_results_are_those_of_repeated_keys(tokens, masked, per_head):
    query, key, value, mask = states(tokens)
    if per_head:
        mask = mask.repeat(1, KEY_HEADS * GROUPS, 1, 1)
        mask[:, 0, :, -2] = False  # one head sees less
    mask = mask if masked else None
    got, _ = grouped.grouped_attention(Layer(), query, key, value, mask, scaling=0.3, dropout=0.0)
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    assert got.shape == (ROWS, tokens, KEY_HEADS * GROUPS, DIM)
    assert torch.allclose(got, expected, atol=1e-6)


def test_a_decoding_step_reads_the_cache_itself(monkeypatch):
    query, key, value, mask = states(1)
    given = []
    real = grouped.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        given.extend((key, value))
        return real(query, key, value, **options)

    monkeypatch.setattr(grouped, "scaled_dot_product_attention", recorded)
    grouped.grouped_attention(Layer(), query, key, value, mask)
    assert [tensor.data_ptr() for tensor in given] == [key.data_ptr(), value.data_ptr()]
