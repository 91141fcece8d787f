"""Check that vLLM keeps the trained weights: GRPO of small random models at a high learning rate, one per family.

    python benchmarks/weight_sync.py                              tied, dense and MoE families, one process
    python benchmarks/weight_sync.py mixtral qwen3_moe --runtime ray --async_train
    python benchmarks/weight_sync.py --param_dtype fp32

Each run is the ordinary command with every weight sync checked (`--sync_check_every 1`); the script builds models,
prompts and reward. It prints the difference of engine and trainer at each step, in nats per token. The weights change a
lot within a few steps, so a matrix that the engine does not update shows from the second number on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
REWARD = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": [sum(letter < "n" for letter in answer) / max(1, len(answer)) for answer in answers]}
"""
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
TIED = SHAPE | {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**TIED, **more),
    "qwen2": lambda **more: Qwen2Config(**TIED, **more),
    "qwen3": lambda **more: Qwen3Config(**TIED, head_dim=64, **more),
    "gemma3": lambda **more: Gemma3TextConfig(**TIED, head_dim=64, **more),
    "gpt2": lambda **more: GPT2Config(n_embd=256, n_layer=2, n_head=4, n_positions=512, **more),
    "mixtral": lambda **more: MixtralConfig(**SHAPE, num_local_experts=8, sliding_window=None, **more),
    "qwen3_moe": lambda **more: Qwen3MoeConfig(**SHAPE | EXPERTS, **more),
    "gpt_oss": lambda **more: GptOssConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2, head_dim=64, **more),
}


def make_model(folder: Path, family: str) -> None:
    words = ["</s>", "<pad>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = CONFIGS[family](vocab_size=len(words), eos_token_id=0, bos_token_id=None, pad_token_id=fast.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_task(folder: Path, prompts: int) -> None:
    places = torch.randint(len(LETTERS), (prompts, 8), generator=torch.Generator().manual_seed(0))
    rows = ["".join(LETTERS[place] for place in row) for row in places.tolist()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def command(folder: Path, args: argparse.Namespace) -> list[str]:
    given = {
        "pretrain": folder / "model",
        "prompt_data": folder / "prompts.jsonl",
        "remote_rm_url": folder / "reward.py",
        "runtime": args.runtime,
        "param_dtype": args.param_dtype,
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "actor_learning_rate": args.learning_rate,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 4,
        "train_batch_size": 64,
        "micro_train_batch_size": 16,
        "max_len": 64,
        "max_new_tokens": 32,
        "vllm_num_engines": 1,
        "vllm_gpu_memory_utilization": 0.3,
        "actor_num_gpus_per_node": 1,
        "sync_check_every": 1,
        "max_steps": args.steps,
        "save_path": folder / "out",
        "run_dir": folder / "run",
        "ckpt_path": folder / "ckpt",
    }
    switches = ["packing_samples", "enforce_eager"]
    switches += ["async_train"] if args.async_train else []
    switches += ["colocate_all_models"] if args.runtime == "ray" and not args.async_train else []
    pairs = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *pairs, *(f"--{name}" for name in switches), *args.more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family", help=f"any of {', '.join(CONFIGS)} (default: all)")
    parser.add_argument("--runtime", default="local")
    parser.add_argument("--param_dtype", default="bf16")
    parser.add_argument("--learning_rate", default=1e-3, type=float)
    parser.add_argument("--steps", default=6, type=int)
    parser.add_argument("--async_train", action="store_true")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="flags of the command")
    args = parser.parse_args()
    failed = []
    for family in args.families or CONFIGS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(folder / "model", family)
            make_task(folder, 16 * args.steps)
            done = subprocess.run(command(folder, args), capture_output=True, text=True, check=False)
            found = (folder / "run" / "metrics.jsonl").read_text() if done.returncode == 0 else ""
        if done.returncode:
            failed.append(family)
            print(f"{family:10} failed: {done.stderr.strip()[-1500:]}", flush=True)
            continue
        lines = [json.loads(line) for line in found.splitlines()]
        gaps = [line.get("rollout/log_prob_difference") for line in lines if line["kind"] == "train"]
        print(f"{family:10} " + " ".join("       -" if gap is None else f"{gap:8.1e}" for gap in gaps), flush=True)
        for line in done.stderr.splitlines():
            if "log-probs of engine and trainer" in line:
                print(f"{'':10} {line.strip()}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
