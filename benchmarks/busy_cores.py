"""Milliseconds of a training step on a CPU while other programs use the cores, by the spin count of OpenMP's threads.

    python benchmarks/busy_cores.py [--busy 2] [--threads 2]

A thread of libgomp that waits for another one spins before it sleeps. If other programs need the cores, it spins away
the time in which the other one could run. For each spin count (GOMP_SPINCOUNT; our commands set 2000), a separate
process trains a Llama of 0.9M parameters, next to 0, 1, ... processes that keep a core busy.
"""

import argparse
import os
import subprocess
import sys
import time

SPIN_COUNTS = ("default", "20000", "2000", "0")
SECONDS = 6.0


def train() -> None:
    """Print the milliseconds of a step; runs in a separate process, because libgomp reads the variable only once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes))
    rows = torch.randint(200, (32, 24))

    def step() -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        model.zero_grad()

    for _ in range(3):
        step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        step()
        steps += 1
    print(f"{1000 * (time.perf_counter() - began) / steps:.0f}")


def measure(spin_count: str, threads: int) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environ |= {"OMP_NUM_THREADS": str(threads)}
    environ |= {} if spin_count == "default" else {"GOMP_SPINCOUNT": spin_count}
    command = [sys.executable, __file__, "--train"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="most processes that use the cores")
    parser.add_argument("--threads", type=int, default=2, help="threads of the training process")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train()
        return
    print("| busy processes | " + " | ".join(f"{count}, ms" for count in SPIN_COUNTS) + " | one thread, ms |")
    print("|---" * (len(SPIN_COUNTS) + 2) + "|")
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for count in range(args.busy + 1):
            cells = [measure(spin_count, args.threads) for spin_count in SPIN_COUNTS] + [measure("default", 1)]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
            busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    finally:
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
