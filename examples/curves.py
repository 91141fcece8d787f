"""Write a page with the training curves of runs from their `metrics.jsonl`: plain HTML and SVG, no scripts, no network.

python examples/curves.py runs/quickstart/report.html runs/quickstart/{sft,rm,ppo,grpo}/run
"""

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT = 460, 190
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 16, 30  # margins around a curve; the left one fits the longest number
FEW = 12  # curves with at most this many points get a marker for each
CURVES = ("gpt_loss", "eval gpt_loss", "loss", "acc_mean", "reward", "score", "kl", "response_length", "critic_loss")
EVALUATION = " (evaluation)"
STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;color:#222}"
    "section{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(26rem,100%),1fr));gap:1.2rem}"
    "h2{margin:2rem 0 .8rem}figure{margin:0}figcaption{font-weight:600;margin-bottom:.3rem}"
    "svg{display:block;width:100%;height:auto;background:#f7f7f8;border-radius:6px}"
    "path{fill:none;stroke:#3b6ea5;stroke-width:1.6;stroke-linejoin:round}circle{fill:#3b6ea5}line{stroke:#ddd}"
    "text{font-size:11px;fill:#666}table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left}"
)


def read(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every metric of a run as (step, value) pairs; evaluation metrics are kept apart from training metrics."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        step, kind = row.pop("step"), row.pop("kind")
        for name, value in row.items():
            known = kind == "train" or name.startswith("eval")
            curves.setdefault(name if known else name + EVALUATION, []).append((step, value))
    return curves


def figure(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Draw one curve, with its minimum and maximum on the axes."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    across = (WIDTH - LEFT - RIGHT) / max(max(steps) - min(steps), 1)
    up = (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)
    places = [(LEFT + (step - min(steps)) * across, HEIGHT - BOTTOM - (value - low) * up) for step, value in points]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places) if len(places) <= FEW else ""
    heights = {HEIGHT - BOTTOM: low} | ({TOP: high} if high > low else {})
    labels = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.3g}</text>'
        for y, value in heights.items()
    )
    ends = {f'x="{LEFT}"': f"step {min(steps)}"}
    if max(steps) > min(steps):
        ends[f'x="{WIDTH - RIGHT}" text-anchor="end"'] = str(max(steps))
    labels += "".join(f'<text {place} y="{HEIGHT - 10}">{text}</text>' for place, text in ends.items())
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}"'
    drawn = f'<svg {size}>{labels}<path d="{path}"/>{marks}</svg>'
    return f"<figure><figcaption>{html.escape(name)}</figcaption>{drawn}</figure>"


def table(rows: Mapping[str, str]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def is_evaluated(key: str) -> bool:
    return key.startswith("eval_") and key.endswith(("_pass1", "_reward"))


def write_page(path: Path, runs: Mapping[str, Path], title: str, summary: Mapping[str, str]) -> None:
    parts = [f"<h1>{html.escape(title)}</h1>", table(summary)]
    for name, run_dir in runs.items():
        curves = read(run_dir)
        wanted = [key for key in curves if key.removesuffix(EVALUATION) in CURVES or is_evaluated(key)]
        figures = "".join(figure(key, curves[key]) for key in wanted)
        parts.append(f"<h2>{html.escape(name)}</h2><section>{figures}</section>")
    page = '<!doctype html><html lang="en"><meta charset="utf-8">'
    page += f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    path.write_text(f"{page}<style>{STYLE}</style>{''.join(parts)}</html>", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="the HTML file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, each with a metrics.jsonl")
    args = parser.parse_args()
    for folder in args.runs:
        if not (folder / "metrics.jsonl").is_file():
            parser.error(f"{folder}: contains no metrics.jsonl. Try: the folder `run` inside a run's --save_path")
    write_page(args.page, {folder.parent.name: folder for folder in args.runs}, "Curves", {})
