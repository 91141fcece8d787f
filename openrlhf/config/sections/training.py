"""Flags for training: batches, optimizer, sharding, checkpoints and logs.

The training backends receive `OptimizerFlags`, with the learning rate as a separate argument, because reinforcement
learning has one learning rate for the policy and one for the critic.
"""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import BELOW_ONE, NOT_NEGATIVE, POSITIVE, POSITIVE_OR_MINUS_ONE, SEED, SHARE, Range, flag

Backend = Literal["auto", "local", "deepspeed", "fsdp"]
ZERO_STAGE = Range("0, 1, 2 or 3", lambda value: value in (0, 1, 2, 3))


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Batches"""

    train_batch_size: int = flag(128, "Samples per optimizer step, over all devices.", POSITIVE, essential=True)
    micro_train_batch_size: int = flag(
        8, "Samples per device in one forward and backward pass.", POSITIVE, essential=True
    )
    max_epochs: int = flag(1, "Passes over the data (in RL: over each rollout).", POSITIVE, essential=True)
    max_steps: int | None = flag(None, "Stop after this many optimizer steps (in RL: rollouts).", POSITIVE)
    packing_samples: bool = flag(False, "Concatenate samples instead of padding them.", essential=True)
    seed: int = flag(42, "Random seed.", SEED)
    full_determinism: bool = flag(False, "Use deterministic kernels, which are slower.")


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer"""

    optim: Literal["adam", "muon"] = flag(
        "adam", "Optimizer; muon updates the matrices, and adam the other parameters."
    )
    lr_scheduler: str = flag("cosine_with_min_lr", "Learning rate scheduler, by its Transformers name.")
    lr_warmup_ratio: float = flag(0.03, "Fraction of the steps used for warm-up.", SHARE)
    min_lr_ratio: float = flag(0.1, "Final fraction of the peak learning rate, for *_with_min_lr schedulers.", SHARE)
    l2: float = flag(0.0, "Weight decay; biases and norms are exempt.", NOT_NEGATIVE)
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "Adam's betas.", BELOW_ONE)
    adam_eps: float = flag(1e-8, "Adam's epsilon.", POSITIVE)
    max_norm: float = flag(1.0, "Maximum global norm of the gradient; 0 disables clipping.", NOT_NEGATIVE)
    muon_lr: float = flag(0.02, "Muon's learning rate for matrices.", NOT_NEGATIVE)
    muon_momentum: float = flag(0.95, "Muon's momentum.", BELOW_ONE)
    muon_ns_steps: int = flag(5, "Muon's Newton-Schulz steps.", POSITIVE)
    muon_nesterov: bool = flag(True, "Use Nesterov momentum in Muon.")


@dataclass(frozen=True, kw_only=True)
class SupervisedOptimizerFlags(OptimizerFlags):
    """Optimizer"""

    learning_rate: float = flag(5e-6, "Peak learning rate.", NOT_NEGATIVE, essential=True)


@dataclass(frozen=True, kw_only=True)
class ShardingFlags:
    """Memory and parallelism"""

    backend: Backend = flag(
        "auto",
        "Library that trains: plain PyTorch in one process (local), DeepSpeed, or PyTorch's FSDP2; auto chooses local "
        "for one process and DeepSpeed for several.",
    )
    zero_stage: int = flag(2, "DeepSpeed ZeRO stage, 0 to 3.", ZERO_STAGE)
    zpg: int = flag(1, "Size of the secondary partition (ZeRO++ hpZ), usually the devices per node.", POSITIVE)
    adam_offload: bool = flag(False, "Keep the optimizer states on the CPU and run the optimizer step there.")
    overlap_comm: bool = flag(False, "Reduce gradients during the backward pass.")
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None, "Dtype in which gradients are accumulated (default: fp32 for bf16 weights under ZeRO)."
    )
    gradient_checkpointing: bool = flag(False, "Recompute activations in the backward pass.", essential=True)
    gradient_checkpointing_use_reentrant: bool = flag(
        False, "Use the reentrant variant of gradient checkpointing.", needs="gradient_checkpointing"
    )
    deepcompile: bool | None = flag(
        None,
        "Compile the decoder layers; with DeepSpeed, this needs --zero_stage 0 to 2 (default: in one process on a GPU, "
        "if the rest of the run is long enough to pay for it).",
    )
    ds_tensor_parallel_size: int = flag(1, "Tensor-parallel degree of training.", POSITIVE)
    expert_parallel_size: int = flag(
        1, "Devices across which the experts of a mixture of experts are split; needs --backend fsdp.", POSITIVE
    )
    ring_attn_size: int = flag(1, "Devices that share one sequence through ring attention.", POSITIVE)
    ring_head_stride: int = flag(1, "Key heads per ring pass; must divide the number of key heads.", POSITIVE)
    local_rank: int = flag(-1, "Set by the launcher.")


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints"""

    save_path: str = flag("./ckpt", "Folder for the finished model.", essential=True)
    ckpt_path: str = flag("./ckpt/checkpoints", "Folder for checkpoints that a run can resume from.")
    save_steps: int = flag(
        -1, "Write a checkpoint every N steps; -1 means never.", POSITIVE_OR_MINUS_ONE, essential=True
    )
    save_hf_ckpt: bool = flag(False, "With each checkpoint, also write a model folder that Transformers can load.")
    disable_ds_ckpt: bool = flag(False, "Do not write resumable checkpoints.")
    max_ckpt_num: int = flag(3, "Maximum number of checkpoints to keep.", POSITIVE)
    max_ckpt_mem: float = flag(100_000_000, "Maximum total size of checkpoints in GiB.", POSITIVE)
    load_checkpoint: bool = flag(False, "Resume from the newest checkpoint in --ckpt_path, if there is one.")
    use_ds_universal_ckpt: bool = flag(
        False, "Resume from a universal checkpoint, which works with any number of devices."
    )


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """Logs"""

    logging_steps: int = flag(1, "Log every N steps.", POSITIVE)
    eval_steps: int = flag(-1, "Evaluate every N steps; -1 means once per epoch (in RL: never).", POSITIVE_OR_MINUS_ONE)
    use_tensorboard: str | None = flag(None, "Folder for TensorBoard logs.")
    use_wandb: str | None = flag(
        None, "Weights & Biases API key, or True if you are already logged in.", essential=True
    )
    use_trackio: str | None = flag(None, "Trackio project to log to, on this machine.")
    wandb_org: str | None = flag(None, "Weights & Biases entity.", needs="use_wandb")
    wandb_group: str | None = flag(None, "Weights & Biases group.", needs="use_wandb")
    wandb_project: str = flag("openrlhf_train_sft", "Weights & Biases project.", needs="use_wandb")
    wandb_run_name: str = flag("sft_%s", "Name of the run; %s is replaced by the start time.")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """This run"""

    run_dir: str | None = flag(None, "Folder for config, metrics and rollouts (default: a folder in --save_path).")
    skip_memory_check: bool = flag(False, "Start even if the run is predicted not to fit into memory.")
    dry_run: bool = flag(
        False,
        "Check the flags, test the data and the reward on the first 8 rows, and exit without loading models.",
        essential=True,
    )
