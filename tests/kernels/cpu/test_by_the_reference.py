"""What a CPU computes in chunks beside the reference, bit for bit; test_cast.py has plain casts."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.granularity import scale_shape
from octavo.kernels import capability, cpu, reference
from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.cpu import cast, codes
from octavo.kernels.reference.activation import produced
from tests.support.casts import of_norm, second
from tests.support.combinations import each_pair
from tests.support.definitions import GRANULARITIES, same_bits

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
ALL, TILES = (-1, -1), [g.tile for g in GRANULARITIES]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(1, 1), (1, 1000), (17, 127), (127, 17), (1000, 40), (300, 260)]
LAID = ["rows", "columns", "part"]
LIMITS = [(1, 0), (500, 0), (500, 2000), (5000, 1 << 20), (1 << 18, 1 << 20)]  # (CHUNK, KEPT)


@pytest.fixture(autouse=True)
def _under_its_limits(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "CHUNK", case["limits"][0])
    monkeypatch.setattr(cast, "KEPT", case["limits"][1])


def laid(x: Tensor, how: str) -> Tensor:
    if how == "rows":
        return x
    return x.t().contiguous().t() if how == "columns" else torch.cat((x, x), 1)[:, : x.shape[1]]


def values(shape: tuple[int, int], dtype: torch.dtype, how: str = "rows") -> Tensor:
    x = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None] * torch.logspace(1, -1, shape[1])
    return laid(x.to(dtype), how)


def alike(name: str, *arguments: Any, sums: Sequence[int] = (), **named: Any) -> None:
    """Run both; ``sums``: which results are float32 sums, of which chunks add in another order."""
    given = arguments, named
    calls = [(kernels.KERNELS[name], copy.deepcopy(given)) for kernels in (cpu, reference)]
    found, expected = (kernel(*flat, **by_name) for kernel, (flat, by_name) in calls)
    pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
    for place, (ours, theirs) in enumerate(pairs):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
        if place in sums:
            torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-3, equal_nan=True)
        else:  # which NaN a number is isn't told
            assert ours.dtype.itemsize == 1 or torch.equal(ours.isnan(), theirs.isnan()), place
            assert same_bits(*(x if x.dtype.itemsize == 1 else x.masked_fill(x.isnan(), 0.0) for x in (ours, theirs)))


OF_CASTS = {"how": LAID, "dtype": DTYPES, "fmt": FORMATS, "tile": TILES, "transpose": [False, True]}


# of rows whose elements are no multiple of a CPU's vectors torch computes the last ones another way, in the last bit
@each_pair(
    size=[(0, 64), (1, 64), (131, 64), (300, 128)],
    activation=[*ACTIVATIONS],
    backward=[False, True],
    h_tile=[None, ALL, (1, 32), (16, 8), (48, 1)],
    **OF_CASTS,
    second=TILES,
    limits=LIMITS,
)
def test_casts_of_activations(case: dict[str, Any]) -> None:
    rows, cols = case["size"]
    wide = 2 * cols if ACTIVATIONS[case["activation"]].gated else cols
    h, scales = values((rows, wide), case["dtype"]), ()
    if case["h_tile"] is not None:
        h, _, scale_inv, *_ = reference.KERNELS["cast"](h, None, 0, E4M3, case["h_tile"], False, 0)
        scales = scale_inv, case["h_tile"]
    x, preactivation = laid(h, case["how"]), None
    if case["backward"]:
        x, preactivation = values(case["size"], case["dtype"]), x
    source, scaling = (case["activation"], preactivation, *scales), (case["fmt"], case["tile"], True, 0)
    assert same_bits(cast.produced(x, *source), produced(x, *source))
    alike("cast", x, None, 0, *scaling, case["transpose"], 1, True, *source, sums=[4])
    other = second(E5M2, case["second"], False, 0)
    alike("cast", x, None, 0, *scaling, case["transpose"], 1, True, *source, sums=[4], **other)


@each_pair(
    size=SIZES,
    affine=[False, True],
    norm=["layer_norm", "rms_norm"],
    **OF_CASTS,
    second=TILES,
    keep=[False, True],
    limits=LIMITS,
)
def test_norms(case: dict[str, Any]) -> None:
    x, cols = values(case["size"], case["dtype"], case["how"]), case["size"][1]
    gamma, beta = torch.rand(cols), torch.randn(cols) if case["affine"] else None
    norm = of_norm(gamma, beta, case["norm"], 1e-5, case["affine"])
    given, other = (None, 0, case["fmt"], case["tile"], True, 0), second(E5M2, case["second"], False, 0)
    alike("cast", x, *given, case["transpose"], **norm, keep=case["keep"])
    alike("cast", x, *given, case["transpose"], **norm, **other, keep=case["keep"])
    *_, mean, rstd, _ = reference.KERNELS["cast"](x, *given, **norm)
    dy = values(case["size"], case["dtype"])
    how = case["norm"], case["affine"], case["affine"], x if case["keep"] else None
    alike("norm_backward", dy, x, gamma, mean, rstd, *how, sums=[1, 2])


def operand(shape: tuple[int, int], tile: tuple[int, int], fmt: torch.dtype, how: str, exact: bool) -> Any:
    """Codes that are small integers, whose sums are exact, and any scales if those alone multiply these."""
    scales = torch.rand(scale_shape(shape, tile)) + 1
    if not exact:
        scales = 2.0 ** torch.randint(-2, 3, scale_shape(shape, tile)).float()
    codes = torch.randint(-4, 5, shape).float().to(fmt)
    return laid(codes, how), laid(scales, how), tile


@each_pair(
    size=[(0, 5, 17), (5, 0, 17), (5, 17, 0), (1, 1, 1), (17, 127, 33), (127, 130, 1), (100, 200, 150)],
    a_tile=TILES,
    b_tile=TILES,
    formats=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    a_laid=LAID,
    b_laid=LAID,
    dtype=DTYPES,
    bias=[False, True],
    exact=[False, True],
    fast=[torch.bfloat16, torch.float32],
    limits=LIMITS,
)
def test_products(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "fast_dtype", lambda device: case["fast"])
    rows, terms, cols = case["size"]
    exact = case["exact"] and case["a_tile"][1] == case["b_tile"][1] == -1 and not case["bias"]
    a = operand((rows, terms), case["a_tile"], case["formats"][0], case["a_laid"], exact)
    b = operand((cols, terms), case["b_tile"], case["formats"][1], case["b_laid"], exact)
    bias = torch.randint(-9, 10, (cols,)).to(case["dtype"]) if case["bias"] else None
    alike("matmul", *a, *b, bias, case["dtype"], False)
    offsets = torch.tensor([rows // 3, rows], dtype=torch.int32)
    a = operand((rows, terms), (1, case["a_tile"][1]), case["formats"][0], case["a_laid"], exact)
    twice = torch.stack((b[0].view(torch.uint8),) * 2).view(b[0].dtype), torch.stack((b[1],) * 2), b[2]
    more = None if bias is None else bias.expand(2, cols)
    alike("grouped_matmul", *a, *twice, offsets, more, case["dtype"], False)
