import pytest
import torch

import octavo
from octavo.nn.inputs import product_dtype, refuse_for_fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_a_product(dtype):
    weight = torch.ones(4, 8, dtype=dtype)
    assert product_dtype(torch.ones(2, 8, dtype=dtype), weight) == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(torch.ones(2, 8), weight) == torch.bfloat16
        assert product_dtype(torch.ones(2, 8, dtype=torch.float64), weight) == torch.float64
    with pytest.raises(TypeError, match=r"convert one of them or use torch\.autocast"):
        product_dtype(torch.ones(2, 8, dtype=torch.float64), weight)
    for shape in ((), (2, 7)):
        with pytest.raises(ValueError, match=r"needs in_features=8 last"):
            product_dtype(torch.ones(shape, dtype=dtype), weight)
    with pytest.raises(ValueError, match=r"on the meta device .* call model\.to_empty"):
        product_dtype(torch.ones(2, 8, dtype=dtype), weight.to("meta"))


def test_refusals():
    x = torch.ones(2, 8)
    refuse_for_fp8(x, None)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        refuse_for_fp8(x.double())
    with pytest.raises(octavo.HigherOrderGradientError, match=r"torch\.func transforms"):
        torch.vmap(lambda row: refuse_for_fp8(row))(x)
