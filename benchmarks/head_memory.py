"""Log-probs through a vocabulary head, forward and backward: time and peak memory against the full computation.

    python benchmarks/head_memory.py [--device cuda] [--tokens 16384 --hidden 1536 --vocab 151936] [--repeats 5]
                                     [--frozen] [--chunk 1024]

"full" holds [tokens, vocabulary] as `logits.float().log_softmax(-1)` does. "ours" is `openrlhf.models.chunks` on a
plain linear head; "ours, any head" is its variant for heads with adapters, caps or shards. With --frozen, the weight is
not trained, as under LoRA. The peak excludes inputs and weights. Every method returns their gradients, so a second
column excludes these as well. On a GPU the allocator is measured, on a CPU the resident memory of the process.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from openrlhf.models.chunks import CHUNK, token_log_probs

GIB = 1024**3
DEFAULTS = {"cuda": (16_384, 1536, 151_936, torch.bfloat16), "cpu": (2048, 512, 32_000, torch.float32)}
Method = Callable[[Tensor, Tensor, nn.Linear], Tensor]


def full(hidden: Tensor, targets: Tensor, head: nn.Linear) -> Tensor:
    return head(hidden).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def methods(chunk: int) -> dict[str, Method]:
    return {
        "full": full,
        "ours": lambda hidden, targets, head: token_log_probs(hidden, targets, head, chunk=chunk),
        "ours, any head": lambda hidden, targets, head: token_log_probs(
            hidden, targets, lambda states: head(states), chunk=chunk
        ),
    }


class Case:
    """Inputs of one shape, and the measured pass over them."""

    def __init__(
        self, tokens: int, hidden: int, vocab: int, device: torch.device, dtype: torch.dtype, *, frozen: bool
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.hidden = torch.randn(tokens, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
        self.head = nn.Linear(hidden, vocab, bias=False, device=device, dtype=dtype).requires_grad_(not frozen)
        with torch.no_grad():
            self.head.weight.normal_(std=hidden**-0.5, generator=generator)
        self.targets = torch.randint(vocab, (tokens,), generator=generator, device=device)
        self.importance = torch.rand(tokens, generator=generator, device=device) / tokens

    def run(self, method: Method) -> Tensor:
        self.hidden.grad = self.head.weight.grad = None
        log_probs = method(self.hidden, self.targets, self.head)
        (log_probs * self.importance).sum().backward()
        return log_probs.detach()

    @property
    def trained(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.head.weight) if tensor.requires_grad]

    def gradients(self) -> list[Tensor]:
        return [tensor.grad for tensor in self.trained if tensor.grad is not None]

    @property
    def gradient_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.trained)


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_bytes(case: Case, method: Method) -> int:
    """Return the peak memory of one pass, above the memory before it."""
    case.hidden.grad = case.head.weight.grad = None
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run(method)
        return torch.cuda.max_memory_allocated() - before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the high-water mark
    case.run(method)
    return resident("VmHWM") - before


def seconds(case: Case, method: Method) -> float:
    start = time.perf_counter()
    case.run(method)
    if case.hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def distance(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest error relative to the norm of the expected tensor."""
    pairs = zip(got, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def measure(case: Case, compared: dict[str, Method], repeats: int) -> None:
    print(f"{'':16} {'peak GiB':>9} {'- gradients':>12} {'ms':>9} {'time':>7} {'error':>9}")
    peaks = {}
    for name, method in compared.items():
        case.run(method)
        peaks[name] = peak_bytes(case, method)
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(repeats):  # interleaved, so that a slow moment of the machine affects all methods
        for name, method in compared.items():
            times[name].append(seconds(case, method))
    base = statistics.median(times["full"])
    expected = (case.run(full), *case.gradients())
    for name, method in compared.items():
        error = distance((case.run(method), *case.gradients()), expected)
        median, peak = statistics.median(times[name]), peaks[name]
        print(
            f"{name:16} {peak / GIB:9.2f} {(peak - case.gradient_bytes) / GIB:12.2f} {1000 * median:9.1f} "
            f"{median / base:6.2f}x {error:9.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens, hidden, vocab, dtype = DEFAULTS[device.type]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sizes = (args.tokens or tokens, args.hidden or hidden, args.vocab or vocab)
    case = Case(*sizes, device, dtype, frozen=args.frozen)
    print(
        f"{case.hidden.shape[0]} tokens, hidden {case.hidden.shape[1]}, vocabulary {case.head.out_features}, {dtype}, "
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else f'{torch.get_num_threads()} threads'}"
    )
    measure(case, methods(args.chunk), args.repeats)


if __name__ == "__main__":
    main()
