"""A checksum of a tensor's bytes that is the same on every device, to check that weights arrived unchanged.

To verify a weight sync, the sender and each engine compute one checksum per tensor, and `sync_proof` compares them.
"""

import torch
from torch import Tensor

PRIME = 1_000_003  # elements are weighted by their position modulo this, so that swapping two elements changes the sum


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of each element's bits and position.

    Integer sums wrap around, so the order of summation does not matter.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])
    total = 0
    for start in range(0, bits.numel(), 1 << 24):  # in pieces: an int64 copy of a whole embedding would be large
        piece = bits[start : start + (1 << 24)].long()
        places = torch.arange(start, start + piece.numel(), device=piece.device) % PRIME
        total += int((piece * (places + 1)).sum())
    return total & 0xFFFF_FFFF_FFFF_FFFF
