"""Seconds of a GRPO step by phase, compared with vLLM's own generate for the same rollout.

    python benchmarks/rl_step.py                       one process, including vLLM
    python benchmarks/rl_step.py --runtime ray         Ray, engine and models on the same GPU
    python benchmarks/rl_step.py --engines_per_gpu 2   one process, plus two engine processes
    python benchmarks/rl_step.py --shape 7b -- --lora_rank 32   7.6B parameters, 32 prompts x 4 samples; 32 GB on disk
    python benchmarks/rl_step.py --tiny                a small shape on a CPU, to try the script

The 1.5B shape of Qwen2.5 with random weights, 64 prompts of 128 tokens x 8 samples of exactly 512 tokens, one optimizer
step over the 512 samples, no reference model, bf16 with fp32 masters. Runs the ordinary command with ordinary flags;
add more after `--`. The first step compiles; the median of the others is printed. Generation, experience, training and
weight sync are the run's own `timing/*` metrics; the rest of a step is the controller.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from workload_files import read_prompts, write_files
from workloads import Workload, find_workload, w1_7b

PHASES = ("generation", "make_experience", "ppo_train", "broadcast")


def flags(folder: Path, args: argparse.Namespace) -> list[str]:
    given = {
        "pretrain": folder / "model",
        "prompt_data": folder / "prompts.jsonl",
        "remote_rm_url": folder / "reward.py",
        "runtime": args.runtime,
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "actor_learning_rate": 1e-6,
        "rollout_batch_size": args.prompts,
        "n_samples_per_prompt": args.samples,
        "train_batch_size": args.prompts * args.samples,
        "train_max_tokens_per_gpu": args.tokens,
        "max_len": args.prompt_length + args.new_tokens,
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "vllm_num_engines": 1,
        "vllm_engines_per_gpu": args.engines_per_gpu,
        "vllm_gpu_memory_utilization": args.memory,
        "actor_num_gpus_per_node": 1,
        "max_steps": args.steps,
        "save_path": folder / "out",
        "run_dir": folder / "run",
        "ckpt_path": folder / "checkpoints",
    }
    switches = [
        "use_dynamic_batch",
        "enable_prefix_caching",
        *(["colocate_all_models"] if args.runtime == "ray" else []),
    ]
    switches += ["enforce_eager"] if args.tiny else ["deepcompile"]
    pairs = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [*pairs, *(f"--{name}" for name in switches), *args.more]


def report(folder: Path, alone: float | None) -> None:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: line[f"timing/{name}"] for name in (*PHASES, "step_total")} for line in lines]
    print(f"{'step':>6} {'seconds':>9} " + " ".join(f"{name:>16}" for name in PHASES))
    wholes = [row["step_total"] for row in rows]
    for number, (row, whole) in enumerate(zip(rows, wholes, strict=True), 1):
        print(f"{number:6} {whole:9.2f} " + " ".join(f"{row[name]:16.2f}" for name in PHASES))
    medians = {name: statistics.median(row[name] for row in rows[1:]) for name in PHASES}
    whole = statistics.median(wholes[1:])
    print(f"median {whole:9.2f} " + " ".join(f"{medians[name]:16.2f}" for name in PHASES))
    rest = whole - medians["generation"] - medians["ppo_train"] - medians["broadcast"]
    print(f"neither generating, training nor syncing: {rest:.2f} s, {100 * rest / whole:.1f}%")
    tokens = sum(line["total_length"] for line in lines[1:]) / len(lines[1:])
    print(f"mean sample {tokens:.0f} tokens; log-probs of engine and trainer: engine_kl {lines[-1]['engine_kl']:.2e}")
    if alone is not None:
        print(f"vLLM's own generate {alone:.2f} s: the rollout takes {medians['generation'] / alone:.2f}x that")


def vllm_alone(folder: Path, args: argparse.Namespace) -> None:
    """Generate the same rollout with vLLM's LLM.generate; runs in its own process."""
    import vllm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    engine = vllm.LLM(
        str(folder / "model"),
        dtype="float32" if args.tiny else "bfloat16",
        max_model_len=args.prompt_length + args.new_tokens,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=True,
        enforce_eager=args.tiny,
        logprobs_mode="processed_logprobs",
    )
    texts = read_prompts(folder)
    params = vllm.SamplingParams(
        max_tokens=args.new_tokens, min_tokens=args.new_tokens, temperature=1.0, logprobs=0, detokenize=False
    )
    seconds = []
    for step in range(min(args.steps, 3)):
        ids = [tokenizer(text)["input_ids"] for text in texts[step * args.prompts : (step + 1) * args.prompts]]
        prompts = [{"prompt_token_ids": row} for row in ids for _ in range(args.samples)]
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    print(f"alone {min(seconds):.3f}")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("1.5b", "7b"), default="1.5b", help="of Qwen2.5")
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engines_per_gpu", type=int, default=0, help="0: automatic")
    parser.add_argument("--memory", type=float, default=0.35, help="share of GPU memory for the engines")
    parser.add_argument("--tokens", type=int, help="tokens of a micro-batch (default: of the workload)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--skip_alone", action="store_true", help="skip vLLM's own generate")
    parser.add_argument("--folder", type=Path, help="folder for model and results (default: a temporary one)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="flags of train_ppo_ray, after --")
    args = parser.parse_args(argv)
    workload = w1_7b() if args.shape == "7b" and not args.tiny else find_workload("W1", tiny=args.tiny)
    args.tokens = args.tokens or workload.micro_batch_tokens
    args.prompts, args.samples = workload.prompts, workload.samples
    args.prompt_length, args.new_tokens = workload.prompt_length, workload.longest
    return args, workload


def main() -> None:
    args, workload = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.alone:
            vllm_alone(folder, args)
            return
        write_files(folder, workload, args.steps)
        torch.cuda.empty_cache()
        alone = None
        if not args.skip_alone:
            command = [sys.executable, __file__, "--alone", "--folder", str(folder), "--steps", str(args.steps)]
            command += ["--shape", args.shape, "--memory", str(args.memory), *(["--tiny"] if args.tiny else [])]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            alone = next(float(line.split()[1]) for line in printed.splitlines() if line.startswith("alone"))
            print(f"vLLM's own generate: {alone:.2f} s", flush=True)
        subprocess.run([sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags(folder, args)], check=True)
        report(folder, alone)


if __name__ == "__main__":
    main()
