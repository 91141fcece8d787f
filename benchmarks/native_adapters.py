"""Compare giving vLLM adapters with giving it merged weights: the seconds of one rollout.

    python benchmarks/native_adapters.py [--rank 32]     64 prompts x 8 samples of 512 tokens, the 1.5B shape, one GPU
    python benchmarks/native_adapters.py --tiny          a small shape on a CPU, to try the script

Merged weights cost a merge and a transfer after each step, which take about as long as reading the model once. Adapters
cost two more small matrix products per linear layer for each generated token. Each way runs in a separate process: the
same prompts, the engine with and without a LoRA request for an adapter of all linear layers.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from workload_files import read_prompts, write_files
from workloads import Workload, find_workload

REPEATS = 3  # the first one captures CUDA graphs and compiles


def make_adapter(folder: Path, rank: int) -> float:
    """Write an adapter for the model; return the seconds that merging all its matrices takes on the device."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").to(device)
    model = get_peft_model(base, LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(folder / "adapter")
    for _ in range(2):  # the first time loads kernels
        start = time.perf_counter()
        model.merge_adapter()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        model.unmerge_adapter()
    return seconds


def generate(folder: Path, workload: Workload, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each rollout; runs in a separate process."""
    import vllm
    from transformers import AutoTokenizer
    from vllm.lora.request import LoRARequest

    adapters = {"enable_lora": True, "max_lora_rank": args.rank, "max_loras": 1} if args.native else {}
    engine = vllm.LLM(
        str(folder / "model"),
        dtype="float32" if args.tiny else "bfloat16",
        max_model_len=workload.context,
        gpu_memory_utilization=0.5,
        max_num_seqs=workload.num_samples,
        enforce_eager=args.tiny,
        **adapters,
    )
    length = workload.longest
    params = vllm.SamplingParams(max_tokens=length, min_tokens=length, temperature=1.0, logprobs=0, detokenize=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = [tokenizer(text)["input_ids"] for text in read_prompts(folder)[: workload.prompts]]
    prompts = [{"prompt_token_ids": row} for row in ids for _ in range(workload.samples)]
    request = LoRARequest("policy", 1, str(folder / "adapter")) if args.native else None
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        engine.generate(prompts, params, lora_request=request, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--native", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    workload = find_workload("W1", tiny=args.tiny)
    if args.folder:
        print("seconds", *(f"{value:.3f}" for value in generate(args.folder, workload, args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder, workload, steps=1)
        print(f"merging all adapters: {make_adapter(folder, args.rank):.3f} s", flush=True)
        for way in ([], ["--native"]):
            command = [sys.executable, __file__, "--folder", str(folder), "--rank", str(args.rank), *way]
            command += ["--tiny"] if args.tiny else []
            printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found = next(line for line in printed.splitlines() if line.startswith("seconds"))
            print(f"{'adapters in vLLM' if way else 'merged weights':>17}: {found}", flush=True)


if __name__ == "__main__":
    main()
