"""The product of two pairs that is a pair: Triton's kernels beside the reference, and which route a case takes."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from octavo.formats import format_of
from octavo.granularity import Tile, scale_shape
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from tests.support.combinations import each_pair
from tests.support.definitions import same_bits
from tests.support.triton_cases import ALL, E4M3, E5M2, FORMATS, run_both, to
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, BLOCK, SQUARE, MX = (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32)
SHAPES = [(17, 19, 127), (1, 1, 1), (5, 3, 0), (0, 4, 16), (4, 0, 16), (33, 64, 300)]
OPERANDS = [(ALL, ALL), (ROWS, ROWS), (BLOCK, SQUARE), (BLOCK, BLOCK), (MX, MX), ((1, 48), (32, 24))]
KNOWN = [(ALL, 0.37), (ALL, 2.0**40)]  # (the result's tile, its delayed scale)
RULES = [*KNOWN, (ALL, 0.0), (ALL, None), (ROWS, None), (COLUMNS, None), (MX, None), (SQUARE, None)]
RULES += [((16, 2), None), ((24, 40), None)]


def exact_operand(rows: int, cols: int, tile: Tile, fmt: torch.dtype) -> tuple[Tensor, Tensor, Tile]:
    """Small whole numbers and powers of two, of which float32 sums are exact in any order."""
    q = torch.randint(-3, 4, (rows, cols)).float().to(fmt)
    return q, 2.0 ** torch.randint(-2, 2, scale_shape(q.shape, tile)), tile


def random_operand(rows: int, cols: int, tile: Tile, fmt: torch.dtype) -> tuple[Tensor, Tensor, Tile]:
    x = torch.randn(rows, cols) * torch.logspace(-1, 1, rows)[:, None]
    return *REFERENCE["cast"](x, None, 0, fmt, tile, False, 0)[:3:2], tile


def turned(t: Tensor) -> Tensor:
    """The same numbers in memory that lies the other way."""
    return t.view(torch.uint8).t().contiguous().view(t.dtype).t() if t.itemsize == 1 else t.t().contiguous().t()


def put_faults(a: Tensor, kind: str) -> None:
    codes = a.view(torch.uint8)
    if kind == "some" and a.numel() > 0:
        codes[len(a) // 2, 0] = 0x7F
        codes[-1, -1] = 0x7C if a.dtype == E5M2 else 0x7F
        codes[0, a.shape[1] // 2] = 0xFC if a.dtype == E5M2 else 0xFF
    elif kind == "only":
        codes.fill_(0x7F)


def state_of(kernels: TritonKernels, scale: float | None, role: int, known: bool = True) -> Tensor | None:
    """Delayed scales, which the kernels know to exist if ``known``; None for Dynamic."""
    if scale is None:
        return None
    state = torch.full((3,), 7.0)
    state[role] = scale
    state = state.to(kernels.device)
    if known:
        kernels.module("known_scales").committed(state, torch.zeros(3, 4, device=kernels.device), (True,) * 3)
        if state.is_cuda:
            torch.cuda.synchronize()
    return state


def use_small_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small products be several programs in each direction."""
    small = kernels.module("launch").Config(32, 32, 2, 4)
    monkeypatch.setattr(kernels.module("matmul"), "config", lambda *_: small)


