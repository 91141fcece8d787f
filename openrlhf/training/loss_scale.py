"""Dynamic loss scaling for fp16, used by the local backend (DeepSpeed has its own).

The smallest positive fp16 number is 6e-8, and gradients of a mean over many tokens fall below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.errors import BackendError
from openrlhf.monitor import say

INITIAL = 65536.0
LEAST = 1.0
GROWTH_INTERVAL = 2000  # applied steps in a row before the scale doubles


class LossScale:
    """Factor on the loss: halved when gradients overflow, doubled after many steps without (as torch's GradScaler).

    It is always a power of two, so that scaling and unscaling are exact.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self.applied = 0  # steps since the scale last changed
        self.skipped = 0  # steps skipped in the whole run

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step; `overflowed` means it was skipped because a gradient was not finite."""
        if not overflowed:
            self.applied += 1
            if self.applied == GROWTH_INTERVAL:
                self.value, self.applied = self.value * 2, 0
            return
        if self.value <= LEAST:
            raise BackendError(
                f"gradients are not finite in fp16, even with a loss scale of {self.value:g}; nothing was changed",
                try_this="--param_dtype bf16, or a smaller learning rate",
            )
        lower = self.value / 2
        say(f"an optimizer step was skipped: gradients overflow with a loss scale of {self.value:g}, now {lower:g}")
        self.value, self.applied, self.skipped = lower, 0, self.skipped + 1

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.value, "skipped_steps": float(self.skipped)}

    def state(self) -> Tensor:
        return torch.tensor([self.value, self.applied, self.skipped], dtype=torch.float64)

    def load_state(self, saved: Tensor) -> None:
        value, applied, skipped = saved.tolist()
        self.value, self.applied, self.skipped = value, int(applied), int(skipped)
