"""Flat arguments become values once, by the names that signatures.py gives them."""

from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.kernels.arguments import unpacking
from tests.support.casts import ALL, E4M3, E5M2, of_norm, second, to


def unpacked(op: str, *flat: Any, **named: Any) -> tuple[Any, ...]:
    """Return the arguments that a kernel of this op gets."""
    return unpacking({op: lambda *values: values})[op](*flat, **named)


NORM = of_norm(torch.ones(2), None, "rms_norm")
ENDS = torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("flat", "named", "said"),
    [
        ((False, 1, True), NORM, "column_sum is not taken where a norm is cast"),
        ((False, 1, False, "relu"), NORM, "activation is not taken where a norm is cast"),
        ((), NORM | {"offsets": ENDS}, "offsets is not taken where a norm is cast"),
        ((), {"kind": "rms_norm"}, "kind is not taken where no gamma is given"),
        ((), {"keep": True} | second(E5M2, ALL, False, 0), "keep is not taken where there is not one scale"),
        ((), {"keep": True, "offsets": ENDS}, "keep is not taken where there is not one scale"),
        (
            (),
            {"recast_scale": torch.ones(1), "recast_dtype": E4M3},
            "recast_scale: give recast_dtype, and an activation's",
        ),
        (
            (False, 1, False, "relu", torch.ones(2, 2)),
            {"recast_scale": torch.ones(1), "recast_dtype": E4M3, "offsets": ENDS},
            "recast_scale is not taken where there is not one scale",
        ),
        ((), second(E5M2, ALL, False, 0) | {"offsets": ENDS}, "offsets is not taken where there are two scalings"),
        ((False, 1, True), {"offsets": ENDS}, "column_sum is not taken where rows are in groups"),
        ((True,), {"as_is": False}, r"as_is=False is not taken where rows are in no groups: cast x.t\(\)"),
        ((), {"swizzle": True}, "swizzle: of rows in no groups, in blocks of 1x32 or 32x1"),
        ((False, 1, False, "swish"), {}, "activation='swish': use one of relu, "),
        ((False, 1, False, "", None, torch.ones(1, 1)), {}, "h_scale_inv is given without the name"),
        ((), NORM | {"kind": "batch_norm"}, "kind='batch_norm': use 'layer_norm' or 'rms_norm'"),
        ((), NORM | {"gamma": torch.ones(1, 5)}, r"gamma of shape \[1, 5\] needs \[C\]"),
        ((), NORM | {"beta": torch.ones(1)}, r"beta of shape \[1\] needs \[C\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_kernel_casts_is_refused(flat: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    for device in ("cpu", "meta"):
        args = to(device, (torch.ones(2, 2), None, 0, E4M3, ALL, False, 0, *flat))
        with pytest.raises(ValueError, match=said):
            kernels.cast(*args, **to(device, named))


def test_other_arguments_are_refused() -> None:
    flat = torch.ones(2, 2), None, 0, E4M3, ALL, False, 0, False, 1, False, "", None, None, ALL, None
    with pytest.raises(ValueError, match="delayed_scale is not taken where there are two scalings"):
        unpacked("cast", flat[0], torch.ones(3), *flat[2:7], **second(E5M2, ALL, False, 0))
    with pytest.raises(ValueError, match=r"a delayed scale is one for all.*\(1, -1\)"):
        unpacked("cast", flat[0], torch.ones(3), 0, E4M3, (1, -1), False, 0, offsets=ENDS)
    with pytest.raises(TypeError, match=r"torch.float64 is not cast: give bfloat16, float16 or float32"):
        unpacked("cast", flat[0].double(), *flat[1:7], offsets=ENDS)
    with pytest.raises(ValueError, match="keep is not taken where there is not one scale"):
        unpacked("cast", *flat[:4], (1, -1), *flat[5:7], keep=True)
    for count in (4, 15):
        with pytest.raises(TypeError):
            unpacked("cast", *flat[:count])
