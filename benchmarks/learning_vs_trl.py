"""Compare our GRPO with TRL's GRPOTrainer on a CPU: same task, model, prompts in the same order, batch and optimizer.

    python benchmarks/learning_vs_trl.py                       (about three minutes on two cores)
    python benchmarks/learning_vs_trl.py --steps 10 --seeds 1

The task is to sort three digits. The initial model is a small Llama trained to answer with the digits of the prompt in
any order, so it is right about one time in seven. Prints the mean reward of each step over the seeds with its standard
deviation, the reward of the last steps, and the share of 200 held-out items that each trained policy sorts.

Both sides: fp32, temperature 1, the full vocabulary, no KL, advantages divided by the standard deviation of their
group, the loss a mean over all tokens of the step (TRL's "dapo"), one optimizer step per rollout, AdamW (0.9, 0.999)
without decay, gradients clipped at 1, a constant learning rate. The only differences: the random numbers, and 1e-4
instead of 1e-9 in the denominator of the advantage.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from openrlhf.config.check import check
from openrlhf.config.commands import LocalRLConfig
from openrlhf.config.parser import parse
from openrlhf.rl import train as rl
from openrlhf.training.order import permutation

DIGITS = 3
ANSWER = DIGITS + 1  # including EOS
LAST = 5  # steps whose mean is the final reward
REWARD = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    texts = [answer.replace("</s>", "").replace("<pad>", "") for answer in answers]
    return {"rewards": [float(text == label) for text, label in zip(texts, labels)]}
"""


@dataclass(frozen=True)
class Run:
    """The curve of one seed, the held-out accuracy of its policy, and the time of each step."""

    rewards: list[float]
    accuracy: float
    times: list[float]

    @property
    def seconds(self) -> float:
        """The median seconds of a step."""
        return statistics.median(after - before for before, after in pairwise(self.times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="samples per prompt")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    items = ["".join(digits) for digits in product("0123456789", repeat=DIGITS)]
    random.Random(0).shuffle(items)
    train, held_out = items[: args.steps * args.prompts], items[-200:]
    if len(train) + len(held_out) > len(items):
        parser.error(f"the task has {len(items) - len(held_out)} items to train on: fewer --steps or --prompts")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_start(folder / "start", items[: -len(held_out)])
        before = accuracy(LlamaForCausalLM.from_pretrained(folder / "start"), folder / "start", held_out)
        sides: dict[str, Callable[..., Run]] = {"openrlhf": run_ours, "TRL": run_trl}
        runs = {
            side: [start(args, train, held_out, folder, seed) for seed in range(args.seeds)]
            for side, start in sides.items()
        }
    report(args, before, runs)


def build_start(folder: Path, items: Sequence[str]) -> None:
    """Make a model of 100,000 parameters, trained to answer with the digits of the prompt in any order."""
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *"0123456789>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    chance = random.Random(0)
    for _ in range(120):
        batch = [f"{item}>{''.join(chance.sample(item, DIGITS))}</s>" for item in chance.sample(items, 64)]
        ids = tokenizer(batch, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : DIGITS + 1] = -100
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def run_ours(args: argparse.Namespace, train: Sequence[str], held_out: Sequence[str], folder: Path, seed: int) -> Run:
    data, reward, out = folder / "prompts.jsonl", folder / "reward.py", folder / f"ours_{seed}"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(train)))
    reward.write_text(REWARD)
    batch = str(args.prompts * args.samples)
    argv = [
        *("--pretrain", str(folder / "start"), "--save_path", str(out), "--param_dtype", "fp32", "--seed", str(seed)),
        *("--prompt_data", str(data), "--input_key", "prompt", "--label_key", "label", "--input_template", "{}"),
        *("--remote_rm_url", str(reward), "--advantage_estimator", "group_norm", "--init_kl_coef", "0"),
        *("--rollout_batch_size", str(args.prompts), "--n_samples_per_prompt", str(args.samples)),
        *("--train_batch_size", batch, "--micro_train_batch_size", batch, "--micro_rollout_batch_size", batch),
        *("--max_len", "16", "--max_new_tokens", str(ANSWER), "--loss_agg_mode", "token-mean"),
        *("--actor_learning_rate", str(args.lr), "--lr_scheduler", "constant", "--lr_warmup_ratio", "0"),
        *("--adam_betas", "0.9", "0.999"),
    ]
    rl.run(check(parse(LocalRLConfig, argv)))
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["kind"] == "train"]
    times = [file.stat().st_mtime_ns / 1e9 for file in sorted((out / "run" / "rollouts").glob("step_*"))]
    return Run(rewards, accuracy(LlamaForCausalLM.from_pretrained(out), folder / "start", held_out), times)


