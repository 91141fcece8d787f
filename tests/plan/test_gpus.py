"""GPUs by the names of drivers and users."""

import pytest

from openrlhf.errors import ConfigError
from openrlhf.plan.gpus import GIB, GPUS, Machine, find_gpu, parse_gpus


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xH100", 8, "H100"),
        ("H200", 1, "H200"),
        ("2 x A100-40", 2, "A100-40"),
        ("16XA100", 16, "A100-80"),
        ("4x4090", 4, "4090"),
        ("4090", 1, "4090"),
        ("rtx 3090", 1, "3090"),
        ("A100-80GB", 1, "A100-80"),
    ],
)
def test_gpus_as_users_write_them(text, count, name):
    assert parse_gpus(text) == (count, GPUS[name])


@pytest.mark.parametrize("text", ["8xV100", "8x", "0xH100", ""])
def test_unknown_gpus_are_rejected_with_the_known_ones(text):
    with pytest.raises(ConfigError, match=r"expected a number and a GPU.*B200, H200"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("device", "memory", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", None, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", None, "A100-40"),
        ("NVIDIA A100-SXM4", 39 * GIB, "A100-40"),
        ("NVIDIA GeForce RTX 4090", None, "4090"),
        ("NVIDIA H100 PCIe", None, "H100 PCIe"),
        ("NVIDIA L40S", None, "L40S"),
        ("Tesla T4", None, "T4"),
    ],
)
def test_gpus_as_drivers_name_them(device, memory, name):
    assert find_gpu(device, memory).name == name


def test_the_memory_of_the_driver_counts():
    assert find_gpu("NVIDIA H200", 100 * GIB).memory == 100 * GIB
    assert find_gpu("Radeon") is None


def test_a_machine_in_words():
    assert str(Machine(GPUS["H100"], 8, 2)) == "2 nodes of 8 x H100"
    assert str(Machine(None)) == "the CPU"
