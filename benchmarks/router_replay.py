"""Log-probs of engine and trainer for a mixture of experts, with and without router replay.

    python benchmarks/router_replay.py                 Qwen3-MoE shape of 3.1B parameters, vLLM, one GPU
    python benchmarks/router_replay.py --tiny          a small shape with the Transformers engine, to try the script

Each run is the ordinary GRPO command, once without and once with --router_replay; the script builds a model with random
weights, prompts and a reward. For every step it prints engine_kl (the mean log-ratio of engine and trainer), and the
mean, 99th percentile, maximum and share above 0.1 nats of the absolute log-ratios |r| of all tokens; then the seconds
of the step and the reward.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from workload_files import REWARD, make_prompts, make_tokenizer

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 18,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "vocab_size": 4096,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "vocab_size": 64,
}
COLUMNS = ("engine_kl", "mean |r|", "p99 |r|", "max |r|", "|r| > 0.1", "seconds", "reward")


def make_model(folder: Path, shape: dict) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None, "max_position_embeddings": 4096}
    config = Qwen3MoeConfig(**shape, **tokens, norm_topk_prob=True, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    model.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)


def command(folder: Path, args: argparse.Namespace, name: str) -> list[str]:
    given = {
        "pretrain": folder / "model",
        "prompt_data": folder / "prompts.jsonl",
        "remote_rm_url": folder / "reward.py",
        "runtime": "local",
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "actor_learning_rate": 1e-6,
        "lr_warmup_ratio": 0,
        "rollout_batch_size": 8 if args.tiny else 32,
        "n_samples_per_prompt": 4 if args.tiny else 8,
        # Two optimizer steps per rollout: the trainer then computes the log-probs of the whole rollout.
        "train_batch_size": 16 if args.tiny else 128,
        "micro_train_batch_size": 8,
        "micro_rollout_batch_size": 8,
        "max_len": 96 if args.tiny else 1024,
        "max_new_tokens": 32 if args.tiny else args.new_tokens,
        "max_steps": args.steps,
        "save_path": folder / name / "out",
        "run_dir": folder / name / "run",
        "ckpt_path": folder / name / "ckpt",
    }
    switches = ["packing_samples", "gradient_checkpointing", *(["router_replay"] if name == "replay" else [])]
    if not args.tiny:
        given |= {"vllm_num_engines": 1, "vllm_gpu_memory_utilization": args.memory}
    pairs = [part for flag, value in given.items() for part in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo", *pairs, *(f"--{flag}" for flag in switches), *args.more]


def log_ratios(path: Path) -> np.ndarray:
    """Return engine minus trainer for the action tokens of a recorded step."""
    table = pq.read_table(path, columns=["action_mask", "rollout_log_probs", "old_log_probs"])
    mask, engine, trainer = (
        np.concatenate([np.asarray(row) for row in table.column(name).to_pylist()]) for name in table.column_names
    )
    return (engine - trainer)[mask]


def report(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    for line, path in zip(trained, sorted((run / "rollouts").glob("step_*.parquet")), strict=False):
        sizes = np.abs(log_ratios(path))
        engine_kl = line.get("engine_kl", line.get("vllm_kl", float("nan")))
        values = (engine_kl, sizes.mean(), np.quantile(sizes, 0.99), sizes.max(), (sizes > 0.1).mean())
        values += (line["timing/step_total"], line["reward"])
        print(" ".join(f"{value:11.3e}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", default=4, type=int)
    parser.add_argument("--new_tokens", default=512, type=int)
    parser.add_argument("--memory", default=0.3, type=float, help="--vllm_gpu_memory_utilization")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="flags of the command")
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a separate process, so that it holds no GPU memory while the runs are measured.
        shape = json.dumps(TINY if args.tiny else SHAPE)
        code = f"import router_replay; router_replay.make_model(router_replay.Path({name!r}) / 'model', {shape})"
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
        prompts = make_prompts(32 * args.steps, 24)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": prompt}) + "\n" for prompt in prompts))
        (folder / "reward.py").write_text(REWARD)
        for kind in ("plain", "replay"):
            ran = subprocess.run(command(folder, args, kind), capture_output=True, text=True, check=False)
            print(f"{'with' if kind == 'replay' else 'without'} --router_replay")
            if ran.returncode:
                failed = True
                print(f"failed: {ran.stderr.strip()[-3000:]}", flush=True)
                continue
            print(" ".join(f"{column:>11}" for column in COLUMNS))
            report(folder / kind / "run")
    sys.exit(failed)


if __name__ == "__main__":
    main()
