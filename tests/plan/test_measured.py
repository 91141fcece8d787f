"""Plans agree with what was measured on one H200; docs/scale.md shows both."""

import pytest

from tools.scale_page import MEASURED

TOLERANCE = {"host": 0.2}  # of host memory; of the GPU: 0.1


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.what)
def test_a_plan_is_close_to_its_measurement(case):
    assert case.planned() == pytest.approx(case.measured, rel=TOLERANCE.get(case.counts, 0.1))
