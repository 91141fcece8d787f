"""Sizes of expert groups are checked against the models before these load. test_fsdp.py trains with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.training.expert_parallel import modules_to_divide
from openrlhf.training.preflight import check_models
from tests.commands import as_argv
from tests.models.architectures import build
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


def test_experts_that_get_the_tokens_of_each_expert_are_rejected() -> None:
    with pytest.raises(ConfigError, match="cannot divide the experts of Llama4ForCausalLM: Llama4TextExperts does not"):
        modules_to_divide(Network(build("llama4_text")), 2)
    assert modules_to_divide(Network(build("qwen3_moe")), 2)


def test_replay_needs_several_experts_per_token(tmp_path: Path) -> None:
    build("qwen3_moe", num_experts_per_tok=1).config.save_pretrained(tmp_path)
    flags = {"pretrain": tmp_path, "prompt_data": "rows.jsonl", "router_replay": True, "remote_rm_url": "reward.py"}
    with pytest.raises(ConfigError, match=r"--router_replay: .* chooses one expert for each token"):
        check_models(parse(COMMANDS["train_ppo_ray"], as_argv(flags), environ={}))
