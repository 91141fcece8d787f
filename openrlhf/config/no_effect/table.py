"""The table of flags that have no effect in some runs, and why; see `lines`."""

from openrlhf.config.commands import RLConfig
from openrlhf.config.no_effect.cluster import CLUSTER
from openrlhf.config.no_effect.inference import INFERENCE
from openrlhf.config.no_effect.lines import idle
from openrlhf.config.no_effect.rl import LOSSES, REWARDS, ROLLOUT
from openrlhf.config.no_effect.training import ALWAYS, TEMPLATES, TRAINING

TABLE = (*ALWAYS, *TRAINING, *TEMPLATES, *ROLLOUT, *REWARDS, *LOSSES, *CLUSTER, *INFERENCE)

# Reasons known only once a run has started: its device, and the kinds of its reward models.

ON_CPU = (
    idle("ref_offload ref_reward_offload teacher_offload", "on a CPU, where everything is in host memory"),
    idle("use_liger_kernel", "on a CPU: its kernels need a GPU"),
    idle("deepspeed_enable_sleep", "on a CPU, where there is no device memory to give back"),
)
WITHOUT_STEPS = (idle("step_rewards prm_reduce", "without a process reward model in --reward_pretrain", RLConfig),)
STEPS_ONLY = (idle("normalize_reward", "on process reward models, which give probabilities", RLConfig),)
