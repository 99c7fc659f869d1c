import copy
import dataclasses
import pickle

import gfloat
import numpy as np
import pytest
import torch

from octavo import E4M3, E5M2
from octavo.formats import E4M4, FORMATS, Format, format_of
from octavo.kernels.onnx import _TYPES
from tests.support.definitions import (
    FORMAT_INFO,
    ML_DTYPES,
    VALUES,
    all_bfloat16,
    all_codes,
    boundaries,
    round_to_codes,
)


def test_tables_know_every_format() -> None:
    assert {*FORMATS} == {*ML_DTYPES} == {*_TYPES}
    assert {fmt.name for fmt in FORMATS.values()} == {*FORMAT_INFO} - {"E4M4"}


@pytest.mark.parametrize("fmt", [*FORMATS.values(), E4M4], ids=str)
def test_limits_are_gfloats(fmt: Format) -> None:
    info = FORMAT_INFO[fmt.name]
    limits = info.max, info.smallest_normal, info.smallest_subnormal
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == limits
    assert (fmt.bias, fmt.exponent_bits, fmt.mantissa_bits) == (info.bias, info.expBits, info.tSignificandBits)
    assert (fmt.signed, fmt.has_inf) == (info.is_signed, info.domain == gfloat.Domain.Extended)
    assert gfloat.decode_float(info, fmt.nan_code).fclass == gfloat.FloatClass.NAN
    assert gfloat.decode_float(info, fmt.max_code).fval == fmt.max
    assert fmt.overflow - fmt.max == (fmt.max - gfloat.decode_float(info, fmt.max_code - 1).fval) / 2


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_oracles_agree(fmt: Format) -> None:
    # not of octavo: whether what the other tests stand on is what the field means
    info = FORMAT_INFO[fmt.name]
    for values in (gfloat.decode_ndarray(info, np.arange(256)), all_codes(fmt.dtype).double().numpy()):
        np.testing.assert_array_equal(values, VALUES[fmt.dtype].numpy())
    x = torch.cat([all_bfloat16().float(), boundaries(fmt.dtype)])
    x = x[x.isfinite()]
    codes = gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x.double().numpy(), sat=True))
    np.testing.assert_array_equal(round_to_codes(x, fmt.dtype).numpy(), codes)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M4], ids=str)
def test_a_format_is_one_object(fmt: Format) -> None:
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(fmt) is fmt
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.name = "other"
    assert str(fmt) == repr(fmt) == fmt.name


def test_torchs_dtypes_have_formats() -> None:
    assert FORMATS == {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
    assert [format_of(dtype) for dtype in FORMATS] == [E4M3, E5M2]
    for dtype in (torch.bfloat16, torch.float8_e4m3fnuz, torch.uint8):
        with pytest.raises(TypeError, match=f"{dtype} .*float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2"):
            format_of(dtype)


def test_the_one_code_for_nan() -> None:
    assert [fmt.nan_code for fmt in (E4M3, E5M2, E4M4)] == [0x7F, 0x7F, 0xFF]
