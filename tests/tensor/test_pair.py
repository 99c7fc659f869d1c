"""Files of all kinds of pairs, and the message of an op that has no rule."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo import E4M3, PerBlock, UnsupportedOpError, quantize
from octavo.tensor.pair import Operands, OperandsFacade, Pair
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.stored import StoredWeight
from tests.support.helpers import saved_and_loaded

X = torch.randn(130, 256)
BLOCKS = PerBlock(128, 128)
PAIRS = {
    "ScaledTensor": lambda: quantize(X, E4M3, BLOCKS),
    "StoredWeight": lambda: StoredWeight.cast(X.bfloat16(), BLOCKS),
    "StoredGradient": lambda: StoredGradient.cast(X.view(130, 2, 128)),
}


COPIES: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved_and_loaded,
    "torch.save, unpickled": lambda pair: saved_and_loaded(pair, weights_only=False),
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_and_files_are_equal_and_apart(name: str, way: str, as_parameter: bool, requires_grad: bool) -> None:
    pair = torch.nn.Parameter(PAIRS[name]()) if as_parameter else PAIRS[name]()
    pair.requires_grad_(requires_grad).mark = "a user's"
    copied = COPIES[way](pair)
    assert isinstance(copied, Pair) and repr(copied) == repr(pair) and copied.mark == pair.mark
    assert isinstance(copied, torch.nn.Parameter) is as_parameter and copied.requires_grad is requires_grad
    assert torch.equal(copied.qdata.view(torch.uint8), pair.qdata.view(torch.uint8))
    assert torch.equal(copied.scale_inv, pair.scale_inv) and copied.is_leaf
    assert copied.qdata.data_ptr() != pair.qdata.data_ptr() and copied.scale_inv.data_ptr() != pair.scale_inv.data_ptr()


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_dequantises_silently(name: str) -> None:
    with pytest.raises(UnsupportedOpError, match=r"^aten.sin.default .*dequantize\(\)"):
        torch.sin(PAIRS[name]())


class _Rows(OperandsFacade):
    REMEDY = "has no values"


def test_views_of_operands_have_as_many_elements():
    operands = Operands((torch.zeros(8, 16).to(E4M3.dtype), torch.ones(1, 1)))
    facade = _Rows(operands, (2, 4, 16), torch.float32)
    for shape in ((8, 16), (4, 2, 16), (2, 4, 16), (-1, 16), (2, -1, 16)):
        assert facade.view(shape).shape == torch.empty(2, 4, 16).view(shape).shape
        assert facade.view(shape).qdata is operands.as_is[0]
    for shape in ((3, 16), (3, -1, 16)):
        with pytest.raises(RuntimeError, match="is invalid for input of size 128"):
            facade.view(shape)
    with pytest.raises(UnsupportedOpError, match="has no values"):
        facade.view(16, 8)
