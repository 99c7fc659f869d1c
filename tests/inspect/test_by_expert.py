"""What is kept of counts by expert."""

import math

import pytest

from octavo import E4M3, E5M2, Cast, Delayed, Dynamic, PerTensor
from octavo.inspect.rows import Row
from octavo.kernels.arguments import EXPONENTS, EXTREMES, SUMS

np = pytest.importorskip("numpy")

from octavo.inspect.by_expert import kept, severities  # noqa: E402

PLAIN = Row("0", "input", ("output", "grad_weight"), Cast(E4M3, PerTensor(), Dynamic()))
OF_EXPERTS = Row("1", "input", ("output", "grad_weight"), Cast(E4M3, PerTensor(), Dynamic()), 3, 10)
GRADIENT = Row("1", "grad_output", ("grad_input", "grad_weight"), Cast(E5M2, PerTensor(), Delayed()), 3, 20)


def test_sums_the_worst_and_tokens_are_kept() -> None:
    rows = [OF_EXPERTS, PLAIN, GRADIENT]
    random = np.random.default_rng(0)
    counts, extremes = random.random((7, len(SUMS) + EXPONENTS)), random.random((7, len(EXTREMES)))
    for name, value in {"zeros": 0, "flushed": 0, "clipped": 0, "nonfinite": 0, "power": 1e4, "error": 1}.items():
        counts[:, SUMS.index(name)] = value
    counts[:, 0] = [800, 0, 400, 50, 400, 0, 200]  # elements: tokens are those of the gradient, which is cast once
    counts[[0, 2], SUMS.index("flushed")] = 100
    counts[6, SUMS.index("nonfinite")] = 1
    found = kept(rows, counts, extremes)
    np.testing.assert_allclose(found["sums"][:, 0], [1200, 50, 600])
    np.testing.assert_allclose(found["exponents"][0], counts[:3, len(SUMS) :].sum(0), rtol=1e-6)
    np.testing.assert_allclose(found["extremes"][2], extremes[4:].max(0))
    assert found["worst"].tolist() == [[2, 2], [2, 1]] and found["tokens"].tolist() == [20, 0, 10]
    np.testing.assert_allclose(found["worst_sums"], counts[[2, 6], : len(SUMS)])
    assert "worst" not in kept([PLAIN], counts[:1], extremes[:1])


def test_severities_are_times_the_limits() -> None:
    fine = {"nonfinite": 0.0, "assumed": 1.0, "clipped": 0.0, "flushed": 0.0, "sqnr": 31.5}
    cases = [
        (PLAIN, {"flushed": 0.02}, 2),
        (PLAIN, {"clipped": 0.005}, 5),
        (PLAIN, {"assumed": 8.0}, 10**-0.6),  # a scale that is the tensor's own
        (GRADIENT, {"assumed": 8.0}, 4),
        (PLAIN, {"sqnr": 15.5}, 10),
        (PLAIN, {"nonfinite": 1e-9}, math.inf),
        (PLAIN, dict.fromkeys(fine, math.nan), -math.inf),
    ]
    measures = {name: np.array([{**fine, **given}[name] for _, given, _ in cases]) for name in fine}
    assert severities(measures, [row for row, *_ in cases]).tolist() == pytest.approx([value for *_, value in cases])
