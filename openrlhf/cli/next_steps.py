"""The commands that a user may want after training, for the last line of a training command."""

import shlex
from importlib.util import find_spec

from openrlhf.config.commands import PRMConfig, RMConfig, TrainingConfig


def next_steps(config: TrainingConfig) -> str:
    """Return a line with commands that work on the results of this run, with the packages that are installed."""
    model = shlex.quote(config.checkpoints.save_path)
    has_server = all(find_spec(package) for package in ("fastapi", "uvicorn"))
    look = f"openrlhf view {shlex.quote(config.run.run_dir or config.checkpoints.save_path)}"
    commands = [look if has_server else f"{look} --export report.html"]
    is_reward_model = isinstance(config, RMConfig)
    if config.lora.lora_rank:  # the folder holds an adapter, which other commands do not load
        base, merged = shlex.quote(str(config.model.pretrain)), shlex.quote(f"{config.checkpoints.save_path}_merged")
        merge = f"openrlhf lora_combiner --model_path {base} --lora_path {model} --output_path {merged}"
        commands.append(f"{merge} --is_rm" if is_reward_model else merge)
    elif is_reward_model and has_server:
        commands.append(f"openrlhf serve_rm --reward_pretrain {model}")
    elif not isinstance(config, RMConfig | PRMConfig):
        commands.append(f"openrlhf interactive_chat --pretrain {model}")
    return f"next: {', or '.join(commands)}"
