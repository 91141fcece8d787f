import pytest
import torch
from torch import nn
from torch.testing import assert_close

from openrlhf.errors import ConfigError
from openrlhf.models.attention import SEGMENTED, choose_attention, kernel_options, segmented_attention
from openrlhf.models.ring import Ring, Share

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "packing", "chosen", "line"),
    [
        ("auto", CPU, False, "sdpa", None),
        ("auto", CPU, True, SEGMENTED, None),
        ("auto", CUDA, False, SEGMENTED, None),
        ("auto", CUDA, True, SEGMENTED, None),
        ("eager", CUDA, True, "eager", None),
        ("sdpa", CPU, True, "sdpa", None),
        ("sdpa", CPU, False, "sdpa", None),
        (
            "flash_attention_2",
            CPU,
            False,
            "sdpa",
            "--attn_implementation flash_attention_2: there is no GPU, so SDPA is used instead",
        ),
        (
            "flash_attention_2",
            CPU,
            True,
            SEGMENTED,
            "--attn_implementation flash_attention_2: there is no GPU, so SDPA is used instead",
        ),
        (
            "flash_attention_3",
            CUDA,
            False,
            SEGMENTED,
            "--attn_implementation flash_attention_3: flash_attn_interface is not installed, so PyTorch's varlen kernel"
            " is used instead",
        ),
    ],
)
def test_the_attention_chosen_and_the_line_printed(asked, device, packing, chosen, line):
    assert choose_attention(asked, device, packing) == (chosen, line)


def naive(query, key, value, window):
    """softmax(q k^T / sqrt(d)) v over the last `window` tokens, written out for one head: [tokens, dim]."""
    places = torch.arange(len(query))
    hidden = (places[:, None] < places) | (places[:, None] - places >= window)
    scores = (query @ key.T / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("window", [None, 3, 1])
def test_each_segment_attends_to_itself(window):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    bounds = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    mixed, _ = segmented_attention(
        nn.Identity(), query, key, value, None, sliding_window=window, cu_seq_lens_q=bounds, max_length_q=5
    )
    for head in range(4):
        for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
            one = [tensor[0, place, part] for tensor, place in ((query, head), (key, head // 2), (value, head // 2))]
            assert_close(mixed[0, part, head], naive(*one, window or 99))


def test_sinks_are_rejected_with_a_remedy_that_works():
    tokens, bounds = torch.randn(1, 2, 4, 8), torch.tensor([0, 4], dtype=torch.int32)
    more = {"s_aux": torch.zeros(2), "cu_seq_lens_q": bounds, "max_length_q": 4}
    with pytest.raises(ConfigError, match="attention score caps or sinks") as alone:
        segmented_attention(nn.Identity(), tokens, tokens, tokens, None, **more)
    assert alone.value.try_this == "--attn_implementation eager"
    share = Share.of([0, 4], Ring(None, index=0, size=2))
    with pytest.raises(ConfigError, match="attention score caps or sinks") as shared:
        segmented_attention(nn.Identity(), tokens, tokens, tokens, None, share=share, **more)
    assert shared.value.try_this == "--ring_attn_size 1 --attn_implementation eager"


def test_the_kernels_arguments_in_each_release():
    before, now = {"scale", "window_size"}, {"scale", "window_size", "enable_gqa"}
    assert kernel_options(None, before) == {"window_size": (-1, 0)}
    assert kernel_options(None, now) == {"window_size": (-1, 0), "enable_gqa": True}
    assert kernel_options(4, now) == {"window_size": (3, 0), "enable_gqa": True}  # a token sees itself and three more
    assert kernel_options(None, {"is_causal"}) == {"is_causal": True}
    with pytest.raises(ConfigError, match="does not support sliding windows"):
        kernel_options(4, {"is_causal"})
