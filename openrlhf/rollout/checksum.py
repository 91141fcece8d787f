"""A number for the bytes of a tensor, the same on every device: did what was sent arrive?"""

import torch
from torch import Tensor

PRIME = 1_000_003  # weighs places, so that swapped elements are noticed


def checksum(tensor: Tensor) -> int:
    """Of the bits of each element and where it stands; sums wrap around, so their order does not matter."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])
    total = 0
    for start in range(0, bits.numel(), 1 << 24):  # in pieces: an int64 copy of an embedding would be large
        piece = bits[start : start + (1 << 24)].long()
        places = torch.arange(start, start + piece.numel(), device=piece.device) % PRIME
        total += int((piece * (places + 1)).sum())
    return total & 0xFFFF_FFFF_FFFF_FFFF
