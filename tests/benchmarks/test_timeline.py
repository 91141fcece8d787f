from xml.etree import ElementTree

import pytest
from timeline import KINDS, Span, busy_shares, gaps, kind_of, longest, picture, summary

PHASES = [Span("generation", 0.0, 1.0), Span("training", 1.0, 3.0)]
KERNELS = [
    Span("flash_fwd", 0.5, 1.0),
    Span("nvjet_gemm", 1.25, 2.0),
    Span("nvjet_gemm", 1.5, 2.5),  # overlaps the other one
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNT", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_gumbel_sample_kernel", "softmax, sampling"),
        ("triton_poi_fused_mul_silu_0", "other"),
    ],
)
def test_kernels_are_sorted_by_name(name, kind):
    assert kind_of(name) == kind


def test_gaps_are_the_times_without_any_kernel():
    assert gaps(KERNELS, PHASES[0]) == [Span("idle", 0.0, 0.5)]
    assert gaps(KERNELS, PHASES[1]) == [Span("idle", 1.0, 1.25), Span("idle", 2.5, 3.0)]
    assert gaps([], PHASES[0]) == [Span("idle", 0.0, 1.0)]


def test_calls_of_a_kernel_are_added():
    assert longest(KERNELS, 1) == [("nvjet_gemm", 1.75, 2)]


def test_the_summary_says_how_busy_each_phase_is():
    lines = summary(KERNELS, PHASES).splitlines()
    assert lines[2:4] == ["| generation | 1.00 | 50% | 1 | 500.0 |", "| training | 2.00 | 62% | 2 | 500.0 |"]
    assert lines[7] == "| `nvjet_gemm` | matrix products | 1.750 | 77.8% | 2 |"


def test_shares_add_up_to_the_seconds_of_the_kernels():
    shares = busy_shares(KERNELS, end=3.0, bins=7)
    assert sum(map(sum, shares.values())) * 3 / 7 == pytest.approx(2.25)
    assert sum(shares["attention"]) * 3 / 7 == pytest.approx(0.5)


def test_the_picture_names_phases_and_kinds():
    root = ElementTree.fromstring(picture(KERNELS, PHASES, "a <step>"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <step>", "generation 1.00 s", "training 2.00 s", *KINDS} <= set(texts)
