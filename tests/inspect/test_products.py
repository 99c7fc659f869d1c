"""Products of gradients and their cosines, and what 0, NaN and 1 mean among them."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("numpy")

from octavo.distributed.ranks import Ranks
from octavo.inspect.products import Products, RankSums, cosines_of

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
    torch.testing.assert_close(products.layers, expected[:3])
    torch.testing.assert_close(products.others, expected[3:].sum(0, keepdim=True))
    torch.testing.assert_close(products.norm_squares, torch.cat([expected[:3, 1], expected[3:, 1].sum(0, True)]))
    of_all = nn.functional.cosine_similarity(x[[0, 2, 3, 4]].flatten(), y[[0, 2, 3, 4]].flatten(), dim=0)
    cosines = products.cosines()
    assert cosines.shape == (5,) and cosines[1] == 1  # of two zeros: no error
    torch.testing.assert_close(cosines[-1], of_all)


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


def test_masked_products_are_those_of_the_weights_that_are_masked() -> None:
    products = Products(torch.ones(2, 3, dtype=DOUBLE), torch.ones(1, 3, dtype=DOUBLE))
    layers, others = products.masked(torch.tensor([False, True, False]), 0.0)
    assert layers.tolist() == [[1, 1, 1], [0, 0, 0]] and others.tolist() == [[1, 1, 1]]
    assert math.isnan(products.masked(torch.tensor([False, False, True]), math.nan).others[0, 0])
    assert products.layers.tolist() == [[1, 1, 1]] * 2


def test_squares_of_gradients_that_are_there() -> None:
    squares = RankSums(nn.Linear(1, 1), Ranks()).squares([torch.full((2, 2), 3.0), None])
    assert squares.dtype == DOUBLE and squares.tolist() == [36, 0]
