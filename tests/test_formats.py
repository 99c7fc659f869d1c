import copy
import dataclasses
import pickle

import pytest
import torch

from octavo import E4M3, E5M2, Format
from octavo.formats import E4M4, FORMATS, format_of
from tests.support.definitions import FINITE, VALUES, all_codes, read


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_limits_are_those_of_the_enumerated_codes(fmt: Format) -> None:
    values = VALUES[fmt.dtype]
    positive = FINITE[fmt.dtype][1:]
    assert fmt.max == values[torch.isfinite(values)].max()
    assert fmt.smallest_subnormal == positive.min()
    assert fmt.has_inf == bool(torch.isinf(values).any())
    # from the smallest value with a hidden bit down the steps no longer shrink: they double first at twice that value
    steps = positive.diff()
    assert fmt.smallest_normal == positive[:-1][steps > steps[0]][0] / 2
    assert torch.isnan(values[fmt.nan_code])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_limits_are_torchs(fmt: Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_enumeration_agrees_with_torch(fmt: Format) -> None:
    # not of octavo: whether the definition that the other tests stand on is the field's
    assert torch.equal(
        read(all_codes(fmt.dtype)).nan_to_num(nan=1e9), all_codes(fmt.dtype).double().nan_to_num(nan=1e9)
    )


def test_numbers_from_the_specification() -> None:
    assert (E4M3.max, E4M3.smallest_normal, E4M3.smallest_subnormal, E4M3.bias) == (448.0, 2.0**-6, 2.0**-9, 7)
    assert (E5M2.max, E5M2.smallest_normal, E5M2.smallest_subnormal, E5M2.bias) == (57344.0, 2.0**-14, 2.0**-16, 15)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_a_format_is_one_object(fmt: Format) -> None:
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(fmt) is fmt
    assert format_of(fmt.dtype) is fmt
    assert FORMATS[fmt.dtype] is fmt
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.name = "other"
    assert str(fmt) == repr(fmt) == fmt.name


def test_e4m4_has_no_sign_and_a_mantissa_bit_more() -> None:
    assert (E4M4.max, E4M4.smallest_normal, E4M4.smallest_subnormal, E4M4.bias) == (480.0, 2.0**-6, 2.0**-10, 7)
    assert (E4M4.nan_code, E4M4.signed, E4M3.signed, E5M2.signed) == (0xFF, False, True, True)
    assert E4M4.exponent_bits + E4M4.mantissa_bits == 8
    assert pickle.loads(pickle.dumps(E4M4)) is E4M4 is copy.deepcopy(E4M4)
    assert E4M4 not in FORMATS.values()


def test_other_dtypes_are_refused_by_name() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fnuz, torch.uint8):
        with pytest.raises(TypeError, match=f"{dtype} .*float8_e4m3fn or torch.float8_e5m2"):
            format_of(dtype)
