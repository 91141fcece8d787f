"""Train language models from feedback: from the command line (`openrlhf --help`) or from Python (docs/python.md).

The names below are loaded on first use, so that `import openrlhf` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf.api.generation import generate as generate
    from openrlhf.api.result import StepRecord as StepRecord
    from openrlhf.api.result import TrainResult as TrainResult
    from openrlhf.api.training import train_dpo as train_dpo
    from openrlhf.api.training import train_kd as train_kd
    from openrlhf.api.training import train_kto as train_kto
    from openrlhf.api.training import train_ppo as train_ppo
    from openrlhf.api.training import train_prm as train_prm
    from openrlhf.api.training import train_rm as train_rm
    from openrlhf.api.training import train_sft as train_sft
    from openrlhf.monitor import StopTraining as StopTraining

EXPORTS = {
    "openrlhf.api.training": (
        *("train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm", "train_ppo"),
    ),
    "openrlhf.api.generation": ("generate",),
    "openrlhf.api.result": ("StepRecord", "TrainResult"),
    "openrlhf.monitor": ("StopTraining",),
}
__all__ = [name for names in EXPORTS.values() for name in names]


def __getattr__(name: str) -> object:
    for module, names in EXPORTS.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'openrlhf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
