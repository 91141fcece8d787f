"""Model FLOPs utilization (MFU): the share of the device's peak that the forward and backward passes of a step reach.

`TrainBackend` counts each step with the formulas of `plan/flops.py`. The peak is the dense bf16 figure in the maker's
data sheet (`plan/gpus.py`), which no program reaches: large matrix products on an H200 reach 80% of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from openrlhf.models.forward import Network
from openrlhf.plan.flops import MatrixSizes, StepSize, step_flops
from openrlhf.plan.gpus import peak_flops
from openrlhf.types import Batch


class UtilizationMeter:
    """Counter of the FLOPs and seconds of one optimizer step in one process."""

    def __init__(self, network: Network, device: torch.device) -> None:
        half = network.dtype in (torch.bfloat16, torch.float16)  # the peak is that of half precision
        name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
        self.network = network
        self.peak = peak_flops(name)
        self.sizes = MatrixSizes.of(network) if self.peak else None
        self.began, self.flops = 0.0, 0.0

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """Start the clock of a step; the micro-batches are still in host memory."""
        if self.sizes is None:
            return
        steps = [StepSize.of(self.network, batch) for batch in micro_batches if not batch.filler]
        self.flops = sum(step_flops(self.sizes, step) for step in steps)
        self.began = time.perf_counter()

    def read(self, processes: int = 1) -> dict[str, float]:
        """Return `mfu` for the logs, right after the update; empty if the peak is not known.

        `processes` share the work on the micro-batches, in a ring or by tensor parallelism.
        """
        if self.peak is None:
            return {}
        return {"mfu": self.flops / processes / (time.perf_counter() - self.began) / self.peak}
