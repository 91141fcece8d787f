"""A network with plain tensors as arguments and results, for libraries whose hooks ignore tensors in dataclasses.

DeepSpeed and FSDP find the tensors that need gradients in the arguments and results of a module. Both backends wrap
their network in a `TensorModule`, and objectives call it through `run_by`, which translates to and from dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from openrlhf.models.chunks import Head
from openrlhf.models.forward import Network, Outputs, Requested, Teacher
from openrlhf.training.backend import Run
from openrlhf.types import Batch


class TensorModule(nn.Module):
    """A network that takes the fields of a `Batch` and returns those of its outputs.

    A teacher's head is a function, so it is set as an attribute before the call.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.config = network.decoder.config  # AutoTP reads the model's tensor-parallel plan from it
        self.teacher_head: Head | None = None

    def forward(
        self,
        *,
        kind: type[Outputs],
        temperature: float | Tensor,
        teacher_hidden: Tensor | None,
        **batch: Any,  # the fields of a `Batch`
    ) -> dict[str, Tensor]:
        head = self.teacher_head
        teacher = None if teacher_hidden is None or head is None else Teacher(teacher_hidden, head)
        outputs = self.network(Batch(**batch), kind, temperature=temperature, teacher=teacher)
        found = {name: value for name, value in vars(outputs).items() if value is not None}
        # FSDP's hook on a result would be lost if the result were a view that is then changed in place.
        return {name: value.clone() if value._is_view() else value for name, value in found.items()}

    def run_by(self, call: Callable[..., dict[str, Tensor]]) -> Run:
        """Return the callable that an objective runs; `call` is this module, or the engine that wraps it."""

        def run(
            batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
        ) -> Requested:
            self.teacher_head = None if teacher is None else teacher.head
            hidden = None if teacher is None else teacher.hidden
            given = {field.name: getattr(batch, field.name) for field in fields(Batch)}
            return kind(**call(kind=kind, temperature=temperature, teacher_hidden=hidden, **given))

        return run
