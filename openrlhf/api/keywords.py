"""The keyword arguments of the functions in this package, for editors and type checkers.

A class below has the flags of a command as fields, because it inherits the sections of the command's config, so nothing
is listed twice; a test compares the two. A few keywords accept more from Python than on the command line, and are
declared again. `takes_flags` gives a function the signature of such a class; the classes have no other use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from openrlhf.api.result import OnStep
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of
from openrlhf.config.sections import algorithm, cluster, data, export, model, objectives, rl, training

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
P = ParamSpec("P")
R = TypeVar("R")

Text: TypeAlias = str | PathLike[str]  # a TrainResult is also a PathLike
Row: TypeAlias = Mapping[str, object]


@runtime_checkable
class Table(Protocol):
    """A `datasets.Dataset`, or anything with random access to its rows."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[object]: ...


# Paths or hub names, rows, a table, or a mapping from splits to tables.
Data: TypeAlias = Text | Sequence[Text] | Sequence[Row] | Table | Mapping[str, Table]
Reward: TypeAlias = Text | Callable[[list[str], list[str], list[Any]], object]
Agent: TypeAlias = Text | type | Callable[..., object] | object


@dataclass(frozen=True, kw_only=True)
class TrainingKeywords:
    """Keywords of every training function that extend a flag, or that have no flag."""

    pretrain: Text | None = None
    save_path: Text | None = None
    ckpt_path: Text | None = None
    run_dir: Text | None = None
    eval_dataset: Data | None = None
    config: Text | None = None  # a YAML file with flags
    on_step: OnStep | None = None  # called after each logged step and evaluation


@dataclass(frozen=True, kw_only=True)
class TrainingFlags(
    model.ModelFlags,
    model.LoraFlags,
    training.BatchFlags,
    training.ShardingFlags,
    training.CheckpointFlags,
    training.LogFlags,
    training.RunFlags,
    export.HubFlags,
):
    """Flags of every training command."""


@dataclass(frozen=True, kw_only=True)
class SupervisedKeywords(TrainingKeywords, TrainingFlags, data.DatasetFlags, training.SupervisedOptimizerFlags):
    """Keywords of the functions that train on a dataset."""

    dataset: Data | None = None  # pyrefly: ignore[bad-override] - wider on purpose


@dataclass(frozen=True, kw_only=True)
class SFTKeywords(SupervisedKeywords, data.ConversationFlags, data.TemplateFlags):
    """Keywords of train_sft."""


@dataclass(frozen=True, kw_only=True)
class RMKeywords(
    SupervisedKeywords, data.PairFlags, data.TemplateFlags, objectives.PairwiseRewardFlags, model.ValueHeadFlags
):
    """Keywords of train_rm."""


@dataclass(frozen=True, kw_only=True)
class DPOKeywords(
    SupervisedKeywords, data.PairFlags, data.TemplateFlags, objectives.DirectPreferenceFlags, model.ReferenceFlags
):
    """Keywords of train_dpo."""


@dataclass(frozen=True, kw_only=True)
class KTOKeywords(
    SupervisedKeywords,
    data.LabelledResponseFlags,
    data.TemplateFlags,
    objectives.UnpairedPreferenceFlags,
    model.ReferenceFlags,
):
    """Keywords of train_kto."""


@dataclass(frozen=True, kw_only=True)
class KDKeywords(SupervisedKeywords, data.TeacherResponseFlags, data.TemplateFlags, objectives.DistillationFlags):
    """Keywords of train_kd."""


@dataclass(frozen=True, kw_only=True)
class PRMKeywords(SupervisedKeywords, data.StepFlags):
    """Keywords of train_prm."""


@dataclass(frozen=True, kw_only=True)
class RLKeywords(
    TrainingKeywords,
    TrainingFlags,
    model.ValueHeadFlags,
    rl.PromptFlags,
    data.TemplateFlags,
    rl.RolloutFlags,
    rl.AsyncTrainingFlags,
    rl.RewardFlags,
    algorithm.AdvantageFlags,
    algorithm.KLControlFlags,
    algorithm.PolicyLossFlags,
    algorithm.CriticFlags,
    algorithm.PolicyOptimizerFlags,
    cluster.PlacementFlags,
    cluster.EngineFlags,
):
    """Keywords of train_ppo."""

    prompt_data: Data | None = None  # pyrefly: ignore[bad-override] - wider on purpose
    reward: Reward | None = None  # a function, a .py file or the address of a server
    agent: Agent | None = None  # a class or function, or a .py file


def takes_flags(command: str, keywords: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that takes the flags of a command as keywords.

    Editors and type checkers see the fields of `keywords`. `help` and notebooks see the command's flags, with its
    defaults; those that must be given come first.
    """
    flags = sorted(flags_of(COMMANDS[command]).values(), key=lambda flag: flag.required is None)
    known = {flag.name for flag in flags}
    own = [item for item in fields(cast(Any, keywords)) if item.name not in known]
    parameters = [
        *(inspect.Parameter(flag.name, KEYWORD_ONLY, default=flag.default, annotation=flag.type) for flag in flags),
        *(inspect.Parameter(item.name, KEYWORD_ONLY, default=None, annotation=item.type) for item in own),
    ]
    explained = "\n".join(f"    {flag.name}: {flag.help}" for flag in flags)

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        vars(function)["__signature__"] = inspect.Signature(parameters)
        function.__doc__ = f"{inspect.getdoc(function)}\n\nFlags:\n{explained}\n"
        return function

    return decorate
