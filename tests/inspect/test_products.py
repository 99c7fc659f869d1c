"""Products of gradients and their cosines, and what 0, NaN and 1 mean among them."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("numpy")

from octavo.distributed.ranks import Ranks
from octavo.inspect.products import RankSums, cosines_of

DOUBLE = torch.float64


def test_products_of_layers_and_of_all_others_together() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    pairs = [*zip(a, b, strict=True)]
    pairs[1] = None, b[1]  # type: ignore[call-overload]
    products = RankSums(nn.Linear(1, 1), Ranks()).products(pairs, layers=3)
    x, y = a.double(), b.double()
    expected = torch.stack([torch.stack([(p * q).sum(), (p * p).sum(), (q * q).sum()]) for p, q in zip(x, y)])  # noqa: B905
    expected[1] = 0  # a run has no gradient: nothing is compared
    torch.testing.assert_close(products, torch.cat([expected[:3], expected[3:].sum(0, keepdim=True)]))
    cosines = cosines_of(products)
    assert cosines[1] == 1  # of two zeros: no error
    of_first = nn.functional.cosine_similarity(x[0].flatten(), y[0].flatten(), dim=0)
    torch.testing.assert_close(cosines[0], of_first)


@pytest.mark.parametrize(
    ("products", "cosine"),
    [
        ([6.0, 4.0, 9.0], 1.0),
        ([-3.0, 4.0, 9.0], -0.5),
        ([0.0, 0.0, 9.0], 0.0),  # one run's gradient alone is 0
        ([0.0, 4.0, 0.0], 0.0),
        ([0.0, 0.0, 0.0], 1.0),
        ([math.nan, math.nan, 9.0], 1.0),
        ([math.inf, math.inf, 9.0], 1.0),
    ],
)
def test_a_cosine_below_a_limit_is_an_error(products: list[float], cosine: float) -> None:
    assert float(cosines_of(torch.tensor([products], dtype=DOUBLE))) == pytest.approx(cosine)


def test_squares_of_gradients_that_are_there() -> None:
    squares = RankSums(nn.Linear(1, 1), Ranks()).squares([torch.full((2, 2), 3.0), None])
    assert squares.dtype == DOUBLE and squares.tolist() == [36, 0]
