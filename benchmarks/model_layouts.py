"""First losses of hybrid and mixture-of-experts models, which must not depend on how sequences share a micro-batch.

    python benchmarks/model_layouts.py                 every family, SFT and GRPO, micro-batches of 1 and of 8
    python benchmarks/model_layouts.py qwen3_next      one family
    python benchmarks/model_layouts.py --tiny          small shapes on a CPU, to try the script

Models have random weights and a tokenizer of letters. Runs the ordinary command with ordinary flags, and prints the
first loss with each micro-batch size, their relative difference, the seconds of the second step, and the lines in which
the self-test reports that a model does not run in the packed layout.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Lfm2Config, Qwen3_5TextConfig, Qwen3NextConfig
from workload_files import LETTERS, REWARD, make_tokenizer

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "num_hidden_layers": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 512}
TINY = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "vocab_size": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS |= {"shared_expert_intermediate_size": 64}
MIXED = ["mamba", "attention", "mamba", "mamba"]


def configs(wide: bool) -> dict:
    shape = SHAPE | (WIDE if wide else TINY)
    head = {"linear_key_head_dim": shape["head_dim"], "linear_value_head_dim": shape["head_dim"]}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": shape["hidden_size"] // 4, "mamba_d_state": 16, "mamba_n_groups": 1}
    tokens = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    return {
        "qwen3_next": Qwen3NextConfig(**shape, **tokens, **DELTA, **head, **EXPERTS),
        "qwen3_5": Qwen3_5TextConfig(**shape, **tokens, **DELTA, **head),
        "granitemoehybrid": GraniteMoeHybridConfig(
            **shape,
            **tokens,
            **mamba,
            num_local_experts=8,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
            layer_types=MIXED,
        ),
        "lfm2": Lfm2Config(**shape, **tokens, layer_types=["conv", "full_attention", "conv", "conv"]),
    }


def make_model(folder: Path, config) -> None:
    torch.manual_seed(0)
    config.initializer_range = 0.1  # large enough to show a leak from another sequence
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    make_tokenizer(config.vocab_size).save_pretrained(folder)


def make_task(folder: Path, rows: int) -> None:
    random = torch.Generator().manual_seed(0)

    def word() -> str:
        length = int(torch.randint(20, 120, (1,), generator=random))
        return "".join(LETTERS[place] for place in torch.randint(26, (length,), generator=random).tolist())

    lines = [json.dumps({"input": word(), "output": word()}) + "\n" for _ in range(rows)]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)


def flags(folder: Path, command: str, micro_batch: int) -> dict:
    shared = {
        "pretrain": folder / "model",
        "save_path": folder / f"{command}_{micro_batch}",
        "micro_train_batch_size": micro_batch,
        "lr_warmup_ratio": 0,
        "max_len": 512,
        "max_steps": 2,
    }
    if command == "train_sft":
        return shared | {"dataset": folder / "rows.jsonl", "output_key": "output", "train_batch_size": 16}
    return shared | {
        "prompt_data": folder / "rows.jsonl",
        "remote_rm_url": folder / "reward.py",
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "train_batch_size": 32,
        "micro_rollout_batch_size": 8,
        "max_new_tokens": 64,
    }


def measure(folder: Path, command: str, micro_batch: int) -> tuple[dict, list[str]]:
    given = flags(folder, command, micro_batch)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    ran = subprocess.run(
        [sys.executable, "-m", f"openrlhf.cli.{command}", *words], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        sys.exit(f"{command} failed:\n{ran.stderr[-3000:]}")
    said = [line for line in ran.stderr.splitlines() if ", so it runs " in line]
    lines = (folder / f"{command}_{micro_batch}" / "run" / "metrics.jsonl").read_text().splitlines()
    return next(row for row in map(json.loads, lines) if row["kind"] == "train"), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for family, config in configs(wide=not args.tiny).items():
        if args.families and family not in args.families:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(folder / "model", config)
            make_task(folder, rows=64)
            for command, loss in (("train_sft", "gpt_loss"), ("train_ppo", "policy_loss")):
                found = {size: measure(folder, command, size) for size in (1, 8)}
                first, second = (found[size][0][loss] for size in (1, 8))
                off = abs(first - second) / max(abs(first), 1e-3)
                print(f"{family:17} {command}: first loss {first:.6f} and {second:.6f}, off by {off:.1e}", flush=True)
                if "engine_kl" in found[1][0]:
                    print(f"{'':17} engine and trainer differ by {found[1][0]['engine_kl']:.1e}", flush=True)
                for line in dict.fromkeys(found[8][1]):
                    print(f"{'':17} {line}", flush=True)


if __name__ == "__main__":
    main()