def run_trl(args: argparse.Namespace, train: Sequence[str], held_out: Sequence[str], folder: Path, seed: int) -> Run:
    import trl

    rewards: list[float] = []
    times: list[float] = []

    class Rewards(TrainerCallback):
        def on_log(
            self, _args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any
        ) -> None:
            if logs and "reward" in logs:
                rewards.append(float(logs["reward"]))
                times.append(time.time())

    def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
        return [float(text == wanted) for text, wanted in zip(completions, label, strict=True)]

    settings = trl.GRPOConfig(
        output_dir=str(folder / f"trl_{seed}"),
        per_device_train_batch_size=args.prompts * args.samples,
        gradient_accumulation_steps=1,
        num_generations=args.samples,
        max_completion_length=ANSWER,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        shuffle_dataset=False,
        logging_steps=1,
        seed=seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    in_our_order = [train[place] for place in permutation(len(train), seed, 0).tolist()]
    model = AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows(in_our_order)),
        processing_class=AutoTokenizer.from_pretrained(folder / "start"),
        callbacks=[Rewards()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return Run(rewards, accuracy(model, folder / "start", held_out), times)


def rows(items: Sequence[str]) -> list[dict[str, str]]:
    return [{"prompt": f"{item}>", "label": "".join(sorted(item))} for item in items]


@torch.no_grad()
def accuracy(model: Any, tokenizer_folder: Path, items: Sequence[str]) -> float:
    """Return the share of items that greedy decoding sorts; all prompts have the same length."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = tokenizer([f"{item}>" for item in items], return_tensors="pt", return_token_type_ids=False)
    out = model.eval().generate(**ids, max_new_tokens=ANSWER, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.mean(text == "".join(sorted(item)) for text, item in zip(texts, items, strict=True))


def report(args: argparse.Namespace, before: float, runs: dict[str, list[Run]]) -> None:
    print(
        f"\nGRPO, {args.prompts} prompts x {args.samples} samples, {args.steps} steps, lr {args.lr}, "
        f"{args.seeds} seeds; mean reward over seeds ± standard deviation\n"
    )
    print("| step |" + "".join(f" {side} |" for side in runs))
    print("|---|" + "---|" * len(runs))
    shown = [step for step in range(args.steps) if step == 0 or (step + 1) % max(1, args.steps // 15) == 0]
    for step in shown:
        cells = [spread([run.rewards[step] for run in some]) for some in runs.values()]
        print(f"| {step + 1} |" + "".join(f" {cell} |" for cell in cells))
    lines: dict[str, Callable[[Run], float]] = {
        f"reward, last {LAST} steps": lambda run: statistics.mean(run.rewards[-LAST:]),
        "reward, mean of all steps": lambda run: statistics.mean(run.rewards),
        f"held-out accuracy (start {before:.3f})": lambda run: run.accuracy,
        "seconds per step (median)": lambda run: run.seconds,
    }
    for name, measure in lines.items():
        print(f"| {name} |" + "".join(f" {spread([measure(run) for run in some])} |" for some in runs.values()))


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


if __name__ == "__main__":
    main()
