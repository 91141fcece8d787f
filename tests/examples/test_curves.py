"""The page of curves: one figure per metric, evaluation separate from training, also for a single point."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_page_draws_every_curve(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "curves", raising=False)
    from curves import write_page

    rows = [{"kind": "train", "step": step, "acc_mean": step / 40, "lr": 1.0} for step in range(1, 31)]
    rows += [{"kind": "eval", "step": 30, "acc_mean": 0.5, "eval_a_pass1": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_page(tmp_path / "page.html", {"a<b": tmp_path}, "Title", {"one": "1 -> 2"})

    body = (tmp_path / "page.html").read_text().partition("</style>")[2].removesuffix("</html>")
    page = ElementTree.fromstring(f"<body>{body}</body>")
    assert page.find("h2").text == "a<b"
    assert [figure.find("figcaption").text for figure in page.iter("figure")] == [
        "acc_mean",
        "acc_mean (evaluation)",
        "eval_a_pass1",
    ]
    training, evaluation, _ = page.iter("svg")
    assert training.find("path").get("d").count("L") == 29
    assert training.find("circle") is None
    assert len(evaluation.findall("circle")) == 1
    assert [text.text for text in evaluation.findall("text")] == ["0.5", "step 30"]


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["page.html", "nowhere"], 2)])
def test_arguments_that_name_no_run_write_no_page(words, code, tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLES / "curves.py"), *words], cwd=tmp_path, capture_output=True)
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == []
