"""The work of a GPU during a step: kernels by kind, idle gaps, and a picture of both.

Times are seconds from the start of the recording.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {  # kind of work -> pattern of a kernel's name, tried in this order
    "copies": r"memcpy|memset",
    "attention": r"flash|attn|attention|fmha",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|matmul|addmm|\bmm\b",
    "optimizer": r"adam|multi_tensor|foreach",
    "softmax, sampling": r"sampl|softmax|topk|sort|exponential|argmax|gumbel",
    "other": r"",
}
COLORS = ("#9aa0a6", "#7b4fa3", "#2f6db3", "#c7792b", "#3c9d74", "#c4cad0")  # colours of the kinds, in order
PHASE_COLORS = ("#e3e8ee", "#d3dae2")
WIDTH, LEFT, TOP, BAR, AREA = 960, 60, 24, 26, 160  # sizes of the picture, in pixels
BINS = 480


@dataclass(frozen=True)
class Span:
    """A kernel or a phase of the step."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def kernel_profiler() -> profile:
    """Return a profiler of the kernels on the GPU; without a GPU, of PyTorch's operators on the CPU."""
    return profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])


def recorded_kernels(profiler: profile) -> list[Span]:
    """Return the kernels or operators that ran while `kernel_profiler` recorded."""
    device = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else torch.autograd.DeviceType.CPU
    results: Any = profiler.profiler.kineto_results
    start = results.trace_start_ns()
    return [
        Span(event.name(), (event.start_ns() - start) / 1e9, (event.end_ns() - start) / 1e9)
        for event in results.events()
        if event.device_type() == device
    ]


@cache
def kind_of(kernel: str) -> str:
    """Return the kind of work that a kernel does, judged by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def longest(kernels: Iterable[Span], count: int) -> list[tuple[str, float, int]]:
    """Return the kernels with the most time in total: name, seconds and number of calls."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        seconds[kernel.name] += kernel.seconds
        calls[kernel.name] += 1
    most = sorted(seconds, key=lambda name: -seconds[name])[:count]
    return [(name, seconds[name], calls[name]) for name in most]


def gaps(kernels: Iterable[Span], phase: Span) -> list[Span]:
    """Return the times within a phase at which no kernel ran, in order; kernels may overlap."""
    found, free = [], phase.start
    for kernel in sorted(kernels, key=lambda span: span.start):
        if kernel.end <= phase.start or kernel.start >= phase.end:
            continue
        if kernel.start > free:
            found.append(Span("idle", free, kernel.start))
        free = max(free, kernel.end)
    if free < phase.end:
        found.append(Span("idle", free, phase.end))
    return found


def summary(kernels: Sequence[Span], phases: Sequence[Span], count: int = 12) -> str:
    """Return tables in Markdown: how busy each phase is, its longest gaps, and the longest kernels."""
    lines = ["| phase | seconds | GPU busy | gaps over 1 ms | longest gap, ms |", "|---|---|---|---|---|"]
    for phase in phases:
        idle = gaps(kernels, phase)
        busy = 1 - sum(gap.seconds for gap in idle) / phase.seconds if phase.seconds else 0.0
        most = max((gap.seconds for gap in idle), default=0.0)
        wide = sum(gap.seconds > 1e-3 for gap in idle)
        lines.append(f"| {phase.name} | {phase.seconds:.2f} | {busy:.0%} | {wide} | {1000 * most:.1f} |")
    total = sum(kernel.seconds for kernel in kernels)
    lines += ["", "| kernel | kind | seconds | share | calls |", "|---|---|---|---|---|"]
    for name, seconds, calls in longest(kernels, count):
        short = (name if len(name) <= 70 else name[:67] + "...").replace("|", "/")
        lines.append(f"| `{short}` | {kind_of(name)} | {seconds:.3f} | {seconds / total:.1%} | {calls:,} |")
    return "\n".join(lines)


def busy_shares(kernels: Iterable[Span], end: float, bins: int = BINS) -> dict[str, list[float]]:
    """Return for each kind the share of every bin of time in which its kernels ran; overlaps count twice."""
    shares = {kind: [0.0] * bins for kind in KINDS}
    width = end / bins
    for kernel in kernels:
        row = shares[kind_of(kernel.name)]
        first, last = (min(bins - 1, max(0, int(place / width))) for place in (kernel.start, kernel.end))
        for place in range(first, last + 1):
            row[place] += max(0.0, min(kernel.end, (place + 1) * width) - max(kernel.start, place * width)) / width
    return shares


def picture(kernels: Sequence[Span], phases: Sequence[Span], title: str) -> str:
    """Return an SVG: the phases of a step as bars, and below them the kinds of kernels over time, stacked."""
    end = max(phase.end for phase in phases)
    shares = busy_shares(kernels, end)
    scale, base = (WIDTH - LEFT - 20) / end, TOP + BAR + 14 + AREA
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for number, phase in enumerate(phases):
        x, width = LEFT + scale * phase.start, scale * phase.seconds
        color = PHASE_COLORS[number % len(PHASE_COLORS)]
        label = f"{phase.name} {phase.seconds:.2f} s"
        parts.append(f'<rect x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
        if width > 7 * len(label):
            parts.append(f'<text x="{x + 6:.1f}" y="{TOP + 17}">{escape(label)}</text>')
    below = [0.0] * BINS
    for (kind, row), color in zip(shares.items(), COLORS, strict=True):
        above = [min(1.0, low + share) for low, share in zip(below, row, strict=True)]
        parts.append(
            f'<path d="{outline(below, above, base, scale * end)}" fill="{color}"><title>{kind}</title></path>'
        )
        below = above
    parts += axes(end, scale, base)
    parts += legend(base + 44)
    height = base + 62
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def outline(below: Sequence[float], above: Sequence[float], base: float, width: float) -> str:
    """Return the path around the area between two curves of shares."""
    xs = [LEFT + width * (place + 0.5) / len(above) for place in range(len(above))]
    there = [f"{x:.1f} {base - AREA * share:.1f}" for x, share in zip(xs, above, strict=True)]
    back = [f"{x:.1f} {base - AREA * share:.1f}" for x, share in zip(xs, below, strict=True)][::-1]
    return "M" + " L".join(there + back) + " Z"


def axes(end: float, scale: float, base: float) -> list[str]:
    """Return ticks of about ten times, and of an idle and a busy GPU."""
    unit = next(unit for unit in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if end / unit <= 12)
    left = f'x="{LEFT - 8}" text-anchor="end"'
    parts = [f'<text {left} y="{base + 4:.0f}">idle</text>', f'<text {left} y="{base - AREA + 4:.0f}">busy</text>']
    for tick in range(int(end / unit) + 1):
        x = LEFT + scale * tick * unit
        parts.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 5}" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 19}" text-anchor="middle">{tick * unit:g} s</text>')
    return parts


def legend(y: float) -> list[str]:
    """Return a square and a name for each kind."""
    parts, x = [], float(LEFT)
    for kind, color in zip(KINDS, COLORS, strict=True):
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y:.0f}">{kind}</text>')
        x += 34 + 7 * len(kind)
    return parts
