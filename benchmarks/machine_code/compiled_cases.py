"""The cases of compiled.py: ops called as recipes call them, and at sizes that use every row of configs.json.

Tensors are never read, so their memory isn't even touched.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import formats
from octavo.granularity import ALL, Granularity, PerBlock, PerTensor, Tile, granularity_of, scale_shape
from octavo.kernels.activations import ACTIVATIONS
from octavo.kernels.arguments import unpacking
from octavo.kernels.groups import grouped_scale_shape, padded_columns
from octavo.kernels.reference.optimizer_step import AdamGroup, BitNumbers, SgdGroup, WeightUpdate
from octavo.kernels.triton import KERNELS, optimizer_step
from octavo.kernels.triton.cases import ADAM
from octavo.kernels.triton.cases import second as second_scaling
from octavo.kernels.triton.grouped_matmul import triton_grouped_matmul
from octavo.kernels.triton.launch import TABLE
from octavo.kernels.triton.library_matmul import library_grouped_matmul
from octavo.kernels.triton.matmul import triton_matmul
from octavo.numerics import E8M0, scale_inv_dtype
from octavo.optim.masters import FP8_MASTERS
from octavo.optim.masters import PLAIN_MASTERS as MASTERS
from octavo.optim.moment import NAMED_MOMENTS, Moment, as_matrix, moments_of

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, COLUMN = (ALL, ALL), (1, ALL), (ALL, 1)
VECTOR, SQUARE, MX = (1, 128), (128, 128), (1, 32)
PAD = 16


class Case(NamedTuple):
    """A call of an op that launches kernels, whose accesses of tiles should have at least ``bits`` bits."""

    op: str
    what: str
    call: Callable[[], object]
    bits: int = 128


def scales(shape: Sequence[int], tile: Tile) -> Tensor:
    """Return a tensor in place of scale_inv of this shape; for MX's tiles E8M0 by columns, as casts write it."""
    return torch.empty((*shape[:-2], *shape[:-3:-1]), dtype=E8M0).mT if tile == MX else torch.empty(shape)


def terms_scales(shape: tuple[int, int], groups: int, tile: Tile) -> Tensor:
    """Return the same for an operand by ``tile`` with terms in groups; shape: of the cast tensor, terms by rows."""
    return torch.empty(grouped_scale_shape(shape, groups, tile[::-1]), dtype=scale_inv_dtype(tile, True)).t()


