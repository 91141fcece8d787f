"""Flags against the architecture of the models, of which only config.json exists."""

import pytest

from openrlhf.config.commands import RLConfig, RMConfig, SFTConfig
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError
from openrlhf.training.preflight import check_engines, check_models
from tests.tiny import CONFIGS


@pytest.fixture
def check(tmp_path):
    def run(family, flags):
        CONFIGS[family]().save_pretrained(tmp_path)
        given = f"--pretrain {tmp_path} --prompt_data x --runtime ray --vllm_num_engines 1 {flags}"
        check_engines(parse(RLConfig, given.split(), environ={}))

    return run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--vllm_tensor_parallel_size 6",
            "6 does not divide the 4 attention heads.*Try: .*_size 2",
        ),
        ("--vllm_pipeline_parallel_size 3", "3 is more than the 2 layers.*Try: --vllm_pipeline_parallel_size 2"),
        ("--vllm_tensor_parallel_size 2 --vllm_enable_expert_parallel", "divides experts, but .* has none"),
    ],
)
def test_engines_that_the_model_cannot_be_divided_over_are_rejected(check, flags, message):
    with pytest.raises(ConfigError, match=message):
        check("llama", flags)


def test_engines_that_fit_the_model_are_accepted(check):
    sizes = "--vllm_tensor_parallel_size 4 --vllm_pipeline_parallel_size 2"
    check("llama", sizes)
    check("qwen3_moe", f"{sizes} --vllm_enable_expert_parallel")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (RMConfig, "--dataset x"),
        (RLConfig, "--prompt_data x --advantage_estimator gae"),
        (RLConfig, "--prompt_data x --advantage_estimator gae --reward_pretrain {} --pretrain x"),
    ],
)
def test_a_family_without_a_scalar_head_is_rejected(tmp_path, command, flags):
    CONFIGS["cohere"]().save_pretrained(tmp_path)
    given = f"--pretrain {tmp_path} {flags.format(tmp_path)}"
    with pytest.raises(ConfigError, match=r"no sequence classifier for the family cohere\. Try: a model of another"):
        check_models(parse(command, given.split(), environ={}))


@pytest.mark.parametrize(
    ("command", "flags"),
    [(SFTConfig, "--dataset x"), (RLConfig, "--prompt_data x --advantage_estimator group_norm")],
)
def test_runs_without_a_scalar_head_take_every_family(tmp_path, command, flags):
    CONFIGS["cohere"]().save_pretrained(tmp_path)
    check_models(parse(command, f"--pretrain {tmp_path} {flags}".split(), environ={}))
