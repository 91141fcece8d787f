"""Memory of loading a model with --backend fsdp: no process may hold the whole model.

    torchrun --nproc_per_node 4 benchmarks/sharded_loading.py [--layers 16] [--hidden 1024] [--whole]
    torchrun --nproc_per_node 4 benchmarks/sharded_loading.py --experts 16 [--expert_parallel_size 4]

The first process writes a model with random weights (fp32; Llama or, with experts, Qwen3-MoE) to a temporary folder.
Then each process loads and shards it on the CPU, while a thread samples its anonymous memory (RssAnon; pages of mapped
files do not count). Each process prints the peak above the level before loading, and the limit: its shard, one layer,
and 500 MB. The script fails if a process exceeds the limit. `--whole` loads the model as a whole first, for comparison.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from openrlhf.config.sections.model import ModelFlags
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm
from openrlhf.training.compilation import decoder_layers
from openrlhf.training.fsdp_shards import local_shard, shard_network
from openrlhf.training.processes import start_processes

SLACK = 500 * 10**6  # bytes
INTERVAL = 0.001  # seconds between two samples


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class PeakMemory:
    """Samples the anonymous memory in a thread while the context is open."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while not self.done.wait(INTERVAL):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *unused: object) -> None:
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, anonymous_bytes())


def write_model(folder: Path, layers: int, hidden: int, experts: int) -> None:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "vocab_size": 16_000,
        "dtype": torch.float32,
    }
    config = LlamaConfig(**shape)
    if experts:
        config = Qwen3MoeConfig(**shape, num_experts=experts, moe_intermediate_size=4 * hidden // experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="500MB")


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--expert_parallel_size", type=int, default=1)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    device = start_processes(torch.device("cpu"))
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        if rank == 0:
            write_model(Path(own), args.layers, args.hidden, args.experts)
        dist.barrier()
        with PeakMemory() as memory:
            model = load_causal_lm(shared[0], ModelFlags(), device=device, packing=False, defer=not args.whole)
            network = Network(model, self_test=False)
            layer, whole = (bytes_of(list(part.parameters())) for part in (decoder_layers(network)[0], network))
            shard_network(network, device, expert_parallel_size=args.expert_parallel_size)
        dist.barrier()
    shard = bytes_of([local_shard(parameter) for parameter in network.parameters()])
    added, limit = memory.peak - memory.before, shard + layer + SLACK
    sizes = {"model": whole, "shard": shard, "layer": layer, "limit": limit}
    shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
    print(f"rank {rank}: peak {added / 1e6:.0f} MB above {memory.before / 1e6:.0f} MB; {shown}", flush=True)
    dist.destroy_process_group()
    sys.exit(added > limit)


if __name__ == "__main__":
    main()