def _sizes() -> list[tuple[int, int]]:
    """Return shapes for each of which a different row of configs.json is used."""
    *bounds, _ = sorted({row[0] for rows in TABLE.values() for row in rows})  # the last row serves any larger size
    logs = [*bounds, max(24, *(bound + 1 for bound in bounds))]
    return [(1 << (log - 1 - log // 2), 1 << (log // 2)) for log in logs]


SIZES = _sizes()
LARGE = SIZES[-1]
RAGGED = (1000, 8176)  # not made of whole tiles, yet aligned


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removeprefix("float8_").removesuffix("fn")


def describe(tile: Tile, codes: torch.dtype, x: Tensor, *more: str) -> str:
    rows, cols = x.shape
    words = [
        granularity_of(tile),
        name_of(codes),
        *(word for word in more if word),
        f"of {name_of(x.dtype)} [{rows}, {cols}]",
    ]
    return " ".join(map(str, words))


def tensor(shape: tuple[int, int] = LARGE, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never read, so its memory isn't even touched


UPDATE = (448.0, 448.0, 57344.0), (False,) * 3, (0,) * 3, "max"


def delayed_state(length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return the delayed state of a module that has stepped, so that the cast needs no amax kernel before it."""
    one, scales = torch.ones(1, 1), torch.ones(3)
    before = torch.stack((torch.zeros(3), scales, torch.zeros(3))).view(torch.int32)
    state = scales, torch.zeros(3, length), before
    KERNELS["delayed_update"](*state, one, one, one, *UPDATE)
    return state


# --- casts ------------------------------------------------------------------------------------------------------------


def cast(
    op: str,
    x: Tensor,
    tile: Tile,
    *words: str,
    codes: torch.dtype = E4M3,
    state: Tensor | None = None,
    power_of_two: bool = False,
    bits: int = 128,
    **named: Any,
) -> Case:
    """Return a case that casts x; ``words`` name it, ``named`` are the op's arguments from ``transpose`` on."""
    named = {"pad": PAD, **named}
    call = functools.partial(KERNELS["cast"], x, state, 0, codes, tile, power_of_two, 0, **named)
    return Case(op, describe(tile, codes, x, *words), call, bits)


def plain(
    transpose: bool,
    tile: Tile,
    codes: torch.dtype = E4M3,
    x: Tensor | None = None,
    column_sum: bool = False,
    **options: Any,
) -> Case:
    state, power_of_two = options.get("state"), options.get("power_of_two", False)
    words = "transposed" * transpose, "delayed" * (state is not None), "power of two" * power_of_two
    options |= {"codes": codes, "transpose": transpose, "column_sum": column_sum}
    return cast("cast", tensor() if x is None else x, tile, *words, "column sum" * column_sum, **options)


def two_scalings_of(
    first: Tile, second: Tile, transpose: bool, column_sum: bool, shape: tuple[int, int] = LARGE
) -> Case:
    words = f"and {granularity_of(second)} {name_of(E4M3)}", "transposed" * transpose, "column sum" * column_sum
    named = {"transpose": transpose, "column_sum": column_sum, **second_scaling(second, True)}
    return cast("cast_two_scalings", tensor(shape), first, *words, power_of_two=True, **named)


def amax() -> Iterator[Case]:
    for tile in (TENSOR, ROW, SQUARE):
        call = functools.partial(KERNELS["amax"], tensor(), tile)
        yield Case("amax", f"{granularity_of(tile)} of bfloat16 {list(LARGE)}", call)


def per_tensor() -> Iterator[Case]:
    for transpose in (False, True):
        for shape in SIZES:
            yield plain(transpose, TENSOR, E5M2, tensor(shape), column_sum=True)
        yield plain(transpose, TENSOR)
        yield plain(transpose, TENSOR, state=delayed_state()[0])
    yield plain(True, TENSOR, state=torch.ones(3))  # a first step, whose scale may not exist
    yield plain(True, TENSOR, x=tensor(RAGGED), power_of_two=True)
    yield plain(True, TENSOR, x=tensor(dtype=FP32))
    yield plain(False, TENSOR, x=tensor().t())


def per_row() -> Iterator[Case]:
    for tile, shape in itertools.product((ROW, COLUMN), ((4096, 1024), (1024, 8192), RAGGED)):
        yield plain(False, tile, x=tensor(shape))
    yield plain(False, COLUMN, column_sum=True)
    yield plain(False, ROW, E5M2, x=tensor().t())
    yield plain(True, ROW)
    yield plain(False, ROW, x=tensor(dtype=FP32))
    yield two_scalings_of(ROW, COLUMN, True, True)


def per_block() -> Iterator[Case]:
    for tile in (VECTOR, (128, 1), SQUARE, MX, (32, 1)):
        for transpose in (False, True):
            yield plain(transpose, tile, power_of_two=True)
    yield plain(False, VECTOR, E5M2, column_sum=True)
    yield plain(True, SQUARE, x=tensor(dtype=FP32), power_of_two=True)
    yield plain(True, SQUARE, x=tensor(RAGGED), power_of_two=True)


def two_scalings() -> Iterator[Case]:
    pairs = (VECTOR, (128, 1)), (MX, (32, 1))
    for (first, second), transpose, column_sum in itertools.product(pairs, (True, False), (True, False)):
        yield two_scalings_of(first, second, transpose, column_sum)
    yield two_scalings_of(VECTOR, (128, 1), True, False, RAGGED)


def commit_cases() -> Iterator[Case]:
    one = torch.ones(1, 1)
    calls = [(shape, True, True, one) for shape in SIZES]
    calls += [(LARGE, False, True, one), (LARGE, True, False, one), (LARGE, True, True, None)]
    for shape, transpose, column_sum, amax_weight in calls:
        x = tensor(shape)
        arguments = (x, *delayed_state(), one, amax_weight, E5M2, False, 0, *UPDATE, transpose, PAD, column_sum)
        words = "transposed" * transpose, "column sum" * column_sum, "weight cached" * (amax_weight is None)
        call = functools.partial(KERNELS["cast_and_commit"], *arguments)
        yield Case("cast_and_commit", describe(TENSOR, E5M2, x, *words), call)
    for length in (16, 1024):
        call = functools.partial(KERNELS["delayed_update"], *delayed_state(length), one, one, None, *UPDATE)
        yield Case("delayed_update", f"input and weight, history of {length}", call)


def dequantize() -> Iterator[Case]:
    for codes, tile, dtype in ((E4M3, TENSOR, BF16), (E4M3, TENSOR, FP32), (E5M2, ROW, BF16), (E4M3, SQUARE, BF16)):
        q = tensor(dtype=codes)
        scale_inv = torch.empty(granularity_of(tile).scale_shape(LARGE))
        call = functools.partial(KERNELS["dequantize"], q, scale_inv, tile, dtype)
        yield Case("dequantize", f"{granularity_of(tile)} {name_of(codes)} to {name_of(dtype)} {list(LARGE)}", call)
        sums, extremes = torch.empty(71, dtype=torch.float64), torch.empty(3)
        call = functools.partial(KERNELS["cast_statistics"], tensor(dtype=dtype), q, scale_inv, tile, sums, extremes)
        yield Case(
            "cast_statistics", f"{granularity_of(tile)} {name_of(codes)} of {name_of(dtype)} {list(LARGE)}", call
        )


def note_faults() -> Iterator[Case]:
    one, faults = torch.ones(1, dtype=torch.int32), torch.zeros(4)
    for shape, tile, dtype, amax in (
        (LARGE, TENSOR, E5M2, torch.ones(1, 1)),
        (LARGE, VECTOR, E4M3, None),
        (LARGE, ROW, BF16, None),
        ((1, 1), TENSOR, E4M3, None),
    ):
        scale_inv = torch.empty(granularity_of(tile).scale_shape(shape))
        call = functools.partial(
            KERNELS["note_faults"], tensor(shape), tensor(shape, dtype), scale_inv, amax, one, faults, one
        )
        extra = "" if amax is None else ", Delayed"
        yield Case("note_faults", f"{granularity_of(tile)} {name_of(dtype)} {list(shape)}{extra}", call)


_PRODUCTS = unpacking({"matmul": triton_matmul, "grouped_matmul": triton_grouped_matmul})


def matmul() -> Iterator[Case]:
    """Yield the Triton kernel for every pair of granularities, also where a GPU runs torch's own product."""
    for shape in SIZES:
        yield product(shape, E4M3, TENSOR, TENSOR, fast=True, bias=True)
        yield product(shape, E4M3, VECTOR, SQUARE)
    yield product(LARGE, E5M2, TENSOR, TENSOR)
    yield product(LARGE, E4M3, ROW, ROW)
    yield product(LARGE, E4M3, VECTOR, VECTOR)
    yield product(LARGE, E4M3, MX, MX)
    yield product(SIZES[0], E4M3, MX, MX)
    yield product(LARGE, E4M3, TENSOR, TENSOR, dtype=FP32, K=4096 + 16)


def product(
    shape: tuple[int, int],
    a_codes: torch.dtype,
    a_tile: Tile,
    b_tile: Tile,
    dtype: torch.dtype = BF16,
    fast: bool = False,
    bias: bool = False,
    K: int = 4096,
) -> Case:
    M, N = shape
    a, b = tensor((M, K), a_codes), tensor((N, K), E4M3)
    scale_invs = [scales(scale_shape(q.shape, tile), tile) for q, tile in ((a, a_tile), (b, b_tile))]
    added = torch.empty(N, dtype=dtype) if bias else None
    arguments = (a, scale_invs[0], a_tile, b, scale_invs[1], b_tile, added, dtype, fast)
    kinds = f"{granularity_of(a_tile)} {name_of(a_codes)} . {granularity_of(b_tile)} {name_of(E4M3)}"
    what = f"{kinds} to {name_of(dtype)}{' bias' * bias}{' fast' * fast} [{M}, {N}, {K}]"
    return Case("matmul", what, functools.partial(_PRODUCTS["matmul"], *arguments))


def many_tensors() -> Iterator[Case]:
    xs = [tensor(shape) for shape in (SIZES[0], LARGE, LARGE)]
    for tile, transpose, delayed in ((TENSOR, True, False), (TENSOR, False, True), (SQUARE, True, False)):
        laid = [torch.empty(x.shape[::-1], dtype=E4M3) for x in xs] if transpose else []
        scale_invs = [[torch.empty(granularity_of(tile).scale_shape(x.shape)) for x in xs] for _ in range(2)]
        scales = [delayed_state()[0] for _ in xs] if delayed else []
        qs = [torch.empty(x.shape, dtype=E4M3) for x in xs]
        arguments = (xs, qs, laid, *scale_invs, scales, 1, tile, False, 0)
        words = f"{granularity_of(tile)} e4m3{' delayed' * delayed}{' transposed' * transpose} of {len(xs)} bfloat16"
        yield Case("multi_tensor_cast", words, functools.partial(KERNELS["multi_tensor_cast"], *arguments))


# --- casts of an activation or its gradient ---------------------------------------------------------------------------


def activations() -> Iterator[Case]:
    """Yield each function forward and backward; then SwiGLU in all ways that recipes cast."""
    for name in ACTIVATIONS:
        yield activated(name, False)
        yield activated(name, True)
    for gradient in (False, True):
        for shape in (*SIZES, RAGGED):
            yield activated("swiglu", gradient, shape=shape, delayed=False)
        yield activated("swiglu", gradient, False)
        yield activated("swiglu", gradient, dtype=FP32)
        yield activated("swiglu", gradient, False, ROW)
        yield activated("swiglu", gradient, False, COLUMN)
        yield activated("swiglu", gradient, False, VECTOR)
        yield activated("swiglu", gradient, tile=SQUARE)
        for first, second in ((VECTOR, (128, 1)), (MX, (32, 1)), (ROW, COLUMN)):
            yield activated_twice("swiglu", gradient, first, second)
            yield activated_twice("gelu", gradient, first, second)
        for h_tile in (TENSOR, VECTOR):
            yield activated("swiglu", gradient, h_tile=h_tile)
    for again in (False, True):
        yield from (committed(name, shape, again) for name, shape in itertools.product(("swiglu", "gelu"), SIZES))


def _activation(
    name: str, gradient: bool, shape: tuple[int, int], dtype: torch.dtype = BF16, h_tile: Tile | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Return the tensor that an op casts, and its other arguments; ``shape`` is that of the activation's output."""
    rows, cols = shape
    h = tensor((rows, 2 * cols if ACTIVATIONS[name].gated else cols), dtype if h_tile is None else E4M3)
    named: dict[str, Any] = {"activation": name, "preactivation": h if gradient else None}
    if h_tile is not None:
        named |= {"h_scale_inv": torch.empty(granularity_of(h_tile).scale_shape(h.shape)), "h_tile": h_tile}
    return tensor(shape, dtype) if gradient else h, named


def _words(name: str, gradient: bool, h_tile: Tile | None = None) -> str:
    return f"{name}{' gradient' * gradient}{'' if h_tile is None else f' of {granularity_of(h_tile)} codes'}"


def activated(
    name: str,
    gradient: bool,
    transpose: bool = True,
    tile: Tile = TENSOR,
    shape: tuple[int, int] = LARGE,
    dtype: torch.dtype = BF16,
    delayed: bool = True,
    h_tile: Tile | None = None,
) -> Case:
    x, named = _activation(name, gradient, shape, dtype, h_tile)
    state = delayed_state()[0] if delayed and tile == TENSOR else None
    words = "transposed" * transpose, "delayed" * (state is not None), "column sum" * gradient
    named |= {"codes": E5M2 if gradient else E4M3, "power_of_two": tile not in (TENSOR, ROW, COLUMN)}
    # with eight codes a thread two tiles fit its registers
    named |= {
        "transpose": transpose,
        "column_sum": gradient,
        "bits": 64 if gradient and ACTIVATIONS[name].gated else 128,
    }
    return cast("cast", x, tile, *words, _words(name, gradient, h_tile), state=state, **named)


def activated_twice(name: str, gradient: bool, first: Tile, second: Tile) -> Case:
    x, named = _activation(name, gradient, LARGE)
    words = f"and {granularity_of(second)} transposed", _words(name, gradient)
    named |= {"power_of_two": True, "bits": 64 if gradient and first == ROW and ACTIVATIONS[name].gated else 128}
    named |= {"transpose": True, "column_sum": gradient, **second_scaling(second, True)}
    return cast("cast_two_scalings", x, first, *words, **named)


def committed(name: str, shape: tuple[int, int], again: bool) -> Case:
    """Return the cast of an activation's gradient that rolls a state; ``again``: it casts the activation too."""
    x, activation = _activation(name, True, shape)
    one = torch.ones(1, 1)
    arguments = x, *delayed_state(), one, one, E5M2, False, 0, *UPDATE, True, PAD, True, *activation.values()
    recast = {"recast_scale": torch.ones(1), "recast_dtype": E4M3, "recast_transposed": True} if again else {}
    call = functools.partial(KERNELS["cast_and_commit"], *arguments, **recast)
    words = "transposed column sum", _words(name, True), f"and {name}" * again
    what = describe(TENSOR, E5M2, x, *words)
    return Case("cast_and_commit", what, call, 64 if ACTIVATIONS[name].gated else 128)


# --- rows in groups, as experts' are ----------------------------------------------------------------------------------

EXPERTS = 128


def offsets(groups: int = EXPERTS) -> Tensor:
    """Return groups' ends, which nothing reads."""
    return torch.empty(groups, dtype=torch.int32)


def grouped() -> Iterator[Case]:
    """Yield the casts that each recipe makes of tokens, gradients and weights; then the products."""
    for shape, transpose in itertools.product(SIZES, (False, True)):
        yield grouped_cast(TENSOR, transpose, shape=shape)
        yield grouped_cast(TENSOR, transpose, shape=shape, delayed=True)
    for shape in (LARGE, RAGGED):
        yield grouped_cast(COLUMN, True, as_is=False, shape=shape)
        yield grouped_cast(ROW, False, shape=shape)
        for tile in (VECTOR, MX):
            yield grouped_cast(tile, False, shape=shape)
            yield grouped_cast(tile[::-1], True, as_is=False, shape=shape)
        yield grouped_cast(SQUARE, True, shape=shape)
    for extras in (("swiglu",), ("swiglu", True)):
        for tile, transpose in ((TENSOR, True), (ROW, False), (VECTOR, False), ((128, 1), True), ((32, 1), True)):
            yield grouped_cast(tile, transpose, tile != (128, 1), LARGE, tile == TENSOR, *extras)
        yield grouped_cast(COLUMN, True, False, LARGE, False, *extras)
        yield grouped_cast((128, 1), True, False, LARGE, False, *extras, h_tile=VECTOR)
    for shape in SIZES:
        yield _rows(shape, TENSOR, TENSOR)
        yield _rows(shape, VECTOR, SQUARE)
    yield _rows(LARGE, ROW, ROW, dtype=FP32, bias=True)
    yield _rows(LARGE, MX, MX)
    yield _rows((16384, 4096), VECTOR, SQUARE)
    for tile in (TENSOR, ROW, VECTOR, MX):
        yield _terms(tile)
    for tile in (ROW, MX):
        yield _rows(LARGE, tile, tile, call=_library)


def statistics() -> Iterator[Case]:
    """Yield the reads of octavo.inspect of rows in groups."""
    one, faults = torch.ones(1, dtype=torch.int32), torch.zeros(4)
    for tile in (TENSOR, ROW, SQUARE):
        q, scale_inv = tensor(dtype=E4M3), torch.empty(grouped_scale_shape(LARGE, EXPERTS, tile))
        where = f"{granularity_of(tile)} e4m3 {list(LARGE)} in {EXPERTS} groups"
        sums, extremes = torch.empty(EXPERTS, 71, dtype=torch.float64), torch.empty(EXPERTS, 3)
        counted = tensor(), q, scale_inv, tile, sums, extremes, offsets()
        yield Case("cast_statistics", where, functools.partial(KERNELS["cast_statistics"], *counted))
        noted = tensor(), q, scale_inv, None, one, faults, one, offsets()
        yield Case("note_faults", where, functools.partial(KERNELS["note_faults"], *noted))


def grouped_cast(
    tile: Tile,
    transpose: bool,
    as_is: bool = True,
    shape: tuple[int, int] = LARGE,
    delayed: bool = False,
    activation: str = "",
    gradient: bool = False,
    h_tile: Tile | None = None,
) -> Case:
    rows, cols = shape
    h = tensor((rows, 2 * cols), BF16 if h_tile is None else E4M3)
    scale_inv = None if h_tile is None else torch.empty(grouped_scale_shape((rows, 2 * cols), EXPERTS, h_tile))
    named = {"activation": activation, "preactivation": h if gradient else None, "h_scale_inv": scale_inv}
    named |= {"h_tile": h_tile or TENSOR, "transpose": transpose, "offsets": offsets(), "as_is": as_is}
    named |= {"codes": E5M2 if gradient else E4M3, "power_of_two": tile not in (TENSOR, ROW, COLUMN)}
    named |= {"state": delayed_state()[0] if delayed else None}
    words = (
        f"{'only ' * (not as_is)}transposed" * transpose,
        "delayed" * delayed,
        f"{activation}{' gradient' * gradient}{' of codes' * (h_tile is not None)}",
    )
    bits = 64 if gradient and TENSOR[0] in tile else 128  # with eight codes a thread two tiles fit its registers
    case = cast("grouped_cast", tensor(shape) if gradient or not activation else h, tile, *words, bits=bits, **named)
    return case._replace(what=f"{case.what} in {EXPERTS} groups")


_LIBRARY = unpacking({"grouped_matmul": lambda operands, _, fast: library_grouped_matmul(operands, fast)})


def _library(*arguments: Any) -> None:
    """Launch the kernels that octavo runs around torch's own product."""
    with mock.patch.object(F, "scaled_grouped_mm", lambda a, b, *_, **__: a.new_empty(len(a), b.shape[-1], dtype=BF16)):
        _LIBRARY["grouped_matmul"](*arguments)


def _product(what: str, *arguments: Any, call: Callable[..., Any] = _PRODUCTS["grouped_matmul"]) -> Case:
    return Case("grouped_matmul", what, functools.partial(call, *arguments))


def _rows(
    shape: tuple[int, int],
    a_tile: Tile,
    b_tile: Tile,
    K: int = 2048,
    dtype: torch.dtype = BF16,
    bias: bool = False,
    call: Callable[..., Any] | None = None,
) -> Case:
    M, N = shape
    groups = 8
    a, b = tensor((M, K), E4M3), tensor((groups, N, K), E4M3)
    shapes = grouped_scale_shape((M, K), groups, a_tile), scale_shape(b.shape, b_tile)
    if b_tile == TENSOR:
        shapes = shapes[0], (groups, 1, 1)
    of_a, of_b = (scales(shape, tile) for shape, tile in zip(shapes, (a_tile, b_tile), strict=True))
    added = torch.empty(groups, N, dtype=dtype) if bias else None
    what = f"{granularity_of(a_tile)} e4m3 . {granularity_of(b_tile)} e4m3 to {name_of(dtype)}{' bias' * bias}"
    arguments = a, of_a, a_tile, b, of_b, b_tile, offsets(groups), added, dtype, False
    what += f" [{M}, {N}, {K}], rows in {groups} groups{', by torch' * (call is not None)}"
    return _product(what, *arguments, call=call or _PRODUCTS["grouped_matmul"])


def _terms(tile: Tile, N: int = 2048, K: int = 2048, rows: int = 16384) -> Case:
    groups = 8
    columns = padded_columns(rows, groups, PAD)
    pairs = [(tensor((size, columns), E4M3), terms_scales((rows, size), groups, tile), tile) for size in (N, K)]
    what = f"{granularity_of(tile)} e4m3 . the same to bfloat16 [{N}, {K}, {rows}], terms in {groups} groups"
    return _product(what, *pairs[0], *pairs[1], offsets(groups), None, BF16, False, PAD)


# --- norms and their gradients ----------------------------------------------------------------------------------------

LONG = (2048, 32768)  # rows that no tile holds


def norm() -> Iterator[Case]:
    for transpose, shape in itertools.product((True, False), (LARGE, LONG)):
        yield normed("layer_norm", TENSOR, transpose, shape, state=delayed_state()[0])
    yield normed("layer_norm", TENSOR, True, RAGGED, state=delayed_state()[0], keep=True)
    yield normed("layer_norm", TENSOR, True, dtype=FP32, state=delayed_state()[0], keep=True)
    for tile, shape in itertools.product((ROW, VECTOR), (LARGE, LONG, RAGGED, (16384, 1024), (4096, 16384))):
        yield normed("layer_norm", tile, False, shape)
    for kind in ("layer_norm", "rms_norm"):
        yield normed(kind, TENSOR, True, state=torch.ones(3))  # a first step, whose scale may not exist
        yield normed(kind, TENSOR, False, dtype=FP32, keep=True)
        yield normed(kind, TENSOR, True, state=delayed_state()[0])
        yield normed(kind, ROW, True, RAGGED)
        yield normed(kind, MX, True)
        for pair in ((ROW, COLUMN), (VECTOR, (128, 1)), (MX, (32, 1))):
            yield normed_twice(kind, *pair)


def _of_norm(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a norm as the cast takes it."""
    gamma = torch.empty(shape[1], dtype=dtype)
    return {"gamma": gamma, "beta": gamma.clone() if kind == "layer_norm" else None, "kind": kind, "eps": 1e-5}


def normed(
    kind: str,
    tile: Tile,
    transpose: bool,
    shape: tuple[int, int] = LARGE,
    dtype: torch.dtype = BF16,
    state: Tensor | None = None,
    keep: bool = False,
) -> Case:
    words = kind, "delayed" * (state is not None), "transposed" * transpose, "and y" * keep
    named = {"state": state, "transpose": transpose, "keep": keep, **_of_norm(kind, shape, dtype)}
    return cast("norm_cast", tensor(shape, dtype), tile, *words, **named)


def normed_twice(kind: str, first: Tile, second: Tile) -> Case:
    words = f"and {granularity_of(second)} transposed", kind
    named = {"power_of_two": True, "transpose": True, **_of_norm(kind, LARGE, BF16), **second_scaling(second, True)}
    return cast("norm_cast_two_scalings", tensor(), first, *words, **named)


def norm_backward() -> Iterator[Case]:
    shapes = LARGE, (16384, 1024), (4096, 8192), LONG, RAGGED
    cases = [("layer_norm", shape, dtype, True) for shape, dtype in itertools.product(shapes, (BF16, FP32))]
    cases += [("rms_norm", shape, BF16, False) for shape in (LARGE, LONG)]
    for kind, shape, dtype, residual in cases:
        x, gamma = tensor(shape, dtype), torch.empty(shape[1], dtype=dtype)
        rows = torch.empty(shape[0])
        arguments = x, x, gamma, rows, rows, kind, False, kind == "layer_norm", x if residual else None
        what = f"{kind} of {name_of(dtype)} {list(shape)}{' and a residual' * residual}"
        yield Case("norm_backward", what, functools.partial(KERNELS["norm_backward"], *arguments))


def between_layers() -> Iterator[Case]:
    x, gamma = tensor(), torch.empty(LARGE[1], dtype=BF16)
    for residual in (None, x):
        arguments = x, gamma, None, "rms_norm", 1e-5, False, residual
        what = f"rms_norm of bf16 {list(LARGE)}{' and a residual' * (residual is not None)}"
        yield Case("norm", what, functools.partial(KERNELS["norm"], *arguments))
    heads = [torch.empty(8, 2048, count, 64, dtype=BF16) for count in (32, 8, 8)]
    angles = torch.empty(2, 1, 2048, 64, dtype=BF16).unbind()
    for inverse in (False, True):
        call = functools.partial(KERNELS["rotary"], *heads, *angles, inverse)
        yield Case("rotary", f"heads of 64{', turned back' * inverse}", call)
    arguments = heads[0], *delayed_state(), *torch.ones(2, 1, 1), E5M2, False, 0, *UPDATE, True, PAD
    named = {"k": heads[1], "v": heads[2], "cos": angles[0], "sin": angles[1]}
    call = functools.partial(KERNELS["cast_and_commit"], *arguments, **named)
    yield Case("cast_and_commit", "gradients of heads of 64, turned back", call)
    logits, target, rows = tensor((4096, 32768)), torch.empty(4096, dtype=torch.int64), torch.empty(4096)
    for softcap in (0.0, 30.0):
        how, capped = (logits, target, -100, 0.0, softcap), " with a softcap" * (softcap > 0)
        yield Case("cross_entropy", f"of 32,768 columns{capped}", functools.partial(KERNELS["cross_entropy"], *how))
        call = functools.partial(KERNELS["cross_entropy_backward"], *how, rows, rows)
        yield Case("cross_entropy_backward", f"of 32,768 columns{capped}", call)
        codes = [torch.empty(shape, dtype=torch.float8_e5m2) for shape in (logits.shape, logits.shape[::-1])]
        call = functools.partial(KERNELS["cross_entropy_codes"], *how, rows, *codes, 0)
        yield Case("cross_entropy_codes", f"of 32,768 columns{capped}", call)


# --- steps of optimizers: masters, moments, layouts -------------------------------------------------------------------

SGD = SgdGroup(1e-3, 0.9, 0.0, 0.01, False, False)
ODD = (1000, 1000)  # rows end within a block

_PREVIOUS = (
    Moment(formats.E4M3, granularity=PerTensor(), scale="previous"),
    Moment(formats.E5M2, root=True, granularity=PerTensor(), scale="previous"),
)
_TWO_STAGES = (Moment(formats.E4M3, granularity=PerTensor()), Moment(formats.E5M2, root=True, granularity=PerTensor()))


def coded(update: WeightUpdate) -> WeightUpdate:
    """Return the update with its gradient in E4M3 codes."""
    rows, cols = update.gradient.shape
    codes = tensor((rows, cols), torch.uint8)
    return update._replace(gradient=codes, gradient_scale_inv=torch.empty(rows, -(-cols // 128)))


def update(
    shape: Sequence[int],
    moments: str | tuple[Moment, ...],
    master: str | None,
    dtype: torch.dtype,
    grad: torch.dtype,
    scale_inv: Tensor | None = None,
) -> WeightUpdate:
    """Return the update of an empty weight on the default device, with a new state; ``scale_inv``: of codes."""
    device = torch.get_default_device()
    weight = torch.empty(tuple(shape), dtype=dtype, device=device)
    form = (MASTERS if scale_inv is None else FP8_MASTERS)[master]
    state = form.new_state(weight)
    if scale_inv is not None:
        state["master_amax"] = torch.empty_like(scale_inv)
    chosen = moments_of(moments) if isinstance(moments, str) else moments
    for number, moment in enumerate(chosen):
        state |= moment.new_state(str(number), weight.shape, weight.device)
    stored = tuple(moment.for_kernel(str(number), state) for number, moment in enumerate(chosen))
    kernel_master = form.for_kernel(as_matrix(weight), state, scale_inv)
    step, gradient = torch.zeros((), dtype=torch.float32, device=device), torch.empty_like(weight, dtype=grad)
    return WeightUpdate(kernel_master, stored, gradient, step, BitNumbers(1), 0)


def stored_update(shape: Sequence[int], master: str | None, granularity: Granularity) -> WeightUpdate:
    """Return the update of a weight that is stored in FP8."""
    scale_inv = torch.empty(granularity.scale_shape(shape), dtype=torch.float32)
    return update(shape, "fp8", master, torch.uint8, BF16, scale_inv)


def optimizer() -> Iterator[Case]:
    fp8 = NAMED_MOMENTS["fp8"]
    for master, dtype in (("fp32", FP32), ("split32", BF16), ("split24", BF16), (None, BF16)):
        yield step(f"Adam fp8, {master}", [update(LARGE, fp8, master, dtype, BF16)])
    for name in ("fp32", "bf16"):
        yield step(f"Adam {name}, split32", [update(LARGE, NAMED_MOMENTS[name], "split32", BF16, FP32)])
    for name, moments in (("previous amax", _PREVIOUS), ("two stages", _TWO_STAGES)):
        yield step(f"Adam {name}, split24", [update(LARGE, moments, "split24", BF16, BF16)])
    yield step("Adam fp8, odd rows", [update(ODD, fp8, "split32", BF16, BF16)])._replace(bits=8)
    mixed = [update(LARGE, fp8, "split32", BF16, BF16), update((1, 4096), fp8, "fp32", FP32, FP32)]
    yield step("Adam fp8, two kinds of weights", mixed)
    yield step("Adam coupled fp8, split32", mixed[:1], ADAM._replace(decoupled=False, bounds_update=False))
    for master, granularity in itertools.product(FP8_MASTERS, (PerTensor(), PerBlock(128, 128))):
        yield step(f"Adam fp8, E4M3 weight {granularity}, {master}", [stored_update(LARGE, master, granularity)])
    yield step("SGD fp8, split24", [update(LARGE, fp8[:1], "split24", BF16, BF16)], SGD)
    for number, master in enumerate(("fp32", "split24")):
        one = coded(update(LARGE, fp8, master, (FP32, BF16)[number], BF16))
        yield step(f"Adam fp8, {master}, gradients in E4M3", [one])
    yield step("Adam fp32, gradients in E4M3", [coded(update(LARGE, NAMED_MOMENTS["fp32"], "fp32", FP32, FP32))])
    stored = coded(stored_update(LARGE, "split16", PerBlock(128, 128)))
    yield step("Adam fp8, E4M3 weight in blocks, split16, gradients in E4M3", [stored])
    odd = coded(update(ODD, fp8, "split32", BF16, BF16))
    yield step("Adam fp8, odd rows, gradients in E4M3", [odd])._replace(bits=8)
    yield step("SGD fp8, split24, gradients in E4M3", [coded(update(LARGE, fp8[:1], "split24", BF16, BF16))], SGD)
    measured = {"resolution": torch.empty(2, dtype=torch.float64)}
    for master, granularity in itertools.product(("split16", None), (PerTensor(), PerBlock(128, 128))):
        one = stored_update(LARGE, master, granularity)._replace(measured=True)
        yield step(f"Adam fp8, E4M3 weight {granularity}, {master}, measured", [one], **measured)
    one = update(LARGE, fp8, "split32", BF16, BF16)._replace(measured=True)
    yield step("Adam fp8, split32, measured", [one], **measured)


def step(what: str, updates: list[WeightUpdate], group: AdamGroup | SgdGroup = ADAM, **options: Tensor) -> Case:
    call = functools.partial(optimizer_step, updates, [group], **options)
    return Case("optimizer_step", what, call, bits=64)  # 8 codes a thread


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "amax": amax,
    "per tensor": per_tensor,
    "per row": per_row,
    "per block": per_block,
    "two scalings": two_scalings,
    "commit": commit_cases,
    "dequantize": dequantize,
    "note faults": note_faults,
    "matmul": matmul,
    "many tensors": many_tensors,
    "activations": activations,
    "grouped": grouped,
    "statistics of groups": statistics,
    "norm": norm,
    "norm backward": norm_backward,
    "between layers": between_layers,
    "optimizer": optimizer,
}
