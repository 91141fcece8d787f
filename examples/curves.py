"""A page with the curves of runs, drawn from their `metrics.jsonl`: plain HTML and SVG, no script, no network.

python examples/curves.py runs/quickstart/report.html runs/quickstart/{sft,rm,ppo,grpo}/run
"""

import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, EDGE = 460, 180, 34
CURVES = ("gpt_loss", "eval gpt_loss", "loss", "acc_mean", "reward", "score", "kl", "response_length", "critic_loss")
STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:1000px;color:#222}"
    "figure{display:inline-block;margin:0 1rem 1.5rem 0}figcaption{font-weight:600}"
    "svg{background:#f7f7f8;border-radius:6px}path{fill:none;stroke:#3b6ea5;stroke-width:1.6}"
    "text{font-size:11px;fill:#666}table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left}"
)


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every metric of a run as (step, value) pairs, training and evaluation together."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        row.pop("kind")
        for name, value in row.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def figure(name: str, points: Sequence[tuple[int, float]]) -> str:
    """One curve with its extremes at the axes."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    across = (WIDTH - 2 * EDGE) / max(max(steps) - min(steps), 1)
    up = (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)
    places = [(EDGE + (step - min(steps)) * across, HEIGHT - EDGE - (value - low) * up) for step, value in points]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    labels = (
        f'<text x="4" y="{EDGE}">{high:.3g}</text><text x="4" y="{HEIGHT - EDGE}">{low:.3g}</text>'
        f'<text x="{EDGE}" y="{HEIGHT - 10}">step {min(steps)}</text>'
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 10}" text-anchor="end">{max(steps)}</text>'
    )
    size = f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{html.escape(name)}"'
    return f'<figure><figcaption>{html.escape(name)}</figcaption><svg {size}>{labels}<path d="{path}"/></svg></figure>'


def table(rows: Mapping[str, str]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def write_page(path: Path, runs: Mapping[str, Path], title: str, summary: Mapping[str, str]) -> None:
    parts = [f"<h1>{html.escape(title)}</h1>", table(summary)]
    for name, run_dir in runs.items():
        curves = read(run_dir)
        wanted = [key for key in curves if key in CURVES or key.endswith("_pass1")]
        parts.append(f"<h2>{html.escape(name)}</h2>" + "".join(figure(key, curves[key]) for key in wanted))
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    path.write_text(f"{page}<style>{STYLE}</style>{''.join(parts)}</html>")


if __name__ == "__main__":
    target, *folders = map(Path, sys.argv[1:])
    write_page(target, {folder.parent.name: folder for folder in folders}, "Curves", {})
