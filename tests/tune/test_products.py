"""Products: each kind's is right, and one whose scales are wrong is found."""

from types import ModuleType
from typing import Any

import pytest

from octavo.tune.products import PRODUCTS

pytestmark = pytest.mark.gpu
SHAPE = 32, 48, 128


@pytest.mark.parametrize("name", PRODUCTS)
def test_is_right(tuner: ModuleType, name: str) -> None:
    assert tuner.products.wrong(name, SHAPE) == ""
    (call,) = tuner.products.calls(name, SHAPE)
    assert call().shape == SHAPE[:2]


def test_a_wrong_one_is_found(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rows . rows, Triton"
    right = tuner.products.PRODUCTS[name]

    def wrong(a: Any, a_scale_inv: Any, *others: Any) -> Any:
        return right.function(a, a_scale_inv.mean().expand_as(a_scale_inv).contiguous(), *others)

    monkeypatch.setitem(tuner.products.PRODUCTS, name, right._replace(function=wrong))
    assert tuner.products.wrong(name, SHAPE).endswith("dB")
