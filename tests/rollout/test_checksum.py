import pytest
import torch

from openrlhf.rollout.checksum import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_one_changed_element_is_noticed(dtype):
    tensor = torch.arange(1000).reshape(10, 100).to(dtype)
    other = tensor.clone()
    other[7, 3] += 4
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(other)


def test_swapped_elements_are_noticed():
    tensor = torch.randn(64)
    assert checksum(tensor) != checksum(tensor.flip(0))


def test_the_layout_in_memory_does_not_matter():
    tensor = torch.randn(8, 16)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor)
