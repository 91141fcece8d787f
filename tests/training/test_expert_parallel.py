"""Sizes of expert groups are checked against the models before these load. test_fsdp.py trains with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError
from openrlhf.training.preflight import check_models
from tests.commands import as_argv
from tests.tiny import make_model


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("llama", 2, "--expert_parallel_size 2: .* has no experts"),
        ("gpt_oss", 6, "--expert_parallel_size 6 does not divide the 4 experts of .* Try: --expert_parallel_size 2"),
    ],
)
def test_models_without_enough_experts_are_rejected(kind: str, size: int, message: str, tmp_path: Path) -> None:
    flags = {"pretrain": make_model(tmp_path, kind), "dataset": "rows.jsonl", "expert_parallel_size": size}
    with pytest.raises(ConfigError, match=message):
        check_models(parse(COMMANDS["train_sft"], as_argv(flags), environ={}))
