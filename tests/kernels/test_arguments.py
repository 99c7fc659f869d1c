"""Flat arguments become values once, in the order that signatures.py gives them."""

import pytest
import torch

from octavo.kernels.arguments import CastSource, Output, Scaling, new_both_codes, unpacking

E4M3, ALL = torch.float8_e4m3fn, (-1, -1)


def test_a_cast_takes_values() -> None:
    x, state = torch.ones(2, 3), torch.ones(3)
    flat = x, state, 1, E4M3, ALL, True, 2, 16, True, "relu", x
    found = unpacking("cast_transpose", lambda *values: values)(*flat)
    assert found == (CastSource(x, "relu", x), Scaling(E4M3, ALL, True, 2, state, 1), Output(True, 16, True))
    assert unpacking("cast", lambda *values: (0, 1, 2, 3, 4))(*flat) == (0, 2, 3, 4)
    norm = x, x[0], None, "rms_norm", 1e-5, False
    *_, output = unpacking("norm_cast", lambda *values: values)(*norm, None, 0, E4M3, ALL, False, 0, False, 16, True)
    assert output == Output(False, 16, False, True)


@pytest.mark.parametrize("count", [4, 14])
def test_too_few_or_too_many_are_refused(count: int) -> None:
    flat = torch.ones(2, 2), None, 0, E4M3, ALL, False, 0, 1, False, "", None, None, ALL, None
    with pytest.raises(TypeError):
        unpacking("cast", lambda *values: values)(*flat[:count])


def test_codes_are_padded_along_the_contraction() -> None:
    q, t = new_both_codes(torch.ones(2, 3), (2, 3), E4M3, Output(True, 16))
    assert (q.shape, t.shape) == ((2, 16), (3, 16))
    assert new_both_codes(torch.ones(2, 3), (2, 3), E4M3, Output(False))[1].shape == (0, 0)
