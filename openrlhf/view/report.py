"""Write the viewer's page as one file: charts, flags and a bounded number of samples.

The file needs neither a server nor a network, so it can be mailed, archived and opened anywhere. Long curves are
thinned out, and samples come from steps spread over the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.errors import DiskError
from openrlhf.monitor import say
from openrlhf.view.metrics import START, Points, read_metrics
from openrlhf.view.page import report_page
from openrlhf.view.records import RecordFile, Sample, SampleRecords
from openrlhf.view.runs import RunFolder
from openrlhf.view.token_texts import TokenTexts
from openrlhf.view.viewer import ShownSample, shown_sample, to_json

MOST_POINTS = 2000  # per curve
MOST_STEPS = 12  # steps of a run whose samples are shown
MOST_GROUPS = 4  # per step
MOST_SAMPLES = 16  # per group
MOST_TOKENS = 60_000  # per run


@dataclass(frozen=True)
class ReportRun:
    """A run in a report."""

    id: int
    name: str
    folder: str
    curves: Mapping[str, Points]
    flags: Mapping[str, object]
    samples: Sequence[ShownSample]


@dataclass(frozen=True)
class Report:
    """All data of a report; `summary` is a table of names and values above the charts."""

    title: str
    summary: Mapping[str, str]
    runs: Sequence[ReportRun]


def write_report(
    path: Path, runs: Sequence[RunFolder], *, title: str = "Runs", summary: Mapping[str, str] | None = None
) -> None:
    """Write a self-contained HTML page with the curves and some samples of runs."""
    report = Report(title, summary or {}, [_report_run(number, run) for number, run in enumerate(runs)])
    page = report_page(title, to_json(report))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error


def _report_run(number: int, run: RunFolder) -> ReportRun:
    chosen = _choose_samples(SampleRecords(run.rollouts))
    tokens = TokenTexts(run)
    # The numbers of samples are unique in the whole report.
    shown = [shown_sample(number * 1_000_000 + place, sample, tokens) for place, sample in enumerate(chosen)]
    curves = {name: _thin_out(points) for name, points in _all_curves(run).items()}
    return ReportRun(number, run.name, str(run.folder), curves, run.config().flags, shown)


def _all_curves(run: RunFolder) -> dict[str, Points]:
    """Return all points of a run's curves."""
    curves: dict[str, Points] = {}
    position, more = START, True
    while more:
        part = read_metrics(run.metrics, position)
        position, more = part.position, part.more
        for name, points in part.curves.items():
            known = curves.setdefault(name, Points())
            known.steps.extend(points.steps)
            known.values.extend(points.values)
    return curves


def _thin_out(points: Points) -> Points:
    """Keep every n-th point and the last one."""
    count = len(points.steps)
    every = -(-count // MOST_POINTS)
    kept = [place for place in range(count) if (count - 1 - place) % every == 0]
    return Points([points.steps[place] for place in kept], [points.values[place] for place in kept])


def _choose_samples(records: SampleRecords) -> list[Sample]:
    """Return the first groups of some steps, including the first and the last step, up to MOST_TOKENS tokens."""
    files = _spread(records.files(), MOST_STEPS)
    chosen: list[Sample] = []
    room = MOST_TOKENS
    for file in reversed(files):  # the latest first, because they matter most if tokens run out
        samples: list[Sample] = []
        try:
            for sample in _first_groups(records, file):
                room -= len(sample.ids)
                if room < 0 and (samples or chosen):  # one sample is always shown
                    return samples + chosen
                samples.append(sample)
        except OSError as error:
            say(f"some samples are not in the report: {error}")
        chosen = samples + chosen
    return chosen


def _spread(files: Sequence[RecordFile], most: int) -> list[RecordFile]:
    """Return at most this many files at equal distances, including the first and the last."""
    if len(files) <= most:
        return list(files)
    return [files[round(place * (len(files) - 1) / (most - 1))] for place in range(most)]


def _first_groups(records: SampleRecords, file: RecordFile) -> Iterator[Sample]:
    """Yield samples of the first groups in a file."""
    counts: dict[int, int] = {}
    for record in records.read(file.name):
        sample = record.sample
        if sample is None:
            continue
        if sample.prompt_index not in counts and len(counts) == MOST_GROUPS:
            return
        counts[sample.prompt_index] = counts.get(sample.prompt_index, 0) + 1
        if counts[sample.prompt_index] <= MOST_SAMPLES:
            yield sample
