"""A check that every trainable parameter actually learns, run during the first optimizer steps of each backend.

A parameter without a gradient stops the run with an error. Gradients of exactly zero, and fp32 weights that do not
move despite a gradient, are reported as one line each. Backends call `begin` and `end` around each optimizer step;
after `STEPS` audited steps, the audit reports its findings and removes its hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from openrlhf.errors import BackendError
from openrlhf.monitor import say, shown_count
from openrlhf.training.optim import Named

STEPS = 3  # audited steps; steps with a learning rate of 0 do not count
TRAINABLE = "trainable parameters"
NAMES = 4  # parameter names listed per message
# The parameters of one expert have no gradient until a token is routed to it, so a missing gradient is not an error.
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
Master = Callable[[nn.Parameter], Tensor | None]  # the fp32 weights of a parameter, or this rank's shard of them


class Audit:
    """Check gradients as they are produced, before they are sharded or freed, and check that the fp32 masters move.

    `most` returns the elementwise maximum over processes, because a rank with only filler micro-batches has only zero
    gradients.
    """

    def __init__(self, named: Sequence[Named], master: Master, most: Callable[[Tensor], Tensor]) -> None:
        self.named = list(named)
        self.master = master
        self.most = most
        self.steps = 0  # steps audited so far
        self.audited = False  # whether the current step counts
        self.has_signal = True  # whether this rank has anything to learn in the current step
        self.nonzero: dict[int, Tensor] = {}  # index of a parameter -> whether its gradient is nonzero in this step
        self.before: list[Tensor | None] = []  # fingerprints of the masters before the step
        # [4, parameters], true if in any audited step and on any rank: it has a gradient, the gradient is nonzero, it
        # has a master, the master moved.
        self.ever = torch.zeros(4, len(self.named), dtype=torch.bool)
        self.hooks = [
            parameter.register_hook(partial(self.see, number)) for number, (_, parameter) in enumerate(self.named)
        ]

    def see(self, number: int, gradient: Tensor) -> None:
        """Record whether a gradient is nonzero. Called by a hook per micro-batch, or by the backend before the step."""
        found = gradient.detach().any()
        seen = self.nonzero.get(number)
        self.nonzero[number] = found if seen is None else seen | found

    def begin(self, learning_rate: float, *, has_signal: bool = True) -> None:
        """Fingerprint the masters; call before the optimizer step.

        If no rank has anything to learn in this step, all gradients are zero by design, and the step does not count.
        """
        self.audited = bool(self.hooks) and learning_rate > 0
        self.has_signal = has_signal
        if self.audited:
            self.before = self._fingerprints()

    def end(self, *, moved: bool = True) -> None:
        """Record the step; call after the step, with `moved=False` if it was skipped because gradients overflowed."""
        if self.audited and moved:
            happened = torch.zeros(5, len(self.named))  # rows as in `ever`, then one for `has_signal`
            happened[4] = self.has_signal
            for number, nonzero in self.nonzero.items():
                happened[0, number] = 1.0
                happened[1, number] = nonzero
            for number, (before, after) in enumerate(zip(self.before, self._fingerprints(), strict=True)):
                if before is not None and after is not None:
                    happened[2, number] = 1.0
                    happened[3, number] = before != after
            *seen, has_signal = self.most(happened).bool()
            if has_signal.all():
                self.ever |= torch.stack(seen)
                self.steps += 1
        self.nonzero.clear()
        self.before = []
        if self.steps == STEPS and self.hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            self._conclude()

    @torch.no_grad()
    def _fingerprints(self) -> list[Tensor | None]:
        """Sum the bits of each master as integers: an update changes the sum, and no copy has to be kept."""
        masters = [self.master(parameter) for _, parameter in self.named]
        return [None if one is None else one.detach().view(torch.int32).sum(dtype=torch.int64) for one in masters]

    def _conclude(self) -> None:
        """Raise an error for parameters without a gradient, and print the other findings."""
        received, nonzero, has_master, moved = self.ever  # [parameters] each
        names = [name for name, _ in self.named]
        unused = [name for name, seen in zip(names, received, strict=True) if not seen and not ONE_EXPERT.search(name)]
        if unused:
            raise BackendError(
                f"{some_of(unused, len(names), TRAINABLE)} received no gradient in {STEPS} steps: the loss does not"
                " depend on them",
                try_this="another model, or freeze the unused parameters",
            )
        for which, finding in (
            (~nonzero, f"had gradients of exactly zero in the first {STEPS} steps"),
            (nonzero & has_master & ~moved, f"had gradients, but their fp32 weights did not change in {STEPS} steps"),
        ):
            found = [name for name, chosen in zip(names, which, strict=True) if chosen]
            if found:
                say(f"{some_of(found, len(names), TRAINABLE)} {finding}")


def some_of(names: Sequence[str], total: int, what: str) -> str:
    """Return the number of parameters and the names of the first few."""
    shown = ", ".join(name.removeprefix("model.") for name in names[:NAMES])
    more = ", ..." if len(names) > NAMES else ""
    return f"{len(names)} of {total} {what} ({shown}{more})"


def report_trained(network: nn.Module, role: str) -> None:
    """Print how many parameters are trained, such as `training 1.22M of 135M parameters (0.9%)`."""
    sizes = [(num_values(parameter), parameter.requires_grad) for parameter in network.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
    part = f"all {shown_count(total)} parameters"
    if trained < total:
        part = f"{shown_count(trained)} of {shown_count(total)} parameters ({100 * trained / total:.2g}%)"
    say(f"training {part} of the {role}")


def num_values(parameter: nn.Parameter) -> int:
    """Return the size of a parameter that may be sharded by ZeRO-3 or packed, two 4-bit values to a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return quantised.shape.numel() if quantised is not None else getattr(parameter, "ds_numel", parameter.numel())


def report_frozen(network: nn.Module) -> None:
    """Print which parameters are frozen; without adapters that is rarely intended, and the audit skips them."""
    named = list(network.named_parameters())
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if frozen:
        say(f"{some_of(frozen, len(named), 'parameters')} are frozen and will not be trained")
