"""Time and memory until a supervised run has its rows: first start, second start, and another rank of the same machine.

    python benchmarks/tokenization.py                       100,000 conversations of about 1,500 characters, SFT
    python benchmarks/tokenization.py --rows 1000000
    python benchmarks/tokenization.py --in_memory           without the cache, as small datasets are read

Writes random conversations and trains a byte-level BPE tokenizer on some of them, then reads the rows as `train_sft`
does, each time in a new process. Memory is the private memory of the process once the rows are loaded (USS, without the
pages of mapped files, which all processes share), and its peak including such pages; both without the imports. CPU time
includes that of worker processes.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

WORDS = 20_000  # distinct words
CHAT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def write_data(path: Path, rows: int) -> None:
    """Write conversations of random words, with common words more often than rare ones."""
    rng = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(WORDS)]
    weights = list(accumulate(1 / (place + 10) for place in range(WORDS)))
    with path.open("w") as file:
        for _ in range(rows):
            question = " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(10, 60)))
            answer = " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(50, 350)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, data: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, show_progress=False)
    with data.open() as file:
        tokenizer.train_from_iterator((line for line, _ in zip(file, range(2000), strict=False)), trainer)
    ready = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    ready.chat_template = CHAT + PROMPT
    ready.save_pretrained(folder)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the worker processes that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def load(folder: Path, *, in_memory: bool) -> None:
    """Load the rows as `train_sft` does, and print what that took."""
    import psutil
    from transformers import AutoTokenizer

    from openrlhf.config.commands import SFTConfig
    from openrlhf.config.sections.data import ConversationFlags, DatasetFlags, TemplateFlags
    from openrlhf.data import row_cache
    from openrlhf.data.supervised import read_train

    if in_memory:
        row_cache.MIN_CACHED = sys.maxsize
    config = SFTConfig(
        data=DatasetFlags(dataset=str(folder / "data.jsonl")),
        fields=ConversationFlags(input_key="messages"),
        template=TemplateFlags(apply_chat_template=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    process, started, computed = psutil.Process(), time.perf_counter(), cpu_seconds()
    before, imported = process.memory_full_info().uss, process.memory_info().rss
    rows = read_train(config, tokenizer).rows
    seconds, computed = time.perf_counter() - started, cpu_seconds() - computed
    held = process.memory_full_info().uss - before
    started = time.perf_counter()
    picked = [rows[place] for place in random.Random(0).choices(range(len(rows)), k=10_000)]
    access = (time.perf_counter() - started) / len(picked)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported
    print(
        f"{seconds:7.1f} s, {computed:7.1f} s of CPU, {len(rows) / seconds:9,.0f} rows/s,"
        f" holds {held / 2**20:7,.0f} MiB, peak {peak / 2**20:7,.0f} MiB, {access * 1e6:.1f} us to pick a row"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--in_memory", action="store_true", help="keep all rows in memory, in every process")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the folder, in a measured process
    args = parser.parse_args()
    if args.load:
        load(args.load, in_memory=args.in_memory)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data.jsonl", args.rows)
        write_tokenizer(folder, folder / "data.jsonl")
        size = (folder / "data.jsonl").stat().st_size
        print(f"{args.rows:,} rows, {size / 2**20:,.0f} MiB of text, {len(os.sched_getaffinity(0))} cores")
        words = [sys.executable, __file__, "--load", name, *(["--in_memory"] if args.in_memory else [])]
        for start in ["every start"] if args.in_memory else ["first start", "second start", "another rank"]:
            print(f"{start:12}", end=" ", flush=True)
            subprocess.run(words, env=os.environ | {"HF_DATASETS_CACHE": f"{name}/cache"}, check=True)


if __name__ == "__main__":
    main()
