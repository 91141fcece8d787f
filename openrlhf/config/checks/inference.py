"""Rules of generation, scoring, chat, serving and merging."""

from ipaddress import ip_address
from pathlib import Path

from openrlhf.config.checks.paths import must_be_writable, must_keep
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import BatchInferenceConfig, ChatConfig, LoraCombinerConfig, ServeRMConfig
from openrlhf.config.sections.data import split_names
from openrlhf.errors import ConfigError


def post_processors_need_rewards(config: BatchInferenceConfig) -> None:
    """Allow post-processors only with --eval_task rm, which computes the rewards that they compare."""
    processor = config.task.post_processor
    if processor not in (None, "null") and config.task.eval_task != "rm":
        raise ConfigError(
            f"--post_processor {processor} needs rewards, which --eval_task {config.task.eval_task} does not compute"
        )


def reward_template_has_its_placeholders(config: BatchInferenceConfig) -> None:
    """Require both placeholders; otherwise rows would lose their prompt or their reward."""
    template = config.task.reward_template
    if template is not None and not ("{input}" in template and "{reward}" in template):
        raise ConfigError(f"--reward_template {template!r} must contain {{input}} and {{reward}}")


def rows_go_to_a_file(config: BatchInferenceConfig) -> None:
    """Check that the output path is writable before hours of generation, and that it is not the dataset."""
    output = Path(str(config.task.output_path)).expanduser()
    if output.is_dir():
        raise ConfigError(
            f"--output_path {output} is a folder, but rows are written to a file",
            try_this=f"--output_path {output}/rows.jsonl",
        )
    must_be_writable("output_path", str(output.parent))
    if output.resolve() in [Path(name).expanduser().resolve() for name in split_names(config.data.dataset)]:
        raise ConfigError(
            f"--output_path {output} is the dataset itself, which would be overwritten",
            try_this="another --output_path",
        )


def engines_on_ray_are_vllm(config: BatchInferenceConfig) -> None:
    """Allow --vllm_num_engines only with vLLM and without a launcher: one process starts all engines."""
    task = config.task
    if task.vllm_num_engines is None:
        return
    if task.eval_task != "generate_vllm":
        raise ConfigError(
            f"--vllm_num_engines starts vLLM engines on Ray, but --eval_task {task.eval_task} does not use vLLM",
            try_this="--eval_task generate_vllm",
        )
    if world_size() > 1:
        raise ConfigError(
            f"--vllm_num_engines {task.vllm_num_engines} starts all engines from one process, but a launcher "
            f"started {world_size()} processes",
            try_this="the same command without the launcher, or without --vllm_num_engines",
        )


def other_machines_need_a_key(config: ServeRMConfig) -> None:
    """Require a key for a server that other machines can reach."""
    host = config.server.host
    if not (is_loopback(host) or config.server.api_key):
        raise ConfigError(
            f"--host {host} is reachable from other machines, but no API key is set",
            try_this="OPENRLHF_RM_API_KEY=$(openssl rand -hex 16) in the environment of server and trainer",
        )


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a host name
        return host == "localhost"


def a_chat_begins_once(config: ChatConfig) -> None:
    """Reject --system_prompt without a chat template or together with --ta_prompt, which also starts the chat."""
    if config.template.system_prompt is None:
        return
    if not config.template.apply_chat_template:
        raise ConfigError(
            "--system_prompt needs a chat template",
            try_this="--apply_chat_template, or --ta_prompt FILE",
        )
    if config.chat.ta_prompt is not None:
        raise ConfigError("--ta_prompt and --system_prompt both start the conversation; give only one of them")


def merging_keeps_its_sources(config: LoraCombinerConfig) -> None:
    """Reject an output path that would overwrite the base model or the adapter."""
    output = Path(str(config.merge.output_path)).expanduser()
    if output.is_file():
        raise ConfigError(f"--output_path {output} is a file, but a model is written to a folder")
    must_keep(str(output), "model_path", config.merge.model_path, try_this="./merged")
    must_keep(str(output), "lora_path", config.merge.lora_path, try_this="./merged")
