"""A preview as plain text, for terminals and log files; marked text is coloured, or in double brackets.

`render` returns the whole preview. `describe_row` returns the one line about the first row that every run prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from openrlhf.config.batch_table import Line
from openrlhf.config.batch_table import render as render_table
from openrlhf.data.preview import AnyRow, Bin, Preview, Segment, ShownRow, show_row
from openrlhf.data.report import DataReport, Finding
from openrlhf.data.rows import NUMBER, LabelText
from openrlhf.errors import counted
from openrlhf.monitor import SHOWN_CONTROLS
from openrlhf.types import Prompt

GREEN, RESET = "\x1b[32m", "\x1b[0m"
BAR = 40  # maximum characters of a bar
BRIEF = 120  # maximum characters of a segment in one line


def render(preview: Preview, steps: Sequence[Line], *, longest: int, colour: bool) -> str:
    """Return the preview of one flag as text; `steps` are the lines that depend on the command.

    Segments of more than `longest` characters are shortened in the middle.
    """
    report = preview.report
    parts = [f"--{preview.flag} {report.name}\n"]
    parts += [render_row(number, row, longest, colour=colour) for number, row in enumerate(preview.rows, 1)]
    parts.append(render_lengths(report, preview.histogram))
    parts.append("totals\n" + render_table([*totals(preview), *steps]) + "\n")
    parts.append(render_findings(preview.findings))
    return "\n".join(parts)


def render_row(number: int, row: ShownRow, longest: int, *, colour: bool) -> str:
    """Return a row with its label and its sequences, each indented under its name and number of tokens."""
    lines = [f"row {number}" + ("" if row.label is None else f", {abridge(row.label, longest)}")]
    for part in row.sequences:
        marked = "" if row.marks is None else f", {row.marks}: {part.marked}"
        name = "" if part.name == "row" else f"{part.name}, "
        lines.append(f"  {name}{counted(part.tokens, 'token')}{marked}")
        shown = [
            replace(segment, text=abridge(segment.text, longest).translate(SHOWN_CONTROLS)) for segment in part.segments
        ]
        text = "".join(paint(segment) if colour else mark(segment) for segment in shown)
        lines += [f"    | {line}" for line in text.split("\n")]
    return "\n".join(lines) + "\n"


def mark(segment: Segment) -> str:
    """Return a segment's text, in double brackets if it is marked."""
    return f"[[{with_label(segment)}]]" if segment.marked else segment.text


def paint(segment: Segment) -> str:
    """Return a segment's text, coloured if it is marked; each line separately, so that the margin stays plain."""
    if not segment.marked:
        return segment.text
    return "\n".join(f"{GREEN}{line}{RESET}" if line else "" for line in with_label(segment).split("\n"))


def with_label(segment: Segment) -> str:
    return segment.text if segment.label is None else f"{segment.text}: {segment.label}"


def abridge(text: str, longest: int) -> str:
    """Shorten text in the middle, because its start and its end are the most informative."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def render_lengths(report: DataReport, histogram: Sequence[Bin]) -> str:
    """Return the distribution of lengths before truncation, with a bar for each range."""
    lengths = report.lengths
    summary = (
        f"tokens per row before truncation: {min(lengths)} to {max(lengths)}, mean {statistics.fmean(lengths):.1f},"
        f" median {statistics.median(lengths):g}; the limit is {report.budget.tokens}"
    )
    ranges = [f"{bar.low} - {bar.high}" if bar.low < bar.high else str(bar.low) for bar in histogram]
    widest, most = max(map(len, ranges)), max(bar.rows for bar in histogram)
    count = len(f"{most:,}")
    lines = [summary]
    for tokens, bar in zip(ranges, histogram, strict=True):
        filled = "#" * -(-bar.rows * BAR // most)  # rounded up: a bar is empty only without rows
        lines.append(f"  {tokens:>{widest}}  {bar.rows:>{count},}  {filled}".rstrip())
    return "\n".join(lines) + "\n"


def totals(preview: Preview) -> list[Line]:
    report = preview.report
    lines = [
        Line("rows read", f"{report.read:,}", ""),
        Line("rows dropped", f"{report.dropped.total():,}", report.reasons),
        Line("rows used", f"{len(report.lengths):,}", ""),
        Line(
            "rows truncated", f"{report.truncated:,}", f"{report.tokens_cut:,} tokens cut" if report.truncated else ""
        ),
        Line("tokens", f"{preview.tokens:,}", "in the rows that are used, after truncation"),
    ]
    if preview.marks is not None:
        share = preview.marked / preview.tokens
        lines.append(Line(f"{preview.marks} tokens", f"{preview.marked:,}", f"{share:.0%} of the tokens"))
    return lines


def render_findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no warnings\n"
    lines = [f"warnings: {len(findings)}"]
    for number, finding in enumerate(findings, 1):
        lines.append(f"  {number}. {finding.problem}".translate(SHOWN_CONTROLS))
        if finding.try_this:
            lines.append(f"     Try: {finding.try_this}")
    return "\n".join(lines) + "\n"


def describe_row(row: AnyRow, tokenizer: PreTrainedTokenizerBase, label_text: LabelText = NUMBER) -> str:
    """Describe the first row of a run in one line, with its marked text in double brackets."""
    shown = show_row(row, tokenizer, label_text)
    what = "prompt" if isinstance(row, Prompt) else "row"
    texts: list[str] = []
    for part in shown.sequences:
        side = "" if part.name == what else f"{part.name} "
        text = "".join(mark(replace(segment, text=abridge(segment.text, BRIEF))) for segment in part.segments)
        texts.append(f"{side}{counted(part.tokens, 'token')}: {text!r}")
    label = [] if shown.label is None else [abridge(shown.label, BRIEF)]
    return f"the first {what}, {'; '.join(texts + label)}"
