"""Plans agree with what was measured on one H200, and docs/scale.md shows both."""

import pytest

from tools.scale_page import MEASURED
from tools.write_reference import DOCS, scale_page

TOLERANCE = {"host": 0.2}  # of host memory; of the GPU: 0.1


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.what)
def test_a_plan_is_close_to_its_measurement(case):
    assert case.planned() == pytest.approx(case.measured, rel=TOLERANCE.get(case.counts, 0.1))


@pytest.mark.slow(seconds=6)
def test_the_committed_page_is_current():
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert scale_page() == page, "run: python tools/write_reference.py"
