"""Flat arguments become values once, by the names that signatures.py gives them."""

from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.kernels.arguments import CastSource, NormSource, OperandPair, Output, Scaling, unpacking
from tests.support.casts import ALL, E4M3, E5M2, of_norm, second, to


def unpacked(op: str, *flat: Any, **named: Any) -> tuple[Any, ...]:
    """What a kernel of this op takes."""
    return unpacking({op: lambda *values: values})[op](*flat, **named)


def test_a_cast_takes_values() -> None:
    x, state = torch.ones(2, 3), torch.ones(3)
    found = unpacked("cast", x, state, 1, E4M3, [-1, -1], True, 2, True, 16, True, "relu", x)
    first, how = Scaling(E4M3, ALL, True, 2, state, 1), Output(True, 16, True)
    assert found == (CastSource(x, "relu", x), first, None, how, None)
    dynamic = x, None, 0, E4M3, [-1, -1], True, 2
    norm, columns = of_norm(state, None, "rms_norm", 1e-3, True), second(E5M2, [-1, 1], False, 3)
    source, first, other, output, _ = unpacked("cast", *dynamic, False, 16, **norm, **columns, keep=True)
    assert source == NormSource(x, state, None, "rms_norm", 1e-3, True) and first == Scaling(E4M3, ALL, True, 2)
    assert other == Scaling(E5M2, (-1, 1), False, 3) and output == Output(False, 16, False, True)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    assert unpacked("cast", *dynamic, True, offsets=ends, as_is=False)[3:] == (Output(True, as_is=False), ends)
    operands, *how = unpacked("matmul", x, state, [1, -1], x, state, ALL, None, torch.float32, False)
    assert operands == (OperandPair(x, state, (1, -1)), OperandPair(x, state, ALL), None) and operands.shape == (2, 2)
    assert how == [torch.float32, False]
    assert unpacking({"amax": len})["amax"] is len  # takes its arguments as they are


NORM = of_norm(torch.ones(2), None, "rms_norm")
ENDS = torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("flat", "named", "said"),
    [
        ((False, 1, True), NORM, "column_sum is not taken where a norm is cast"),
        ((False, 1, False, "relu"), NORM, "activation is not taken where a norm is cast"),
        ((), NORM | {"offsets": ENDS}, "offsets is not taken where a norm is cast"),
        ((), {"kind": "rms_norm"}, "kind is not taken where no gamma is given"),
        ((), {"keep": True}, "keep is not taken where no gamma is given"),
        ((), second(E5M2, ALL, False, 0) | {"offsets": ENDS}, "offsets is not taken where there are two scalings"),
        ((False, 1, True), {"offsets": ENDS}, "column_sum is not taken where rows are in groups"),
        ((True,), {"as_is": False}, r"as_is=False is not taken where rows are in no groups: cast x.t\(\)"),
        ((), {"swizzle": True}, "swizzle: of rows in no groups, in blocks of 1x32 or 32x1"),
        ((False, 1, False, "swish"), {}, "activation='swish': use one of relu, "),
        ((False, 1, False, "", None, torch.ones(1, 1)), {}, "h_scale_inv is given without the name"),
        ((), NORM | {"kind": "batch_norm"}, "kind='batch_norm': use 'layer_norm' or 'rms_norm'"),
        ((), NORM | {"gamma": torch.ones(1, 5)}, r"gamma of shape \[1, 5\]: rows of x have 2 elements"),
        ((), NORM | {"beta": torch.ones(1)}, r"beta of shape \[1\]: rows of x have 2 elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_kernel_casts_is_refused(flat: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    for device in ("cpu", "meta"):
        given = to(device, (torch.ones(2, 2), None, 0, E4M3, ALL, False, 0, *flat))
        with pytest.raises(ValueError, match=said):
            kernels.cast(*given, **to(device, named))


def test_other_arguments_are_refused() -> None:
    flat = torch.ones(2, 2), None, 0, E4M3, ALL, False, 0, False, 1, False, "", None, None, ALL, None
    with pytest.raises(ValueError, match="delayed_scale is not taken where there are two scalings"):
        unpacked("cast", flat[0], torch.ones(3), *flat[2:7], **second(E5M2, ALL, False, 0))
    with pytest.raises(ValueError, match=r"a delayed scale is one for all.*\(1, -1\)"):
        unpacked("cast", flat[0], torch.ones(3), 0, E4M3, (1, -1), False, 0, offsets=ENDS)
    with pytest.raises(TypeError, match=r"torch.float64 is not cast: give bfloat16, float16 or float32"):
        unpacked("cast", flat[0].double(), *flat[1:7], offsets=ENDS)
    for count in (4, 15):
        with pytest.raises(TypeError):
            unpacked("cast", *flat[:count])
