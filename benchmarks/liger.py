"""Check that --use_liger_kernel gives the same losses, up to bf16 noise, in every role of a run. Needs a GPU.

    python benchmarks/liger.py [--family llama] [--hidden 256] [--steps 3] [--tolerance 0.05]

Trains a reward model, then PPO with that reward model, a critic and a reference, each once without and once with
Liger's kernels. The second PPO run replays the rollouts of the first, so both train on the same samples. The scores of
the reward model are compared on fixed rows. Prints both values of each metric, and fails if they differ too much.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCORE = """
import json, sys
import numpy as np
import torch
from openrlhf.config.sections.model import ModelFlags
from openrlhf.data.collate import pack
from openrlhf.models.forward import Network, Scores
from openrlhf.models.load import load_scalar_model
from openrlhf.training.local import LocalFrozen
from openrlhf.types import TokenRow

flags, device = ModelFlags(use_liger_kernel=sys.argv[2] == "True"), torch.device("cuda")
model = load_scalar_model(sys.argv[1], flags, device=device, packing=True, head_prefix="score")
rows = [TokenRow(np.arange(4, 4 + length, dtype=np.int32), np.zeros(length, bool)) for length in (3, 9, 20)]
print(json.dumps(LocalFrozen(Network(model), device).forward(pack(rows), Scores).scores.tolist()))
"""


def make_model(folder: Path, family: str, hidden: int) -> None:
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", "?", "=", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "max_position_embeddings": 512}
    ids = {"vocab_size": len(vocabulary), "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **heads, **ids)).save_pretrained(folder)


def write_data(folder: Path) -> None:
    chance = random.Random(0)

    def word(letters: str) -> str:
        return "".join(chance.choices(letters, k=12))

    pairs = [
        {"prompt": word(LETTERS), "chosen": word(LETTERS[:13]), "rejected": word(LETTERS[13:])} for _ in range(256)
    ]
    prompts = [{"input": word(LETTERS)} for _ in range(256)]
    for name, rows in (("pairs", pairs), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, command: str, name: str, flags: str, *, liger: bool) -> list[dict[str, float]]:
    """Run a command; return its metrics, one dict per step."""
    paths = f"--pretrain {folder}/model --save_path {folder}/{name} --ckpt_path {folder}/{name}_ckpt --packing_samples"
    words = [*paths.split(), *flags.split(), *(["--use_liger_kernel"] if liger else [])]
    subprocess.run([sys.executable, "-m", f"openrlhf.cli.{command}", *words], check=True)
    lines = (folder / name / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def scores(folder: Path, *, liger: bool) -> dict[str, float]:
    command = [sys.executable, "-c", SCORE, str(folder / "rm_plain"), str(liger)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return {f"row {number}": score for number, score in enumerate(found)}


def compare(title: str, plain: dict[str, float], fused: dict[str, float], names: list[str], tolerance: float) -> bool:
    close = True
    for name in names:
        one, other = plain[name], fused[name]
        near = abs(one - other) <= tolerance * max(1.0, abs(one))
        close &= near
        print(f"{title:<14} {name:<18} {one:>12.5f} {other:>12.5f}{'' if near else '   TOO FAR APART'}")
    return close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.family, args.hidden)
        write_data(folder)
        shared = (
            f"--max_steps {args.steps} --lr_scheduler constant_with_warmup --lr_warmup_ratio 0 --train_batch_size 64"
        )
        rm = f"--dataset {folder}/pairs.jsonl --prompt_key prompt --learning_rate 1e-4 {shared}"
        runs = {liger: train(folder, "train_rm", f"rm_{label(liger)}", rm, liger=liger) for liger in (False, True)}
        ppo = (
            f"--prompt_data {folder}/prompts.jsonl --reward_pretrain {folder}/rm_plain {shared} "
            "--rollout_batch_size 32 --n_samples_per_prompt 2 --generate_max_len 32 --prompt_max_len 32 "
            "--actor_learning_rate 1e-5 --critic_learning_rate 1e-5"
        )
        first = train(folder, "train_ppo", "ppo_plain", ppo, liger=False)
        second = train(folder, "train_ppo", "ppo_liger", f"{ppo} --replay {folder}/ppo_plain/run/rollouts", liger=True)
        close = compare(
            "reward model", scores(folder, liger=False), scores(folder, liger=True), ["row 0", "row 2"], args.tolerance
        )
        for step in range(args.steps):
            close &= compare(f"train_rm {step + 1}", runs[False][step], runs[True][step], ["loss"], args.tolerance)
            names = ["policy_loss", "critic_loss", "kl", "reward", "actor_grad_norm", "critic_grad_norm"]
            close &= compare(f"train_ppo {step + 1}", first[step], second[step], names, args.tolerance)
    raise SystemExit(not close)


def label(liger: bool) -> str:
    return "liger" if liger else "plain"


if __name__ == "__main__":
    main()
