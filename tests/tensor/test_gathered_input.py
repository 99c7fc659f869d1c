import pytest
import torch

import octavo
from octavo.tensor.gathered_input import GatheredInput, Wire


def made(**others):
    q = torch.ones(4, 8).to(torch.float8_e4m3fn)
    tensors = {"qdata": q, "scale_inv": torch.ones(1, 1)} | others
    return GatheredInput(tensors, (2, 2, 8), torch.bfloat16, ("casts",), Wire("group", 2, 1, None))


@pytest.mark.parametrize("others", [{}, {"shard": torch.ones(2, 1, 8)}, {"transposed_qdata": torch.ones(8, 4)}])
def test_a_facade_that_goes_apart_and_together(others):
    own = made(**others)
    names, context = own.__tensor_flatten__()
    again = GatheredInput.__tensor_unflatten__({name: getattr(own, name) for name in names}, context, own.shape, None)
    for found in (again, own.detach()):
        assert (found.shape, found.dtype, found.casts, found.wire) == (own.shape, own.dtype, own.casts, own.wire)
        assert all(getattr(found, name) is getattr(own, name) for name in GatheredInput.TENSORS)
    as_is, transposed, *_ = own.operands()
    assert as_is == (own.qdata, own.scale_inv) and transposed is None


def test_nothing_else_reads_it():
    with pytest.raises(octavo.UnsupportedOpError, match=r"gathered in FP8: .* torch's own PrepareModuleInput"):
        made() + 1
