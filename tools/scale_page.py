"""docs/scale.md: how to plan a run, plans compared with measurements, and what fits on common machines.

All tables come from `openrlhf.plan`; `tools/write_reference.py` writes the page. The shapes of the models are written
down here, because nothing is downloaded.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from openrlhf.config.check import check_sizes
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.config.workload import workload_of
from openrlhf.plan import estimate
from openrlhf.plan.assessment import Assessment, assess, remedy
from openrlhf.plan.gpus import GIB, Machine, parse_gpus
from openrlhf.plan.shapes import ModelShape, shape_of
from openrlhf.plan.terms import STATES, total

SHAPES: dict[str, PretrainedConfig] = {
    "Qwen/Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-32B": Qwen2Config(
        hidden_size=5120,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    "01-ai/Yi-34B": LlamaConfig(
        hidden_size=7168,
        intermediate_size=20_480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        vocab_size=64_000,
    ),
    "meta-llama/Llama-3.1-70B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
    ),
    "Qwen/Qwen3-235B-A22B": Qwen3MoeConfig(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151_936,
    ),
    "deepseek-ai/DeepSeek-V3": DeepseekV3Config(),
}


@cache
def read_shape(name: str, scalar: bool) -> ModelShape:
    return shape_of(SHAPES[name], scalar=scalar)


def plan(command: str, machine: Machine) -> Assessment:
    """Plan a command line that starts with the name of its command."""
    name, *argv = shlex.split(command)
    config = check_sizes(parse(COMMANDS[name], argv, environ={}), lambda line: None)
    work = workload_of(config, machine.devices)
    models = {(model.name, model.scalar) for group in work.groups for model in group.models}
    return assess(work, machine, {key: read_shape(*key) for key in models})


# Plans and measurements.


@dataclass(frozen=True)
class Measurement:
    """A figure of docs/performance.md and the command line that has the same sizes."""

    what: str
    measured: float  # GiB
    command: str
    phase: str = estimate.TRAINING
    counts: str = (
        "allocated"  # what was measured: allocated, above states, all (nvidia-smi), host, or asleep on the host
    )

    def planned(self) -> float:
        """Return the planned GiB."""
        found = plan(self.command, Machine(parse_gpus("H200")[1])).phase(self.phase)
        assert found is not None
        if self.counts == "host":
            return total(found.host) / GIB
        if self.counts == "asleep":  # the pinned tensors without PyTorch's rounding, and the process itself
            return total(term for term in found.host if term.kind in ("asleep", "processes")) / GIB
        by_pytorch = [term for term in found.device if term.kind not in ("allocator reserve", "CUDA context")]
        if self.counts == "above states":
            by_pytorch = [term for term in by_pytorch if term.kind not in STATES]
        return total(found.device if self.counts == "all" else by_pytorch) / GIB


SFT = "train_sft --pretrain Qwen/Qwen2.5-1.5B --packing_samples --max_len 1024 --train_batch_size 16"
WHOLE, HALVES = f"{SFT} --micro_train_batch_size 16", f"{SFT} --micro_train_batch_size 8"
ONE_ROW = "train_sft --pretrain Qwen/Qwen2.5-1.5B --packing_samples --deepcompile --micro_train_batch_size 1"
HYBRID = (
    "train_ppo_ray --runtime ray --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --ref_num_gpus_per_node 1 "
    "--colocate_all_models --vllm_num_engines 1 --vllm_enable_sleep --deepspeed_enable_sleep --rollout_batch_size 32 "
    "--n_samples_per_prompt 4 --train_batch_size 128"
)
PPO = (
    f"{HYBRID} --pretrain Qwen/Qwen2.5-1.5B --vllm_gpu_memory_utilization 0.6 --enforce_eager --use_dynamic_batch "
    "--train_max_tokens_per_gpu 8192 --max_len 384 --max_new_tokens 256"
)
ASLEEP_7B = (
    f"{HYBRID} --pretrain Qwen/Qwen2.5-7B --advantage_estimator group_norm --init_kl_coef 0 --max_len 640 "
    "--max_new_tokens 512 --gradient_checkpointing"
)
GRPO = (
    "train_ppo --advantage_estimator group_norm --init_kl_coef 0 --vllm_num_engines 1 --use_dynamic_batch "
    "--max_len 640 --max_new_tokens 512"
)
W1 = (
    f"{GRPO} --pretrain Qwen/Qwen2.5-1.5B --vllm_engines_per_gpu 2 --vllm_gpu_memory_utilization 0.35 "
    "--rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 512 --train_max_tokens_per_gpu 16640 "
    "--deepcompile"
)
GRPO_7B = (
    f"{GRPO} --pretrain Qwen/Qwen2.5-7B --vllm_engines_per_gpu 1 --vllm_gpu_memory_utilization 0.2 "
    "--rollout_batch_size 32 --n_samples_per_prompt 4 --train_batch_size 128 --train_max_tokens_per_gpu 4160"
)
LORA_7B = f"{GRPO_7B} --lora_rank 32 --deepcompile"
FULL_7B = f"{GRPO_7B} --gradient_checkpointing --deepcompile false --vllm_enable_sleep --disable_ds_ckpt"
MEASURED = (
    Measurement("SFT 1.5B, 16,384 tokens: above weights and optimizer", 46.5, WHOLE, counts="above states"),
    Measurement("the same, compiled", 33.0, f"{WHOLE} --deepcompile", counts="above states"),
    Measurement("the same, gradient checkpointing", 7.5, f"{WHOLE} --gradient_checkpointing", counts="above states"),
    Measurement("SFT 1.5B, 2 micro-batches of 8,192 tokens", 49.7, HALVES),
    Measurement("the same, `--adam_offload`", 26.6, f"{HALVES} --adam_offload"),
    Measurement("shared prompts, 15,360 tokens", 51.3, f"{ONE_ROW} --max_len 15360 --train_batch_size 1"),
    Measurement("shared prompts, 12,672 tokens", 46.1, f"{ONE_ROW} --max_len 12672 --train_batch_size 1"),
    Measurement("shared prompts, 40,960 tokens", 100.4, f"{ONE_ROW} --max_len 40960 --train_batch_size 1"),
    Measurement("shared prompts, 12,288 tokens", 45.4, f"{ONE_ROW} --max_len 12288 --train_batch_size 1"),
    Measurement("hybrid PPO 1.5B: generation", 89.2, PPO, estimate.GENERATION, "all"),
    Measurement("hybrid PPO 1.5B: experience", 26.5, PPO, estimate.EXPERIENCE, "all"),
    Measurement("hybrid PPO 1.5B: training", 62.0, PPO, estimate.TRAINING, "all"),
    Measurement("hybrid PPO 1.5B: weight sync", 30.0, PPO, estimate.SYNC, "all"),
    Measurement("W1, GRPO 1.5B: training", 106.2, W1, estimate.TRAINING, "all"),
    Measurement("GRPO 7B, LoRA: training", 58.5, LORA_7B, estimate.TRAINING, "all"),
    Measurement("GRPO 7B, all parameters: training", 138.7, FULL_7B, estimate.TRAINING, "all"),
    Measurement("GRPO 7B, LoRA: host memory", 15.9, LORA_7B, estimate.LOADING, "host"),
    Measurement("GRPO 7B, all parameters: host memory", 19.3, FULL_7B, estimate.LOADING, "host"),
    Measurement("GRPO 7B, asleep: host memory", 105.2, ASLEEP_7B, estimate.GENERATION, "asleep"),
)
TIMES = {  # phase -> measured seconds, of runs in docs/performance.md
    "hybrid PPO 1.5B": (
        PPO,
        {"generation": "5.7 to 7.9", "experience": "2.8", "training": "4.1 to 4.3", "sync": "1.6"},
    ),
    "W1, GRPO 1.5B": (W1, {"generation": "5.0", "training": "6.1"}),
    "GRPO 7B, LoRA": (LORA_7B, {"generation": "3.6", "training": "6.4"}),
    "GRPO 7B, all parameters": (FULL_7B, {"generation": "3.6", "training": "9.7"}),
    "SFT 1.5B": (WHOLE, {"training": "0.45"}),
    "SFT 1.5B, compiled": (f"{WHOLE} --deepcompile", {"training": "0.34"}),
    "SFT 1.5B, `--adam_offload`": (f"{HALVES} --adam_offload", {"training": "4.5"}),
}


def measured_rows() -> Iterator[str]:
    for case in MEASURED:
        planned = case.planned()
        yield f"| {case.what} | {case.measured:.1f} | {planned:.1f} | {100 * (planned / case.measured - 1):+.0f}% |"


def time_rows() -> Iterator[str]:
    for what, (command, measured) in TIMES.items():
        planned = {one.phase: one for one in plan(command, Machine(parse_gpus("H200")[1])).seconds}
        for phase, seconds in measured.items():
            shown = f"{planned[phase].seconds:.{1 if planned[phase].seconds >= 1 else 2}f}"
            yield f"| {what}: {phase} | {seconds} | {shown} | {planned[phase].limit} |"


# What fits.

RL = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 8 --rollout_batch_size 128"
LENGTHS = "--train_batch_size 1024 --prompt_max_len 1024 --generate_max_len 3072"
SLEEPING = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.8"
CHECKPOINTED = "--zero_stage 3 --gradient_checkpointing"
ONE = "--micro_train_batch_size 1 --micro_rollout_batch_size 1"


def grpo(model: str, nodes: int, gpus: int, engine_size: int, more: str = "") -> str:
    devices = f"--actor_num_nodes {nodes} --actor_num_gpus_per_node {gpus}"
    engines = f"--vllm_num_engines {nodes * gpus // engine_size} --vllm_tensor_parallel_size {engine_size}"
    return f"train_ppo_ray --pretrain {model} {RL} {LENGTHS} {devices} {engines} {SLEEPING} {ONE} {CHECKPOINTED} {more}"


def ppo(model: str, nodes: int, gpus: int, engine_size: int, more: str = "") -> str:
    """Full PPO with all four models on all devices."""
    roles = " ".join(
        f"--{role}_num_nodes {nodes} --{role}_num_gpus_per_node {gpus}" for role in ("ref", "critic", "reward")
    )
    flags = grpo(model, nodes, gpus, engine_size, more)
    flags = flags.replace("--advantage_estimator group_norm --init_kl_coef 0", "--advantage_estimator gae")
    return f"{flags} --reward_pretrain {model} {roles}"


def sft(model: str, more: str = "") -> str:
    return f"train_sft --pretrain {model} --max_len 4096 --packing_samples --micro_train_batch_size 1 {more}"


LLAMA, YI, QWEN = "meta-llama/Llama-3.1-70B", "01-ai/Yi-34B", "Qwen/Qwen2.5-7B"
LARGE, HUGE = "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3"
LORA_32B = GRPO_7B.replace(QWEN, "Qwen/Qwen2.5-32B") + " --lora_rank 32"
SCENES: dict[str, tuple[str, int, dict[str, str]]] = {  # title -> (GPUs of a node, nodes, {run: command})
    "70B on 16 x A100-80": (
        "8xA100-80",
        2,
        {
            "SFT, defaults": sft(LLAMA),
            f"SFT, `{CHECKPOINTED}`": sft(LLAMA, CHECKPOINTED),
            f"SFT, `{CHECKPOINTED} --adam_offload`": sft(LLAMA, f"{CHECKPOINTED} --adam_offload"),
            f"SFT, `--lora_rank 32 {CHECKPOINTED}`": sft(LLAMA, f"--lora_rank 32 {CHECKPOINTED}"),
            "GRPO, everything sleeps, engines of 8": grpo(LLAMA, 2, 8, 8),
            "GRPO, the same with `--adam_offload`": grpo(LLAMA, 2, 8, 8, "--adam_offload"),
        },
    ),
    "34B on 4 x A100-80": (
        "4xA100-80",
        1,
        {
            f"SFT, `{CHECKPOINTED}`": sft(YI, CHECKPOINTED),
            f"SFT, `{CHECKPOINTED} --adam_offload`": sft(YI, f"{CHECKPOINTED} --adam_offload"),
            f"SFT, `--lora_rank 32 {CHECKPOINTED}`": sft(YI, f"--lora_rank 32 {CHECKPOINTED}"),
            "GRPO, everything sleeps, engines of 4": grpo(YI, 1, 4, 4),
            "GRPO, the same with `--lora_rank 32`": grpo(YI, 1, 4, 4, "--lora_rank 32"),
        },
    ),
    "7B on 4 x 4090": (
        "4x4090",
        1,
        {
            f"SFT, `{CHECKPOINTED}`": sft(QWEN, CHECKPOINTED),
            f"SFT, `{CHECKPOINTED} --adam_offload`": sft(QWEN, f"{CHECKPOINTED} --adam_offload"),
            f"SFT, `--lora_rank 32 {CHECKPOINTED}`": sft(QWEN, f"--lora_rank 32 {CHECKPOINTED}"),
            "SFT, `--lora_rank 32 --load_in_4bit --gradient_checkpointing`": sft(
                QWEN, "--lora_rank 32 --load_in_4bit --gradient_checkpointing"
            ),
            "GRPO, everything sleeps, engines of 2": grpo(QWEN, 1, 4, 2),
            "GRPO, the same with `--lora_rank 32`": grpo(QWEN, 1, 4, 2, "--lora_rank 32"),
        },
    ),
    "32B with LoRA on one H200, in one process: 32 prompts x 4 samples of 640 tokens": (
        "H200",
        1,
        {
            "GRPO, `--deepcompile`, half of the GPU for the engine": f"{LORA_32B} --deepcompile "
            "--vllm_gpu_memory_utilization 0.5",
            "GRPO, `--gradient_checkpointing --vllm_enable_sleep`": f"{LORA_32B} --gradient_checkpointing "
            "--vllm_enable_sleep --vllm_gpu_memory_utilization 0.5",
            "GRPO, `--gradient_checkpointing --load_in_4bit`, 60%": f"{LORA_32B} --gradient_checkpointing "
            "--load_in_4bit --vllm_gpu_memory_utilization 0.6",
        },
    ),
    "70B PPO on 48 x A100-80": (
        "8xA100-80",
        6,
        {
            "PPO, everything sleeps, engines of 8": ppo(LLAMA, 6, 8, 8),
            "PPO, the same with `--ref_reward_offload`": ppo(LLAMA, 6, 8, 8, "--ref_reward_offload"),
            "PPO, the same with `--adam_offload`": ppo(LLAMA, 6, 8, 8, "--ref_reward_offload --adam_offload"),
        },
    ),
    "235B MoE on 64 x H100": (
        "8xH100",
        8,
        {
            f"SFT, `{CHECKPOINTED}`": sft(LARGE, CHECKPOINTED),
            f"SFT, `{CHECKPOINTED} --adam_offload`": sft(LARGE, f"{CHECKPOINTED} --adam_offload"),
            "GRPO, everything sleeps, engines of 8": grpo(LARGE, 8, 8, 8),
            "GRPO, the same with `--adam_offload`": grpo(LARGE, 8, 8, 8, "--adam_offload"),
        },
    ),
    "671B MoE on 128 x H200": (
        "8xH200",
        16,
        {
            f"SFT, `{CHECKPOINTED}`": sft(HUGE, CHECKPOINTED),
            f"SFT, `{CHECKPOINTED} --adam_offload`": sft(HUGE, f"{CHECKPOINTED} --adam_offload"),
            "GRPO, everything sleeps, engines of 8": grpo(HUGE, 16, 8, 8),
        },
    ),
}


def scene_rows(gpus: str, nodes: int, runs: dict[str, str]) -> Iterator[str]:
    count, gpu = parse_gpus(gpus)
    for what, command in runs.items():
        found = plan(command, Machine(gpu, count, nodes))
        peak = f"{found.peak / GIB:.0f} ({found.fullest.peak.phase})"
        if found.engine_shortage() > 0:
            peak = f"engine lacks {found.engine_shortage() / GIB:.0f}"
        host = f"{total(found.host_peak.host) / GIB:.0f} ({found.host_peak.phase})"
        times = ", ".join(f"{one.phase} {one.seconds:.0f}" for one in found.seconds)
        helps = " ".join(dict.fromkeys(f"`{change.flags}`" for change in remedy(found)))
        needs = "" if found.fit == "fits" else helps or "more or larger devices"
        yield f"| {what} | {found.fit.removeprefix('is ')} | {peak} | {host} | {times} | {needs} |"


def tables() -> str:
    """The generated part of the page."""
    lines = ["## Measured and planned\n", MEASURED_TEXT, "| | measured, GiB | planned, GiB | |", "|---|---|---|---|"]
    lines += [*measured_rows(), "", TIMES_TEXT, "| | measured, s | planned, s | limited by |", "|---|---|---|---|"]
    lines += [*time_rows(), "", UNMEASURED, "## What fits\n", FITS_TEXT]
    for title, (gpus, nodes, runs) in SCENES.items():
        lines += [f"### {title}\n", "| run | | GiB of a device | GiB of a node's host | seconds of a step | to fit |"]
        lines += ["|---|---|---|---|---|---|", *scene_rows(gpus, nodes, runs), ""]
    return "\n".join(lines).rstrip() + "\n"


MEASURED_TEXT = """\
All measurements are from one H200 ([Performance](performance.md)). A test keeps the plans within 10% of them on the
GPU and within 20% in host memory. PyTorch's own peak is compared with the terms that PyTorch allocates; a reading of
`nvidia-smi` (the hybrid, W1 and 7B runs) with all terms, including CUDA's context and the pieces that the allocator
holds back. Those two terms were chosen to match the hybrid run, whose experience phase is compared in the middle of its
range, and the activations of compiled layers with LoRA to match the run with LoRA. The others have no free constant.
"""
TIMES_TEXT = """\
The constants behind the seconds of a step were chosen from these same runs, and times depend on the machine's
processor, so no test asserts them. The hybrid run is older: it did not yet compute a prompt only once for all samples
in a micro-batch, as plans expect.
"""
UNMEASURED = """\
Ray's memory monitor ended the run of 7B parameters that slept in host memory, so its 105 GiB may not have been its
peak: PyTorch rounds each pinned tensor up to a power of two, and for this shape that comes to 89 GiB on top, which a
plan lists as `rounding of pinned memory` and which was not measured. With PyTorch 2.13,
`PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1` turns the rounding off.

**Not measured:** everything on more than one GPU (the shards of ZeRO and FSDP, buckets, gathered layers,
tensor parallelism, rings, NCCL, all times that depend on links), other GPUs than the H200, mixtures of experts,
activations under QLoRA and under LoRA without compiled layers, 4-bit weights, the Transformers engine's cache, and
host memory while saving. They follow from what the code allocates.
"""
FITS_TEXT = """\
Unless the title says otherwise, samples have up to 4,096 tokens, micro-batches one sample, and GRPO and PPO 128 prompts
x 8 samples. "Everything sleeps" is `--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
--vllm_gpu_memory_utilization 0.8` with `--zero_stage 3 --gradient_checkpointing`. Each engine is on one node. Networks
have 400 Gbit/s per node.
"""
