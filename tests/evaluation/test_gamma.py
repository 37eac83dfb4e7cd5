"""γ equals the ratios that the AttnCache paper publishes."""

import pytest

from attncache_core.evaluation.comparison import gamma


@pytest.mark.parametrize(
    ("metric", "speedup", "published"),
    [
        pytest.param(0.3034, 1.45, 0.85, id="SAN"),
        pytest.param(0.3448, 1.39, 0.87, id="LazyFormer"),
        pytest.param(0.6775, 1.19, 0.04, id="AttnCache"),
    ],
)
def test_gamma_equals_the_published_ratios_of_llama_2_7b(metric, speedup, published):
    assert round(gamma(0.6860, metric, speedup), 2) == published


@pytest.mark.parametrize("speedup", [0.5, 1.0, 1.019])
def test_method_that_is_not_faster_has_no_gamma(speedup):
    assert gamma(0.7, 0.6, speedup) is None


def test_least_speedup_has_a_gamma():
    assert gamma(0.75, 0.5, 1.02) == pytest.approx(0.25 / 0.02)


def test_method_that_is_better_than_the_full_model_has_a_negative_gamma():
    assert gamma(0.5, 0.75, 1.5) == -0.5
