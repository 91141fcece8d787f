"""One process of a ring: attention over its share of rows, forward and backward; the first saves the results."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from openrlhf.models import blocks
from openrlhf.models.blocks import Scoring
from openrlhf.models.ring import Ring, Share
from openrlhf.models.ring_attention import ring_attention

HEADS, KEY_HEADS, DIM = 4, 2, 8


@dataclass(frozen=True)
class Scene:
    """A packed row, by the lengths of its sequences."""

    lengths: tuple[int, ...]
    window: int | None = None
    head_stride: int = 1
    scale: float = DIM**-0.5

    @property
    def bounds(self) -> list[int]:
        return [sum(self.lengths[:number]) for number in range(len(self.lengths) + 1)]

    def tensors(self) -> list[Tensor]:
        """Queries, keys, values and a gradient of the output: [tokens, heads, dim]."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
        return [torch.randn(sum(self.lengths), number, DIM, generator=generator) for number in heads]


SCENES = {
    "one sequence over everyone": Scene((48,)),
    "uneven ones, some over a boundary": Scene((5, 17, 1, 9, 20, 3)),
    "filled up": Scene((23, 8), head_stride=2),
    "shorter than the ring": Scene((1, 2)),
    "window": Scene((31, 9, 25), window=6),
    "window within a chunk": Scene((60,), window=3, head_stride=2),
    "wide window": Scene((60,), window=40, scale=0.5),
}


def play(scene: Scene, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return outputs and gradients of all tokens, joined from the shares of all processes."""
    ring = Ring(group, dist.get_rank(group), dist.get_world_size(group), scene.head_stride)
    share = Share.of(scene.bounds, ring)
    whole = scene.tensors()
    places = torch.arange(len(whole[0]))
    numbers = share.held(places)
    fill = share.bounds[-1] - len(places)
    query, key, value, gradient = (
        share.cut(torch.cat([part, part.new_zeros(fill, *part.shape[1:])])) for part in whole
    )
    leaves = [part.requires_grad_() for part in (query, key, value)]
    output = ring_attention(*leaves, share, Scoring(scene.scale, scene.window))
    output.backward(gradient)
    found = {"output": output.detach()} | {
        name: leaf.grad for name, leaf in zip(("query", "key", "value"), leaves, strict=True)
    }
    here = share.local(places[numbers])
    return {name: share.join(part[here], numbers, len(places)) for name, part in found.items()}


def main(folder: Path) -> None:
    """Run every scene in a ring of three processes, then in a ring of two of them."""
    dist.init_process_group("gloo")
    two = dist.new_group([1, 0])
    blocks.TILE = 4  # sequences here are short
    for size, group in ((3, dist.group.WORLD), (2, two)):
        for name, scene in SCENES.items():
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                found = play(scene, group)
                if dist.get_rank() == 0:
                    save_file(found, folder / f"{size} {name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
