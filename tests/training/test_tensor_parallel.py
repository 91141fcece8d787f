"""Models that cannot be divided are rejected before anything is loaded."""

import pytest

from openrlhf.errors import ConfigError
from openrlhf.training.tensor_parallel import check_plan
from tests.tiny import CONFIGS


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite"])
def test_most_families_have_a_plan(kind):
    check_plan(CONFIGS[kind](), kind, 2)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("gpt2", 2, "2: a-model cannot be split, because Transformers has no tensor-parallel plan for gpt2"),
        ("mixtral", 2, "its tensor-parallel plan divides some layers as moe_tp_experts, packed_colwise"),
        ("llama", 4, "4 does not divide the 2 key heads of a-model"),
    ],
)
def test_models_that_cannot_be_split_are_rejected(kind, size, message):
    with pytest.raises(ConfigError, match=f"--ds_tensor_parallel_size .*{message}") as error:
        check_plan(CONFIGS[kind](), "a-model", size)
    assert "--ds_tensor_parallel_size 1" in str(error.value)