@each_pair(
    shape=SHAPES,
    operands=OPERANDS,
    formats=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    rule=RULES,
    known=[True, False],
    role=[0, 1, 2],
    fmt=FORMATS,
    power_of_two=[False, True],
    margin=[0, 3],
    bias=[None, torch.bfloat16, torch.float32],
    faults=["none", "some", "only"],
    transpose=[False, True],
    pad=[1, 16],
    fast=[False, True],
    turn=[False, True],
    small=[False, True],
)
def test_exact_sums(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    """Bit for bit where no sum is rounded."""
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    M, N, K = case["shape"]
    a, a_scale_inv, a_tile = exact_operand(M, K, case["operands"][0], case["formats"][0])
    b, b_scale_inv, b_tile = exact_operand(N, K, case["operands"][1], case["formats"][1])
    put_faults(a, case["faults"])
    bias = None if case["bias"] is None else (torch.randint(-64, 65, (N,)) / 8).to(case["bias"])
    pairs = a, a_scale_inv, a_tile, b, b_scale_inv, b_tile, bias
    args = list(to(kernels.device, pairs))
    if case["turn"]:
        args = [turned(t) if isinstance(t, Tensor) and t.ndim == 2 else t for t in args]
    tile, scale = case["rule"]
    state = state_of(kernels, scale, case["role"], case["known"])
    cast = case["fmt"], tile, case["power_of_two"], case["margin"], case["transpose"], case["pad"]
    run = run_both(kernels, "matmul_cast", (*args, case["fast"], state, case["role"], *cast))
    for name, actual, expected in zip(("q", "t", "scale_inv", "amax"), run.actual, run.expected, strict=True):
        assert same_bits(actual, expected), name
    for before, after in zip(run.given, run.left, strict=True):
        assert not isinstance(before, Tensor) or same_bits(before, after)


@each_pair(
    operands=[(ALL, ALL), (BLOCK, SQUARE), (MX, MX)],
    rule=[*KNOWN, (ALL, None), (MX, None), ((1, 16), None), (ROWS, None)],
    fmt=FORMATS,
    power_of_two=[False, True],
    margin=[0, 3],
    bias=[False, True],
)
def test_any_sums(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    """Few codes are the nearest's neighbours; scale_inv is exactly that of the amax found, or of the delayed scale."""
    use_small_tiles(kernels, monkeypatch)
    a, b = (random_operand(rows, 200, tile, E4M3) for rows, tile in zip((70, 80), case["operands"], strict=True))
    tile, scale = case["rule"]
    bias = torch.randn(80) if case["bias"] else None
    cast = case["fmt"], tile, case["power_of_two"], case["margin"], True, 16
    args = *to(kernels.device, (*a, *b, bias)), False, state_of(kernels, scale, 0), 0, *cast
    run = run_both(kernels, "matmul_cast", args)
    (q, t, scale_inv, amax), (right, _, _, right_amax) = run.actual, run.expected
    on_gpu = kernels.device.type == "cuda"  # whose tensor cores round sums to some 14 bits
    assert torch.allclose(amax, right_amax, rtol=2.0**-12 if on_gpu else 2.0**-20)
    if scale is None:
        found = scale_from_amax(amax, format_of(case["fmt"]).max, case["power_of_two"], case["margin"])
    else:
        found = torch.full((1, 1), scale)
    assert same_bits(scale_inv, scale_inv_from_scale(found))
    apart = (places(q) - places(right)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() <= (0.02 if on_gpu else 0.001)
    assert same_bits(t[:, :70], turned(q[:, :80]).t()) and not t.view(torch.uint8)[:, 70:].any()


def places(codes: Tensor) -> Tensor:
    """Where codes stand among all in order, both zeros at 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 0x80, bits, 0x80 - bits)


def launched(kernels: TritonKernels, *args: Any) -> str:
    """The kernel of the one launch, or "two passes"."""
    module = kernels.module("matmul_cast")
    with (
        mock.patch.object(module, "launch_product") as launch_product,
        mock.patch.object(module, "matmul") as matmul,
        mock.patch.object(module, "cast", return_value=()),
    ):
        kernels.matmul_cast(*to(kernels.device, args[:6]), *args[6:])
    if launch_product.called:
        assert launch_product.call_count == 1 and not matmul.called
        return str(launch_product.call_args.args[0].__name__).removesuffix("_kernel")
    assert matmul.call_args.args[1] is torch.float32
    return "two passes"


def test_the_route(kernels: TritonKernels) -> None:
    def route(
        tile: Tile, state: Tensor | None = None, tiles: tuple[Tile, Tile] = (ALL, ALL), shape: Any = (32, 48, 96)
    ) -> str:
        M, N, K = shape
        pairs = *random_operand(M, K, tiles[0], E4M3), *random_operand(N, K, tiles[1], E4M3)
        return launched(kernels, *pairs, None, False, state, 1, E4M3, tile, False, 0, True)

    existing = state_of(kernels, 0.5, 1)
    assert route(ALL, existing) == route(ALL, existing, (MX, MX)) == "matmul_cast"
    for tile in (BLOCK, SQUARE, MX, (1, 1), (128, 1)):
        assert route(tile) == route(tile, tiles=(ROWS, ROWS)) == "matmul_cast_blocks"
    unknown = state_of(kernels, 0.5, 1, known=False)
    for tile, state in ((ALL, None), (ALL, unknown), (ALL, state_of(kernels, 0.0, 1)), (ROWS, None), (COLUMNS, None)):
        assert route(tile, state) == "two passes"
    assert route((3, 5)) == route((1, 256)) == "two passes"
    for shape in ((0, 48, 96), (32, 0, 96)):
        assert route(ALL, existing, shape=shape) == route(MX, shape=shape) == "two passes"
    assert route(MX, shape=(32, 48, 0)) == "matmul_cast_blocks"
    assert route(MX, tiles=((1, 48), (1, 48))) == "two passes"


def test_a_scale_that_vanished_in_a_graph(kernels: TritonKernels) -> None:
    """Its launch was captured with a scale; with none it multiplies by 1."""
    args = *exact_operand(20, 32, ALL, E4M3), *exact_operand(24, 32, ALL, E4M3), None, False
    cast = 2, E4M3, ALL, False, 0, False
    state = state_of(kernels, 0.0, 2)
    with mock.patch.object(kernels.module("matmul_cast"), "scale_exists", return_value=True):
        found = to("cpu", kernels.matmul_cast(*to(kernels.device, args), state, *cast))
    expected = REFERENCE["matmul_cast"](*args, torch.ones(3), *cast)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_tile_holds_whole_blocks(kernels: TritonKernels) -> None:
    """Blocks larger than a configuration's tile, whose warps Blackwell's tensor cores bound."""
    module = kernels.module("matmul_cast")
    for tile, tiles in ((SQUARE, (BLOCK, SQUARE)), ((128, 1), (ALL, ALL)), (BLOCK, (MX, MX))):
        pairs = *random_operand(32, 128, tiles[0], E4M3), *random_operand(48, 128, tiles[1], E4M3)
        with mock.patch.object(module, "launch_product") as launch_product:
            kernels.matmul_cast(*to(kernels.device, pairs), None, False, None, 0, E4M3, tile, False, 0, False)
        chosen = launch_product.call_args.args[3]
        assert chosen.block_r % tile[0] == chosen.block_c % tile[1] == 0
        assert chosen.num_warps <= 8 and math.log2(chosen.num_warps).is_integer()
