"""Quickstart: a small model learns to sort digits on a laptop CPU, using the ordinary commands and flags.

    make quickstart                (or: python examples/quickstart.py --folder somewhere)

The script generates a task, builds a Llama with half a million parameters and a character tokenizer, then runs
supervised fine-tuning on a little data, a reward model from preferences, PPO against that reward model, and GRPO with a
verifiable reward. It prints each command that it runs. All results are measured on held-out items, which are never
trained on.
"""

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from openrlhf.view.report import write_report
from openrlhf.view.runs import find_runs

DIGITS = 4
CHARACTERS = "0123456789sort :>"
REWARD = Path(__file__).parent / "rewards" / "sorted_digits.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="where everything is written")
    folder: Path = parser.parse_args().folder
    disable_progress_bar()
    started = time.perf_counter()
    held_out = write_task(folder)
    build_model(folder / "base")
    base = accuracy(folder / "base", held_out)

    where, reward = (shlex.quote(str(path)) for path in (folder, REWARD))  # either may contain a space
    small = "--train_batch_size 64 --micro_train_batch_size 64 --max_len 64"
    run(
        f"train_sft --pretrain {where}/base --dataset {where}/sft.jsonl --eval_dataset {where}/sft_test.jsonl "
        f"--input_template {{}} --output_key output --learning_rate 3e-3 --max_epochs 2 {small} "
        f"--save_path {where}/sft"
    )
    tuned = accuracy(folder / "sft", held_out)
    pairs = f"--dataset {where}/pairs.jsonl --eval_dataset {where}/pairs_test.jsonl --prompt_key prompt"
    run(f"train_rm --pretrain {where}/sft {pairs} --learning_rate 1e-3 {small} --save_path {where}/rm")

    prompts = (
        f"--prompt_data {where}/prompts.jsonl --prompt_max_len 32 --generate_max_len {DIGITS + 2} "
        "--micro_train_batch_size 256 --micro_rollout_batch_size 256 --lr_warmup_ratio 0.05"
    )
    run(
        f"train_ppo --pretrain {where}/sft --reward_pretrain {where}/rm {prompts} --rollout_batch_size 256 "
        f"--train_batch_size 256 --actor_learning_rate 1e-4 --critic_learning_rate 1e-3 --init_kl_coef 0.3 "
        f"--freezing_actor_steps 4 --max_steps 16 --save_path {where}/ppo"
    )
    against_model = accuracy(folder / "ppo", held_out)
    run(
        f"train_ppo --pretrain {where}/sft --remote_rm_url {reward} --label_key label {prompts} "
        f"--advantage_estimator group_norm "
        f"--n_samples_per_prompt 8 --rollout_batch_size 32 --train_batch_size 128 --actor_learning_rate 3e-4 "
        f"--init_kl_coef 0 --max_steps 100 --save_path {where}/grpo"
    )
    verified = accuracy(folder / "grpo", held_out)

    ranked = [row["acc_mean"] for row in metrics(folder / "rm") if row["kind"] == "eval"]
    rewards = [row["reward"] for row in metrics(folder / "ppo") if row["kind"] == "train"]
    results = {
        "before training": f"{base:.1%}",
        "after SFT": f"{tuned:.1%}",
        "after SFT, then PPO against the reward model": f"{against_model:.1%}",
        "after SFT, then GRPO with the verifiable reward": f"{verified:.1%}",
        "held-out pairs the reward model ranks correctly": f"{ranked[0]:.1%} -> {ranked[-1]:.1%}",
        "mean score of PPO's samples by the reward model": f"{rewards[0]:.2f} -> {rewards[-1]:.2f}",
    }
    show("held-out items sorted correctly", results)
    samples(folder, held_out[:4])
    runs = find_runs([folder / stage for stage in ("sft", "rm", "ppo", "grpo")])
    write_report(folder / "report.html", runs, title="Quickstart", summary=results)
    seconds = f"{time.perf_counter() - started:.0f} seconds"
    print(f"\n{seconds}; curves and samples: {folder / 'report.html'}; everything: {folder}")
    if not shutil.which("openrlhf"):
        activate = Path(sys.executable).parent / "activate"
        print(f"to run openrlhf in your shell: source {shlex.quote(str(activate))}")


def write_task(folder: Path) -> list[tuple[str, str]]:
    """Return the rows of each stage, from one shuffled list of distinct items; the last ones are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    items = {"".join(chance.choices("0123456789", k=DIGITS)) for _ in range(9000)}
    shuffled = chance.sample(sorted(items), len(items))
    tasks = [(f"sort {item}>", "".join(sorted(item))) for item in shuffled]
    train, held_out = tasks[:-300], tasks[-300:]
    for name, rows in (("sft", train[:1000]), ("sft_test", held_out)):
        write(folder / f"{name}.jsonl", [{"input": prompt, "output": answer} for prompt, answer in rows])
    for name, rows in (("pairs", train[1500:3500]), ("pairs_test", held_out)):
        write(
            folder / f"{name}.jsonl",
            [{"prompt": prompt, "chosen": answer, "rejected": spoiled(answer, chance)} for prompt, answer in rows],
        )
    write(folder / "prompts.jsonl", [{"input": prompt, "label": answer} for prompt, answer in train[1000:]])
    return held_out


def spoiled(answer: str, chance: random.Random) -> str:
    """The answer with two neighbours swapped or one digit replaced: close, but wrong."""
    place = chance.randrange(DIGITS - 1)
    if answer[place] != answer[place + 1]:
        return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
    return answer[:place] + str((int(answer[place]) + 1) % 10) + answer[place + 1 :]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_model(folder: Path, characters: str = CHARACTERS) -> None:
    """A decoder with random weights, and one token for each character."""
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=characters[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def run(command: str) -> None:
    """Print one of our commands, so that you can run it yourself, and run it in its own process."""
    print(f"\n$ openrlhf {command}", flush=True)
    subprocess.run([sys.executable, "-m", "openrlhf.cli.main", *shlex.split(command)], check=True)


def accuracy(folder: Path, items: list[tuple[str, str]]) -> float:
    answers = generate(folder, [prompt for prompt, _ in items])
    return sum(given == wanted for given, (_, wanted) in zip(answers, items, strict=True)) / len(items)


def generate(folder: Path, prompts: list[str]) -> list[str]:
    """Greedy answers; all prompts have one length, so nothing is padded."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=DIGITS + 2, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def samples(folder: Path, items: list[tuple[str, str]]) -> None:
    prompts = [prompt for prompt, _ in items]
    columns = [generate(folder / name, prompts) for name in ("base", "sft", "ppo", "grpo")]
    print(f"\n{'prompt':<14}{'before':<12}{'SFT':<12}{'PPO':<12}{'GRPO':<12}expected")
    for (prompt, wanted), *answers in zip(items, *columns, strict=True):
        print(f"{prompt:<14}" + "".join(f"{answer:<12}" for answer in answers) + wanted)


def show(title: str, rows: dict[str, str]) -> None:
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<52}{value}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as failed:  # the command has printed the reason
        sys.exit(failed.returncode)
