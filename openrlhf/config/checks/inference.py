"""Rules of generation, scoring, chat, serving and merging."""

from openrlhf.config.checks.common import needed_flag
from openrlhf.config.commands import BatchInferenceConfig, LoraCombinerConfig, ServeRMConfig
from openrlhf.errors import ConfigError


def a_task_is_given(config: BatchInferenceConfig) -> None:
    needed_flag(config, "eval_task", "generate")
    needed_flag(config, "dataset", "./prompts.jsonl")
    needed_flag(config, "output_path", "./out.jsonl")


def post_processors_need_rewards(config: BatchInferenceConfig) -> None:
    processor = config.task.post_processor
    if processor not in (None, "null") and config.task.eval_task != "rm":
        raise ConfigError(
            f"--post_processor {processor} sorts by reward, which --eval_task {config.task.eval_task} does not give"
        )


def reward_template_has_its_places(config: BatchInferenceConfig) -> None:
    template = config.task.reward_template
    if template is not None and not ("{input}" in template and "{reward}" in template):
        raise ConfigError(f"--reward_template {template!r} must hold {{input}} and {{reward}}")


def a_reward_model_is_given(config: ServeRMConfig) -> None:
    needed_flag(config, "reward_pretrain", "./reward_model")


def merge_folders_are_given(config: LoraCombinerConfig) -> None:
    needed_flag(config, "model_path", "./base")
    needed_flag(config, "lora_path", "./adapter")
    needed_flag(config, "output_path", "./merged")
