"""Assemble the page: served with links to its files, or as one file that contains everything.

Scripts are modules that import each other as "view/NAME.js". An import map locates them: next to the served page or, in
a report, inside the page as data: URLs. The content security policies allow exactly these scripts and styles; nothing
can be loaded from, or sent to, another address.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"
PLOT = "vendor/uplot/uPlot.iife.min.js"
STYLES = ("vendor/uplot/uPlot.min.css", "style.css", "curves.css", "samples.css")
TYPES = {".js": "text/javascript", ".css": "text/css"}
ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path d='M1 13 5 8l3 2 7-8' fill='none' "
    "stroke='#2f6fde' stroke-width='2.4' stroke-linecap='round' stroke-linejoin='round'/></svg>"
)
START = 'import "view/app.js";'


@dataclass(frozen=True)
class Page:
    """An HTML page and the policy to serve it with."""

    html: str
    policy: str


def served_files() -> frozenset[str]:
    """Return the files that the served page links to, by their path below /static/."""
    return frozenset((PLOT, *STYLES, *(path.name for path in STATIC.glob("*.js"))))


def served_page() -> Page:
    """Return the page with links to its files."""
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    places = json.dumps({"imports": {"view/": "/static/"}})
    scripts = (
        f'<script type="importmap">{places}</script><script src="/static/{PLOT}"></script>'
        '<script type="module" src="/static/app.js"></script>'
    )
    policy = (
        f"default-src 'none'; script-src 'self' {_hash(places)}; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(_fill("openrlhf view", styles, scripts), policy)


def report_page(title: str, data: bytes) -> str:
    """Return the page as one file; `data` is JSON for its scripts."""
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in STYLES]
    modules = {f"view/{path.name}": _data_url(path.read_bytes()) for path in sorted(STATIC.glob("*.js"))}
    places, plot = json.dumps({"imports": modules}), (STATIC / PLOT).read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src data: {_hashes([places, plot, START])}; style-src {_hashes(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += "".join(f"<style>{style}</style>" for style in styles)
    # "<" occurs in JSON only inside strings, and as \u003c it cannot end the script or begin a comment.
    inert = data.decode("ascii").replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="report">{inert}</script><script type="importmap">{places}</script>'
        f'<script>{plot}</script><script type="module">{START}</script>'
    )
    return _fill(title, head, scripts)


def _fill(title: str, head: str, scripts: str) -> str:
    """Fill the template; all parts are inserted in one pass, so text in a part is never mistaken for a placeholder."""
    icon = f'<link rel="icon" href="{_data_url(ICON.encode(), "image/svg+xml")}">'
    before, _, rest = (STATIC / "index.html").read_text(encoding="utf-8").partition("<!-- head -->")
    body, _, after = rest.partition("<!-- scripts -->")
    return f"{before}<title>{html.escape(title)}</title>{icon}{head}{body}{scripts}{after}"


def _data_url(content: bytes, media_type: str = "text/javascript") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _hash(text: str) -> str:
    """Return the source expression of a content security policy that allows exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _hashes(texts: Sequence[str]) -> str:
    return " ".join(map(_hash, texts))
