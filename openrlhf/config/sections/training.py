"""Flags about training itself: batches, optimizer, sharding, checkpoints, logs."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Batches"""

    train_batch_size: int = flag(128, "samples per optimizer step, over all devices")
    micro_train_batch_size: int = flag(8, "samples per device per forward and backward")
    max_epochs: int = flag(1, "passes over the data (RL: over each rollout)")
    max_steps: int | None = flag(None, "stop after this many optimizer steps (RL: rollouts)")
    packing_samples: bool = flag(False, "concatenate samples instead of padding them")
    seed: int = flag(42, "seed of every random choice")
    full_determinism: bool = flag(False, "deterministic kernels, slower")


@dataclass(frozen=True, kw_only=True)
class OptimizerFlags:
    """Optimizer"""

    optim: Literal["adam", "muon"] = flag("adam", "muon takes the matrices and leaves the rest to adam")
    lr_scheduler: str = flag("cosine_with_min_lr", "a scheduler that Transformers names")
    lr_warmup_ratio: float = flag(0.03, "share of the steps spent warming up")
    min_lr_ratio: float = flag(0.1, "least learning rate as a share of the peak, for the *_with_min_lr schedulers")
    l2: float = flag(0.0, "weight decay, not on biases and norms")
    adam_betas: tuple[float, float] = flag((0.9, 0.95), "Adam's betas")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    max_norm: float = flag(1.0, "clip the global gradient norm here")
    muon_lr: float = flag(0.02, "Muon's learning rate for matrices")
    muon_momentum: float = flag(0.95, "Muon's momentum")
    muon_ns_steps: int = flag(5, "Muon's Newton-Schulz steps")
    muon_nesterov: bool = flag(True, "Nesterov momentum in Muon")


@dataclass(frozen=True, kw_only=True)
class SupervisedOptimizerFlags(OptimizerFlags):
    """Optimizer"""

    learning_rate: float = flag(5e-6, "peak learning rate")


@dataclass(frozen=True, kw_only=True)
class ShardingFlags:
    """Memory and parallelism"""

    zero_stage: int = flag(2, "DeepSpeed ZeRO stage, 0 to 3")
    zpg: int = flag(1, "ZeRO++ hierarchical partition size")
    adam_offload: bool = flag(False, "optimizer states and step on the CPU")
    overlap_comm: bool = flag(False, "reduce gradients while the backward pass runs")
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(None, "dtype in which gradients are summed")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")
    gradient_checkpointing_use_reentrant: bool = flag(False, "the reentrant form of recomputation")
    deepcompile: bool = flag(False, "compile the decoder layers; with several processes at --zero_stage 0 to 2")
    ds_tensor_parallel_size: int = flag(1, "tensor-parallel degree of training")
    ring_attn_size: int = flag(1, "devices that share one sequence (ring attention)")
    ring_head_stride: int = flag(1, "heads per ring pass; must divide the number of heads")
    local_rank: int = flag(-1, "set by the launcher")


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints"""

    save_path: str = flag("./ckpt", "folder of the finished model")
    ckpt_path: str = flag("./ckpt/checkpoints", "folder of the resumable checkpoints")
    save_steps: int = flag(-1, "checkpoint every N steps; -1 never")
    save_hf_ckpt: bool = flag(False, "with each checkpoint also write a model folder that Transformers loads")
    disable_ds_ckpt: bool = flag(False, "write no resumable checkpoints")
    max_ckpt_num: int = flag(3, "keep at most this many checkpoints")
    max_ckpt_mem: float = flag(100_000_000, "keep at most this many GiB of checkpoints")
    load_checkpoint: bool = flag(False, "continue from the newest checkpoint in --ckpt_path, if there is one")
    use_ds_universal_ckpt: bool = flag(False, "load the universal checkpoint, which fits any number of devices")


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """Logs"""

    logging_steps: int = flag(1, "log every N steps")
    eval_steps: int = flag(-1, "evaluate every N steps; -1 once per epoch (RL: never)")
    use_tensorboard: str | None = flag(None, "folder for TensorBoard")
    use_wandb: str | None = flag(None, "Weights & Biases API key, or True when logged in")
    wandb_org: str | None = flag(None, "Weights & Biases entity")
    wandb_group: str | None = flag(None, "Weights & Biases group")
    wandb_project: str = flag("openrlhf_train_sft", "Weights & Biases project")
    wandb_run_name: str = flag("sft_%s", "name of the run; %s becomes its start time")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """This run"""

    run_dir: str | None = flag(
        None, "folder for the run's config, metrics and rollouts; none takes a folder in --save_path"
    )
    dry_run: bool = flag(
        False, "check the flags, try the first 8 rows and their reward, and stop before any model loads"
    )
