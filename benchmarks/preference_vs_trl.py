"""Compare DPO or KTO with TRL's trainer: same model, rows, order, batch, learning rate and steps, one process each.

    python benchmarks/preference_vs_trl.py dpo --model DIR --data gsm8k_pairs.jsonl --steps 20
    python benchmarks/preference_vs_trl.py kto --model DIR --data gsm8k_kto.jsonl --steps 20

Rows are plain text: prompt, chosen, rejected for DPO; prompt, response, label for KTO. Prints both loss curves and the
median seconds per optimizer step after the first.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from openrlhf.config.check import check
from openrlhf.config.commands import DPOConfig, KTOConfig
from openrlhf.config.parser import parse
from openrlhf.training import supervised
from openrlhf.training.order import Order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["dpo", "kto"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--max_len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--packing", action="store_true", help="pack sequences on our side")
    args = parser.parse_args()
    rows = usable_rows(args)
    with tempfile.TemporaryDirectory() as folder:
        ours = run_ours(args, rows, Path(folder))
        theirs = run_trl(args, rows, Path(folder))
    report(args, ours, theirs)


def usable_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return as many rows as the steps need, none longer than max_len, so that neither side truncates or drops one."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = ("chosen", "rejected") if args.method == "dpo" else ("response",)
    kept = []
    for line in filter(None, args.data.read_text().split("\n")):
        row = json.loads(line)
        lengths = [len(tokenizer(chat(row["prompt"]) + row[text])["input_ids"]) for text in texts]
        if max(lengths) <= args.max_len - 4 and len({row[text] for text in texts}) == len(texts):
            kept.append({**row, "prompt": chat(row["prompt"])})
        if len(kept) == args.steps * args.batch:
            break
    return kept


def chat(prompt: str) -> str:
    return f"User: {prompt}\nAssistant: "


class Clock:
    """A sink that records the time and the loss of each step."""

    def __init__(self, loss_name: str) -> None:
        self.loss_name = loss_name
        self.losses: list[float] = []
        self.times: list[float] = []

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind == "train":
            self.note(values[self.loss_name])

    def note(self, loss: float) -> None:
        self.losses.append(loss)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def close(self) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def run_ours(args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> Clock:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = DPOConfig if args.method == "dpo" else KTOConfig
    keys = ["--prompt_key", "prompt"] if args.method == "dpo" else ["--input_key", "prompt", "--output_key", "response"]
    argv = [
        *("--pretrain", args.model, "--dataset", str(data), *keys, "--input_template", "{}", "--beta", str(args.beta)),
        *("--train_batch_size", str(args.batch), "--micro_train_batch_size", str(args.micro)),
        *("--learning_rate", str(args.lr), "--lr_scheduler", "constant", "--lr_warmup_ratio", "0"),
        *("--adam_betas", "0.9", "0.999", "--max_len", str(args.max_len), "--save_path", str(folder / "out")),
        *(["--packing_samples"] if args.packing else []),
    ]
    clock = Clock("loss" if args.method == "dpo" else "kto_loss")
    supervised.run(check(parse(command, argv)), sinks=[clock])
    return clock


def run_trl(args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> Clock:
    import trl

    order = Order(num_rows=len(rows), batch_size=args.batch, epochs=1, seed=42)
    shuffled = [rows[place] for step in range(order.total_steps) for place in order.rows(step)]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    clock = Clock("loss")

    class Losses(TrainerCallback):
        def on_log(
            self, _args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any
        ) -> None:
            if logs and "loss" in logs:
                clock.note(logs["loss"])

    trainer_class = trl.DPOTrainer if args.method == "dpo" else trl.KTOTrainer
    config_class = trl.DPOConfig if args.method == "dpo" else trl.KTOConfig

    class InOrder(trainer_class):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    on_gpu = torch.cuda.is_available()
    settings = config_class(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.batch // args.micro,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta2=0.999,
        beta=args.beta,
        max_length=args.max_len,
        num_train_epochs=1,
        logging_steps=1,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    named = [
        {"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]}
        if args.method == "dpo"
        else {"prompt": row["prompt"], "completion": row["response"], "label": bool(row["label"])}
        for row in shuffled
    ]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    trainer = InOrder(
        model=model,
        ref_model=reference,
        args=settings,
        train_dataset=Dataset.from_list(named),
        processing_class=tokenizer,
        callbacks=[Losses()],
    )
    trainer.train()
    return clock


def report(args: argparse.Namespace, ours: Clock, theirs: Clock) -> None:
    print(f"\n{args.method}: batch {args.batch}, micro {args.micro}, lr {args.lr}, beta {args.beta}")
    print(f"{'step':>5}{'ours':>10}{'TRL':>10}")
    for step, (here, there) in enumerate(zip(ours.losses, theirs.losses, strict=False), 1):
        print(f"{step:>5}{here:>10.4f}{there:>10.4f}")
    gaps = [abs(here - there) for here, there in zip(ours.losses, theirs.losses, strict=False)]
    print(f"largest difference {max(gaps):.4f}, mean {statistics.mean(gaps):.4f}")
    for name, clock in (("ours", ours), ("TRL", theirs)):
        print(f"{name:<5}{statistics.median(clock.seconds):8.3f} s per step (median of {len(clock.seconds)})")


if __name__ == "__main__":
    main()
