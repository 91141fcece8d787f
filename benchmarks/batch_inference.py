"""Compare `batch_inference` on vLLM with vLLM's own `LLM.generate`: the same prompts, lengths and sampling.

    python benchmarks/batch_inference.py --model DIR --data gsm8k_test.jsonl
    python benchmarks/batch_inference.py --model DIR --data prompts.jsonl --rows 16 --max_new_tokens 32    (a CPU)

Ours is the ordinary command: it writes every row when it is finished and requests log-probs, as training does. Both run
the same number of sequences at a time. Engines start before timing begins, each in its own process.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEED = re.compile(r"generated ([\d,]+) tokens in ([\d.]+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL")
    parser.add_argument("--input_key", default="question")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--prompt_max_len", type=int, default=512)
    parser.add_argument("--max_num_seqs", type=int, default=1024, help="default: vLLM's own default on a large GPU")
    parser.add_argument("--output", type=Path, help="file for our rows (default: a temporary file)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        vllm_alone(args)
        return
    report("batch_inference", *ours(args))
    alone = subprocess.run([sys.executable, *sys.argv, "--alone"], stdout=subprocess.PIPE, text=True, check=True).stdout
    figures = next(line.split()[1:] for line in alone.splitlines() if line.startswith("alone "))
    report("LLM.generate", *map(float, figures))


def ours(args: argparse.Namespace) -> tuple[float, float]:
    """Return tokens and seconds as the command reports them."""
    with tempfile.TemporaryDirectory() as folder:
        output = args.output or Path(folder) / "rows.jsonl"
        flags = f"--eval_task generate_vllm --pretrain {args.model} --dataset {args.data} --input_key {args.input_key}"
        flags += f" --apply_chat_template --max_samples {args.rows} --prompt_max_len {args.prompt_max_len}"
        flags += f" --max_new_tokens {args.max_new_tokens} --max_num_seqs {args.max_num_seqs} --output_path {output}"
        command = [sys.executable, "-m", "openrlhf.cli.batch_inference", *flags.split()]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    found = SPEED.search(said)
    if not found:
        raise SystemExit(said[-3000:])
    return float(found[1].replace(",", "")), float(found[2])


def vllm_alone(args: argparse.Namespace) -> None:
    import torch
    import vllm

    rows = [json.loads(line) for line in args.data.read_text().splitlines()][: args.rows]
    engine = vllm.LLM(
        args.model,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=args.prompt_max_len + args.max_new_tokens,
        max_num_seqs=args.max_num_seqs,
        enforce_eager=not torch.cuda.is_available(),
    )
    tokenizer = engine.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row[args.input_key]}], add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    params = vllm.SamplingParams(max_tokens=args.max_new_tokens, temperature=1.0)
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    print("alone", sum(len(output.outputs[0].token_ids) for output in outputs), seconds, flush=True)


def report(name: str, tokens: float, seconds: float) -> None:
    print(f"{name:<18}{tokens:>10,.0f} tokens{seconds:>9.2f} s{tokens / seconds:>12,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
