"""The table of flags that have no effect in some runs, and why; see `lines`."""

from openrlhf.config.commands import COMMANDS, RLConfig
from openrlhf.config.flags import flag_values, flags_of
from openrlhf.config.no_effect.cluster import CLUSTER
from openrlhf.config.no_effect.inference import INFERENCE
from openrlhf.config.no_effect.lines import NoEffect, always, rows
from openrlhf.config.no_effect.rl import RL
from openrlhf.config.no_effect.training import ALWAYS, TRAINING


def unmet_need(need: tuple[str, ...]) -> NoEffect:
    """Make the row for the flags whose declaration names the flags in `need`."""
    dependents = {
        kind: [item.name for item in flags_of(kind).values() if item.needed == need] for kind in COMMANDS.values()
    }
    return NoEffect(
        flags=tuple(dict.fromkeys(name for names in dependents.values() for name in names)),
        why=f"without {' or '.join(f'--{name}' for name in need)}",
        kinds=tuple(kind for kind, names in dependents.items() if names),
        when=lambda config: not any(flag_values(config)[name] for name in need),
    )


NEEDS = dict.fromkeys(item.needed for kind in COMMANDS.values() for item in flags_of(kind).values() if item.needed)
# Only the first reason is reported. Unmet needs come last, because setting the needed flag would not help if another
# reason applies.
TABLE = (*ALWAYS, *TRAINING, *RL, *CLUSTER, *INFERENCE, *map(unmet_need, NEEDS))

# Reasons that depend on the device or on the kinds of reward models, which are known only after a run has started.

ON_CPU = rows(
    object,
    ("ref_offload ref_reward_offload teacher_offload", "on a CPU, where everything is in host memory", always),
    ("use_liger_kernel", "on a CPU: its kernels need a GPU", always),
    ("vllm_enable_expert_parallel", "on a CPU: vLLM cannot divide experts there", always),
    ("deepspeed_enable_sleep", "on a CPU, where there is no device memory to free", always),
)
NO_PROCESS_REWARDS = "without a process reward model in --reward_pretrain"
WITHOUT_STEPS = rows(RLConfig, ("step_rewards prm_reduce", NO_PROCESS_REWARDS, always))
STEPS_ONLY = rows(RLConfig, ("normalize_reward", "on process reward models, whose scores are probabilities", always))
