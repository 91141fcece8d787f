"""Ring attention over several processes equals attention in one process, forward and backward."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import LlamaConfig, Qwen3NextConfig

from openrlhf.config.sections.training import ShardingFlags
from openrlhf.errors import ConfigError
from openrlhf.models.ring import Share, check_ring
from tests.models.ring_scenes import SCENES, Scene
from tests.tiny import CONFIGS
from tests.warm import warm_python

pytestmark = pytest.mark.slow(seconds=1)
ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 300  # seconds: a watchdog for a hang
SIZES = (2, 3)
PARTS = ("query", "key", "value")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Run all scenes, in a ring of two and in a ring of three."""
    folder = tmp_path_factory.mktemp("ring")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [*launcher, "--no-python", *warm_python(), "-m", "tests.models.ring_scenes", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def full_attention(scene: Scene) -> dict[str, torch.Tensor]:
    """Compute the same with PyTorch's own attention and a mask over the whole row."""
    *leaves, gradient = scene.tensors()
    leaves = [part.requires_grad_() for part in leaves]
    places = torch.arange(len(gradient))
    numbers = torch.bucketize(places, torch.tensor(scene.bounds[1:]), right=True)
    back = places[:, None] - places
    visible = (numbers[:, None] == numbers) & (back >= 0) & (back < (scene.window or len(places)))
    query, key, value = (part.transpose(0, 1)[None] for part in leaves)
    output = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scene.scale, enable_gqa=True)[
        0
    ].transpose(0, 1)
    output.backward(gradient)
    return {"output": output.detach()} | dict(zip(PARTS, (leaf.grad for leaf in leaves), strict=True))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENES)
def test_a_ring_computes_what_one_process_computes(name, size, played):
    found = load_file(played / f"{size} {name}.safetensors")
    for part, expected in full_attention(SCENES[name]).items():
        assert_close(found[part], expected, rtol=0, atol=2e-6, msg=lambda text, part=part: f"{part}: {text}")


def pairs_of(share: Share, window: int | None) -> list[tuple[int, int]]:
    """Return (query, key) pairs of places in the row, from the blocks of this process's queries with all processes."""
    rows = [share.starts(index) for index in range(share.ring.size)]
    places = [[*range(a, a + share.chunk), *range(b, b + share.chunk)] for a, b in rows]
    found = []
    for source in range(share.ring.size):
        for block in share.blocks(source, window):
            queries, keys = places[share.ring.index][block.queries], places[source][block.keys]
            bounds = zip(pairwise(block.query_bounds), pairwise(block.key_bounds), strict=True)
            for (a, b), (c, d) in bounds:
                found += [(q, k) for q in queries[a:b] for k in keys[c:d] if 0 <= q - k < (window or 10**9)]
    return found


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bounds", [(0, 48), (0, 5, 22, 23, 32, 52, 55), (0, 1), (0, 7, 9, 40)])
def test_every_pair_is_in_one_block(bounds, size, window):
    shares = [Share.of(bounds, SimpleNamespace(index=index, size=size)) for index in range(size)]
    found = sorted(pair for share in shares for pair in pairs_of(share, window))
    sequences = pairwise(shares[0].bounds)
    seen = ((q, k) for a, b in sequences for q in range(a, b) for k in range(a, q + 1) if q - k < (window or 99))
    expected = sorted(seen)
    assert found == expected


def test_every_process_of_a_ring_has_the_same_amount_of_work():
    shares = [Share.of((0, 64), SimpleNamespace(index=index, size=4)) for index in range(4)]
    assert {len(pairs_of(share, None)) for share in shares} == {64 * 65 // 2 // 4}


def test_the_head_stride_must_divide_the_key_heads():
    config = CONFIGS["llama"](num_attention_heads=8, num_key_value_heads=4)
    check_ring(config, ShardingFlags(ring_attn_size=2, ring_head_stride=4))
    with pytest.raises(ConfigError, match="--ring_head_stride 3 does not divide the model's 4 key heads") as error:
        check_ring(config, ShardingFlags(ring_attn_size=2, ring_head_stride=3))
    assert error.value.try_this == "--ring_head_stride 4"
    with pytest.raises(ConfigError, match="--ring_head_stride 4 does not divide the model's 2 key heads"):
        check_ring(config, ShardingFlags(ring_attn_size=2, ring_head_stride=4, ds_tensor_parallel_size=2))


REFUSED = {
    "linear_attention layers": Qwen3NextConfig(num_hidden_layers=4),
    "caps its attention scores": CONFIGS["gemma2"](),
    "dynamic rotary": LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_layers_that_need_the_whole_sequence_are_rejected(words):
    with pytest.raises(ConfigError, match=words):
        check_ring(REFUSED[words], ShardingFlags(ring_attn_size=2))


def test_layers_with_a_sliding_window_are_accepted():
    check_ring(CONFIGS["gemma3"](), ShardingFlags(ring_attn_size=2))
