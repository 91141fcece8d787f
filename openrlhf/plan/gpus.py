"""GPUs and the machines that hold them, from the makers' data sheets.

`memory` is what PyTorch can allocate, a little less than the sheet says. Links are in one direction, in GB/s, and
`host` is the speed of copies between GPU and pinned host memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from openrlhf.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True)
class GPU:
    """Figures of a GPU that a plan depends on."""

    name: str
    memory: float  # bytes
    teraflops: float  # dense bf16 matrix products
    bandwidth: float  # GB/s of its memory
    link: float  # GB/s to another GPU of its node, in one direction
    host: float  # GB/s to host memory, in practice


# The first entry whose name is a word of the device's name applies. The A100 has 40 or 80 GB; some names say which.
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("B200", 178.4 * GIB, 2250.0, 8000, link=900, host=50),
        GPU("H200", 139.8 * GIB, 989.0, 4800, link=450, host=37),
        GPU("H100", 79.1 * GIB, 989.0, 3350, link=450, host=37),
        GPU("H800", 79.1 * GIB, 989.0, 3350, link=200, host=37),
        GPU("GH200", 94.5 * GIB, 989.0, 4000, link=450, host=200),
        GPU("A100-80", 79.1 * GIB, 312.0, 2039, link=300, host=20),
        GPU("A100-40", 39.4 * GIB, 312.0, 1555, link=300, host=20),
        GPU("A800", 79.1 * GIB, 312.0, 2039, link=200, host=20),
        GPU("L40S", 44.4 * GIB, 362.0, 864, link=25, host=20),
        GPU("L4", 22.0 * GIB, 121.0, 300, link=25, host=20),
        GPU("A10", 22.1 * GIB, 125.0, 600, link=25, host=20),
        GPU("A40", 44.4 * GIB, 150.0, 696, link=25, host=20),
        GPU("4090", 23.5 * GIB, 165.0, 1008, link=20, host=20),
        GPU("3090", 23.6 * GIB, 71.0, 936, link=20, host=20),
        GPU("T4", 14.6 * GIB, 65.0, 320, link=12, host=10),  # fp16, since it has no bf16
    )
}


@dataclass(frozen=True)
class Machine:
    """The devices of a run: equal GPUs on equal nodes, or the CPU."""

    gpu: GPU | None  # None: everything runs on the CPU
    per_node: int = 1
    nodes: int = 1
    host_memory: float | None = None  # bytes per node; None if unknown
    network: float = 50.0  # GB/s between two nodes, in one direction

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes

    def __str__(self) -> str:
        if self.gpu is None:
            return "the CPU"
        each = f"{self.per_node} x {self.gpu.name}"
        return each if self.nodes == 1 else f"{self.nodes} nodes of {each}"


def find_gpu(device_name: str, memory: float | None = None) -> GPU | None:
    """Return a GPU by its name, such as `NVIDIA A100-SXM4-80GB`; None if it is not known.

    `memory` is the size that its driver reports, in bytes.
    """
    words = re.split(r"[ \-]", device_name)
    found = next((gpu for name, gpu in GPUS.items() if name.partition("-")[0] in words), None)
    if found is None:
        return None
    if "H100" in words and "PCIe" in words:  # the slower of the two H100s
        found = replace(found, name="H100 PCIe", teraflops=756.0, bandwidth=2000.0, link=25.0)
    if found.name.startswith("A100") and ("40GB" in words or (memory or found.memory) < 60 * GIB):
        found = GPUS["A100-40"]
    return found if memory is None else replace(found, memory=memory)


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None if it is not known."""
    found = find_gpu(device_name)
    return None if found is None else 1e12 * found.teraflops


def parse_gpus(text: str) -> tuple[int, GPU]:
    """Read the value of --gpus, `8xH100` or `H100`: the GPUs of a node."""
    found = re.fullmatch(r"(?:(\d+)\s*[xX*])?\s*(.+)", text.strip())
    count, name = found.groups() if found else (None, text)
    name = name.strip().upper().removeprefix("NVIDIA ").removeprefix("RTX").strip(" -_")
    known = {key.upper(): gpu for key, gpu in GPUS.items()} | {"A100": GPUS["A100-80"]}
    if name.removesuffix("GB") not in known or count == "0":
        raise ConfigError(f"--gpus {text}: expected a number and a GPU", try_this=f"8xH100; known: {', '.join(GPUS)}")
    return int(count or 1), known[name.removesuffix("GB")]
