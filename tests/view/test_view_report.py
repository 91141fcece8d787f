"""The report: one file with scripts, styles and data, which cannot be broken by what a model wrote."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from openrlhf.cli.view import main
from openrlhf.errors import DiskError
from openrlhf.view import report
from openrlhf.view.metrics import Points
from openrlhf.view.report import write_report
from openrlhf.view.runs import find_runs
from tests.view.made_runs import HOSTILE, make_run, record, write_metrics, write_step


class Page(HTMLParser):
    """Collects elements, and the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = len(self.tags) - 1 if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is not None:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    @property
    def data(self):
        (text,) = (text for place, text in self.texts.items() if self.tags[place][1].get("id") == "report")
        return json.loads(text)


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


def export(tmp_path, *folders, **options):
    write_report(tmp_path / "report.html", find_runs(folders), **options)
    return page_of(tmp_path / "report.html")


def test_the_command_writes_a_report_without_a_server(tmp_path, capsys):
    make_run(tmp_path / "grpo")
    main([str(tmp_path / "grpo"), "--export", str(tmp_path / "new" / "page.html")])
    assert capsys.readouterr().err == (
        f"openrlhf: wrote {tmp_path}/new/page.html: 1 run, in one file that any browser opens\n"
    )
    assert page_of(tmp_path / "new" / "page.html").data["runs"][0]["name"] == "grpo"


def test_a_report_has_curves_flags_samples_and_the_summary(tmp_path, agent_run, supervised_run):
    page = export(tmp_path, supervised_run, agent_run, title="Both", summary={"a<b": "1 -> 2"})
    assert (page.data["title"], page.data["summary"]) == ("Both", {"a<b": "1 -> 2"})
    supervised, agent = page.data["runs"]
    assert supervised["curves"]["train/gpt_loss"]["steps"] == [1, 2]
    assert supervised["samples"] == []
    assert agent["flags"]["n_samples_per_prompt"] == 4
    assert len(agent["samples"]) == 2 * 4 * 4  # steps, groups, samples
    assert all("".join(sample["texts"]) == sample["response"] for sample in agent["samples"])


def test_a_report_refers_to_nothing_outside_it(tmp_path):
    make_run(tmp_path / "grpo")
    for tag, attributes in export(tmp_path, tmp_path / "grpo").tags:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:"), tag


def test_hostile_texts_stay_inside_the_data(tmp_path):
    run_dir = make_run(tmp_path / "<script>", recorded=0)
    write_step(run_dir, 1, [record(1, 0, HOSTILE, prompt="<!-- --><script>x")])
    write_metrics(run_dir, [("train", 31, {"</script><script>alert(1)</script>": 1.0})])
    plain = export(tmp_path, make_run(tmp_path / "plain"), title="T")
    page = export(tmp_path, run_dir, title="</title><script>alert(1)</script>", summary={HOSTILE: HOSTILE})
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.data["runs"][0]["samples"][0]["response"] == HOSTILE


def test_the_policy_allows_exactly_the_scripts_and_styles_of_the_page(tmp_path):
    page = export(tmp_path, make_run(tmp_path / "a"))
    (policy,) = (attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall("'sha256-", policy)) == len(page.texts) - 1  # data needs no permission


def test_samples_of_a_report_are_bounded_and_spread(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "a", recorded=0)
    for step in range(1, 101):
        write_step(run_dir, step, [record(step, index, "abc") for index in range(5) for _ in range(20)])
    samples = export(tmp_path, run_dir).data["runs"][0]["samples"]
    steps = sorted({sample["step"] for sample in samples})
    assert (len(steps), steps[0], steps[-1]) == (report.MOST_STEPS, 1, 100)
    assert len(samples) == report.MOST_STEPS * report.MOST_GROUPS * report.MOST_SAMPLES
    assert len({sample["id"] for sample in samples}) == len(samples)
    monkeypatch.setattr(report, "MOST_TOKENS", 400)
    samples = export(tmp_path, run_dir).data["runs"][0]["samples"]
    assert {sample["step"] for sample in samples} == {82, 91, 100}
    assert 395 < sum(len(sample["ids"]) for sample in samples) <= 400
    monkeypatch.setattr(report, "MOST_TOKENS", 1)
    samples = export(tmp_path, run_dir).data["runs"][0]["samples"]
    assert [(sample["step"], sample["length"]) for sample in samples] == [(100, 3)]


def test_an_unreadable_file_is_left_out_of_a_report(tmp_path, capsys):
    run_dir = make_run(tmp_path / "a", recorded=2)
    (run_dir / "rollouts" / "step_000003.jsonl").mkdir()
    samples = export(tmp_path, run_dir).data["runs"][0]["samples"]
    assert {sample["step"] for sample in samples} == {1, 2}
    assert "some samples are not in the report: [Errno" in capsys.readouterr().err


def test_long_curves_are_thinned_out_and_keep_their_end():
    count = 3 * report.MOST_POINTS + 1
    thin = report._thin_out(Points(list(range(count)), [float(step) for step in range(count)]))
    assert len(thin.steps) <= report.MOST_POINTS
    assert thin.steps[-1] == count - 1
    assert thin.values == [float(step) for step in thin.steps]


def test_a_report_that_cannot_be_written_gives_one_error(tmp_path):
    runs = find_runs([make_run(tmp_path / "a")])
    with pytest.raises(DiskError, match=r"cannot be written: Is a directory"):
        write_report(Path(tmp_path), runs)
