"""What all pairs share: files of them, and the message of an op that has no rule."""

import io
import pickle

import pytest
import torch

from octavo import E4M3, PerBlock, UnsupportedOpError, quantize
from octavo.tensor.pair import Pair
from octavo.tensor.stored_gradient import StoredGradient
from octavo.tensor.stored_weight import StoredWeight

X = torch.randn(130, 256)
BLOCKS = PerBlock(128, 128)
PAIRS = {
    "ScaledTensor": lambda: quantize(X, E4M3, BLOCKS),
    "StoredWeight": lambda: StoredWeight.cast(X.bfloat16(), BLOCKS),
    "StoredGradient": lambda: StoredGradient.cast(X.view(130, 2, 128)),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("as_parameter", [False, True])
def test_files_hold_bytes_and_are_read_safely(name: str, as_parameter: bool) -> None:
    pair = torch.nn.Parameter(PAIRS[name]()) if as_parameter else PAIRS[name]()
    pair.mark = "a user's"
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    for found in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(pair))):
        assert isinstance(found, Pair) and repr(found) == repr(pair) and found.mark == pair.mark
        assert isinstance(found, torch.nn.Parameter) is as_parameter and found.requires_grad is as_parameter
        assert torch.equal(found.qdata.view(torch.uint8), pair.qdata.view(torch.uint8))
        assert torch.equal(found.scale_inv, pair.scale_inv)


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_dequantises_silently(name: str) -> None:
    with pytest.raises(UnsupportedOpError, match=r"^aten.sin.default .*dequantize\(\)"):
        torch.sin(PAIRS[name]())
