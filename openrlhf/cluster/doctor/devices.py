"""The GPUs: memory, precision and connections, and why PyTorch may not see an installed one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from openrlhf.cluster.doctor.findings import Diagnosis, size
from openrlhf.config.checks.extras import install_command
from openrlhf.errors import first_line

AREA = "Devices"
LITTLE = 0.5  # share of a GPU's memory that should be free at the start of a run


def device_findings() -> Iterator[Diagnosis]:
    """Yield one finding for the build of PyTorch and one for each GPU."""
    try:
        import torch
    except ImportError as error:
        yield Diagnosis(AREA, "PyTorch", f"cannot be imported: {error}", "broken", install_command())
        return
    except OSError as error:  # a library of the CUDA build is missing
        reinstall = "pip install --force-reinstall torch"
        yield Diagnosis(AREA, "PyTorch", f"cannot load its libraries: {first_line(error)}", "broken", reinstall)
        return
    built_for = torch.version.cuda or torch.version.hip
    build = f"built for {'CUDA' if torch.version.cuda else 'ROCm'} {built_for}" if built_for else "CPU build"
    if torch.cuda.is_available():
        yield Diagnosis(AREA, "PyTorch", build)
        yield from gpu_findings(torch)
    elif Path("/proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi"):  # there is a driver
        fix = "nvidia-smi, then update the driver or install a PyTorch for an older CUDA"
        if not built_for:
            fix = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        yield Diagnosis(AREA, "PyTorch", f"{build}, which does not see the GPU of this machine", "warning", fix)
    else:
        yield Diagnosis(AREA, "PyTorch", build)
        yield Diagnosis(AREA, "GPU", "none: everything runs on the CPU, in fp32; good for trying things out", "note")


def gpu_findings(torch: ModuleType) -> Iterator[Diagnosis]:
    """Yield one finding for each GPU, and one for the connections between them."""
    count = torch.cuda.device_count()
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        try:
            free, total = torch.cuda.mem_get_info(number)  # opens a context on the GPU
        except RuntimeError as error:
            value = f"{properties.name}, which cannot be used: {first_line(error)}"
            yield Diagnosis(AREA, f"GPU {number}", value, "warning", "nvidia-smi shows its state and its processes")
            continue
        half = "bf16" if properties.major >= 8 else "no bf16"
        value = (
            f"{properties.name}, {size(free)} of {size(total)} free, {half}, sm_{properties.major}{properties.minor}"
        )
        if properties.major < 8:
            fix = "--param_dtype fp16: this GPU is too old for bf16"
            yield Diagnosis(AREA, f"GPU {number}", value, "warning", fix)
        elif free < LITTLE * total:
            yield Diagnosis(AREA, f"GPU {number}", value, "warning", "nvidia-smi shows which processes use its memory")
        else:
            yield Diagnosis(AREA, f"GPU {number}", value)
    if count > 1:
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        linked = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        value = f"{linked} of {len(pairs)} pairs can access each other's memory"
        yield Diagnosis(AREA, "peer access", value, "ok" if linked == len(pairs) else "note")
