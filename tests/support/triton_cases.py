"""What the Triton kernels' tests put in, and the one comparison with the reference."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.formats import format_of
from octavo.kernels.activations import activation_of
from octavo.kernels.backward_pass import backward_pass
from octavo.kernels.layouts import multiply_tiles_, transposed, with_padding
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.codes import decode
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from tests.support.definitions import same_bits
from tests.support.triton_kernels import TritonKernels

E4M3, E5M2 = FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(0, 17), (17, 0), (1, 1), (1, 270), (270, 1), (128, 17), (64, 256), (33, 270)]
LAYOUTS = ["rows", "columns", "strided", "offset"]
VALUES = ["varied", "faults", "only faults", "zeros", "edge"]
ALL = (-1, -1)
INPUT: dict[str, Any] = {"shape": SHAPES, "dtype": DTYPES, "layout": LAYOUTS, "values": VALUES, "small": [False, True]}
# besides a tile: of casts by one scaling
CAST = INPUT | {"fmt": FORMATS, "power_of_two": [False, True], "margin": [0, 3], "pad": [1, 16]}
BOTH_LAYOUTS = CAST | {"transpose": [False, True], "column_sum": [False, True]}

ROUNDINGS = 2.0**-20  # what float32's make of an activation or a slope, relative to ``magnitude``

# Smaller tiles than a table has, so that small tensors are several programs in each direction. What is padded to 16
# needs tiles of 16.
SMALL_TILES = {
    "amax": [16, 64, 2, 4],
    "cast": [8, 64, 3, 4],
    "cast_transpose": [16, 32, 2, 4],
    "cast_rows": [4, 128, 1, 4],
    "amax_lines": [16, 32, 2, 4],
    "cast_lines": [16, 32, 2, 4],
    "cast_blocks": [16, 32, 1, 4],
    "cast_blocks_transpose": [32, 32, 1, 4],
    "norm_cast": [2, 128, 2, 4],
    "norm_cast_transpose": [16, 32, 2, 4],
    "norm_cast_blocks": [2, 128, 1, 4],
    "norm_cast_blocks_transpose": [32, 32, 1, 4],
    "norm_backward": [4, 64, 1, 8],
}


def values_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor [R, C] on the CPU, whose rows and columns differ in size.

    Args:
        kind: "varied": finite; "faults": with inf and NaN; "only faults": some rows and columns hold no other;
            "zeros"; "edge": the largest and the smallest numbers too.
        shape: its shape.
        dtype: its dtype.
    """
    rows, cols = shape
    x = torch.randn(shape) * torch.logspace(-2, 1, cols) * torch.logspace(-1, 1, rows)[:, None]
    if kind == "zeros":
        x.zero_()
    if kind == "only faults":
        x[: (rows + 1) // 2], x[:, : (cols + 1) // 2] = math.nan, math.nan
        x[1:2] = math.inf
    x = x.to(dtype)
    info = torch.finfo(dtype)
    special = {
        "faults": [math.nan, math.inf, -math.inf, -math.nan],
        "edge": [info.max, -info.max / 3, info.smallest_normal * info.eps, -info.smallest_normal, -0.0],
    }
    for i, value in enumerate(special.get(kind, ())):
        flat = x.view(-1)[(7 * i + 1) % 11 :: 211 + i]
        flat.fill_(value)
    return x


def laid(x: Tensor, layout: str, device: torch.device) -> Tensor:
    """``x`` on the device, in memory whose other elements are the largest numbers.

    Args:
        x: [R, C] on the CPU.
        layout: "rows": contiguous; "columns": that of a transposed tensor; "strided": both strides odd; "offset":
            contiguous, but where no vector may be read.
        device: where to.
    """
    rows, cols = x.shape
    strides, offset = {
        "rows": ((cols, 1), 0),
        "columns": ((1, rows), 0),
        "strided": (((3 * cols + 1) | 1, 3), 5),
        "offset": ((cols, 1), 1),
    }[layout]
    size = offset + (rows * strides[0] + cols * strides[1]) + 1
    largest = torch.finfo(x.dtype).max if x.is_floating_point() else 0x7E
    memory = torch.full((size,), largest, dtype=x.dtype)
    memory.as_strided(x.shape, strides, offset).copy_(x)
    return memory.to(device).as_strided(x.shape, strides, offset)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def to(device: str | torch.device, tree: Any) -> Any:
    """A copy, with its tensors on the device."""
    return tree_map(lambda a: a.detach().to(device, copy=True) if isinstance(a, Tensor) else a, tree)


class Run(NamedTuple):
    """What an op and its reference made of the same arguments, by their names, all on one device."""

    op: str
    given: dict[str, Any]  # the arguments before
    actual: dict[str, Tensor]
    left: dict[str, Any]  # the arguments afterwards
    expected: dict[str, Tensor]
    right: dict[str, Any]  # as the reference left them


def run_both(kernels: TritonKernels, op: str, *args: Any, where: str = "cpu", **named: Any) -> Run:
    """Run an op, into poisoned memory, and its reference."""
    given, (flat, right) = named_arguments(op, *to(where, args), **to(where, named)), to(where, (args, named))
    expected, right = REFERENCE[op](*flat, **right), named_arguments(op, *flat, **right)
    with poisoned_memory():
        actual = getattr(kernels, op)(*args, **named)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.device.type == kernels.device.type
        assert ours.is_contiguous() if theirs.is_contiguous() else ours.t().is_contiguous()
    assert_counters_are_zero(kernels)
    if op == "cast_and_commit":  # outside of a backward each call is a pass by itself: the kernels' is the last
        (numbers, _), (old, _) = right["delayed_before"], given["delayed_before"]
        numbers[numbers != old] = backward_pass(args[0].device).item() - 1
    left, found = named_arguments(op, *to(where, args), **to(where, named)), to(where, actual)
    return Run(op, given, named_results(op, given, found), left, named_results(op, given, expected), right)


def named_results(op: str, given: dict[str, Any], results: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a cast returned, by name."""
    names = ["q", "t", "scale_inv", "amax"]
    if given.get("second_dtype") is not None:
        names = ["q", "second", "scale_inv", "second_scale_inv"]
    if op == "cast_and_commit":
        names.remove("amax")
    if given.get("gamma") is not None:
        names += ["mean", "rstd", "y"]
    elif given.get("offsets") is None:
        names.append("sums")
    return dict(zip(names, results, strict=True))


def check(
    kernels: TritonKernels, op: str, *args: Any, compare_sums: bool = True, where: str = "cpu", **named: Any
) -> tuple[Tensor, ...]:
    """Run an op that casts and compare each result and each argument that it may write with the reference's.

    Args:
        kernels: the Triton kernels.
        op: its name.
        args: its arguments, tensors on the kernels' device, x first.
        compare_sums: False where a sum may depend on the order.
        where: on which device the reference runs and is compared.
        named: the op's arguments by name.

    Returns:
        the results, on that device.
    """
    run = run_both(kernels, op, *args, where=where, **named)
    for found, right in ((run.actual, run.expected), (run.left, run.right)):
        for name, a in found.items():
            assert name == "sums" or not isinstance(a, Tensor) or same_bits(a, right[name]), f"{op}: {name} differs"
    if compare_sums and "sums" in run.actual:
        values = produced(run.given["x"], *run.given["activation"])
        assert_sums(run.actual["sums"], run.expected["sums"], values)
    return tuple(run.actual.values())


def check_close(
    kernels: TritonKernels, op: str, *args: Any, compare_sums: bool = True, where: str = "cpu", **named: Any
) -> tuple[Tensor, ...]:
    """``check`` of an activation, whose kernel rounds otherwise on its way to what is cast; see ``assert_close``."""
    run = run_both(kernels, op, *args, where=where, **named)
    assert_close(run, compare_sums)
    return tuple(run.actual.values())


def assert_close(run: Run, compare_sums: bool = True) -> None:
    """Compare what a cast of an activation or of its gradient left with what the reference did.

    An amax is wrong by no more than float32's roundings, a scale is that of the amax found, and codes are those of
    values that are wrong by roundings. All else is the same, and the transposed codes are the others, transposed.
    """
    op, given, actual, left, expected, right = run
    x = given["x"], *given["activation"]
    values = Values(produced(*x), magnitude(*x))
    assert all(a.shape == expected[name].shape and a.dtype == expected[name].dtype for name, a in actual.items())
    written: tuple[str, ...] = ()
    if op == "cast_and_commit":
        written = "delayed_scale", "delayed_amax_history"
        actual = actual | {"amax": left["delayed_amax_history"][2:, :1]}
        assert_committed(left, right)
    for name, a in left.items():
        assert not isinstance(a, Tensor) or same_bits(a, right[name]) or name in written
    cols = values.y.shape[1]
    if "t" in expected and expected["t"].numel() > 0:
        assert same_bits(actual["t"], with_padding(transposed(actual["q"][:, :cols]), given["pad"]))
    tile = given.get("tile", ALL)
    assert_codes_close(actual["q"], expected["q"], actual["scale_inv"], values, tile)
    state, role = given.get("delayed_scale"), given.get("role", 2)
    if state is not None and state[role] != 0:
        assert same_bits(actual["scale_inv"], expected["scale_inv"])
        assert_amax_close(actual["amax"], values, ALL)
    else:
        cast = given["dtype"], given["power_of_two"], given["margin"]
        assert_scales_close(actual["scale_inv"], actual.get("amax"), values, tile, *cast)
    if compare_sums:
        assert_sums(actual["sums"], expected["sums"], values.y, values.size)
    if "second" in expected:
        tile = given["second_tile"]
        if given["transpose"]:
            values, tile = Values(values.y.t(), values.size.t()), tile[::-1]
        assert_codes_close(actual["second"], expected["second"], actual["second_scale_inv"], values, tile)
        cast = given["second_dtype"], given["second_power_of_two"], given["second_margin"]
        assert_scales_close(actual["second_scale_inv"], None, values, tile, *cast)


class Values(NamedTuple):
    """What is cast, and what the roundings on the way to it are relative to."""

    y: Tensor  # [R, C] fp32
    size: Tensor  # [R, C] fp64


def named_arguments(op: str, *args: Any, **by_name: Any) -> dict[str, Any]:
    """An op's arguments by the names of its schema; ``activation`` is all that says what is computed of x."""
    defaults = {a.name: a.default_value for a in getattr(torch.ops.octavo, op).default._schema.arguments}
    named = defaults | dict(zip(defaults, args, strict=False)) | by_name
    if "activation" in named:
        named["activation"] = [named[name] for name in ("activation", "preactivation", "h_scale_inv", "h_tile")]
    return named


def magnitude(
    x: Tensor,
    activation: str = "",
    preactivation: Tensor | None = None,
    h_scale_inv: Tensor | None = None,
    h_tile: Sequence[int] = ALL,
) -> Tensor:
    """|h| or |gate up|; of a gradient |dy| or (|dy up| | |dy gate|). float64."""
    h = x if preactivation is None else preactivation
    size = (h if h_scale_inv is None else decode(h, torch.float32, h_scale_inv, h_tile)).double()
    if activation and activation_of(activation).gated:
        gate, up = size.chunk(2, dim=1)
        size = gate * up if preactivation is None else torch.cat((x * up, x * gate), 1)
    elif preactivation is not None:
        size = x.double()
    return size.abs()


def assert_codes_close(codes: Tensor, expected: Tensor, scale_inv: Tensor, values: Values, tile: Sequence[int]) -> None:
    """Codes [R, C'] that values within their roundings have in this scale_inv; faults and padding the same."""
    cols = values.y.shape[1]
    a, b = (c.view(torch.uint8).int() for c in (codes, expected))
    assert torch.equal(a[:, cols:], b[:, cols:])
    a, b, fault = a[:, :cols], b[:, :cols], 0x7F if codes.dtype == E4M3 else 0x7C
    faulty = ((a & 0x7F) >= fault) | ((b & 0x7F) >= fault)
    assert torch.equal(a[faulty], b[faulty])
    wide = multiply_tiles_(torch.ones_like(values.y), scale_inv.float(), tile)
    scaled, limit = values.y / wide.double(), torch.finfo(codes.dtype).max
    error = values.size * ROUNDINGS / wide + scaled.abs() * 2.0**-22
    bounds = ((scaled + e).clamp(-limit, limit).float().to(codes.dtype) for e in (-error, error))
    least, most = (ordered(bound.view(torch.uint8).int()) for bound in bounds)
    found = ordered(a)
    assert bool(((least <= found) & (found <= most) | faulty).all())


def ordered(codes: Tensor) -> Tensor:
    """Bits of codes as integers that ascend with their values."""
    return torch.where(codes < 0x80, codes, 0x80 - codes)


def assert_amax_close(amax: Tensor, values: Values, tile: Sequence[int]) -> None:
    """An amax but for roundings."""
    allowed = REFERENCE["amax"]((values.size * ROUNDINGS).float(), tile)
    assert bool(((amax - REFERENCE["amax"](values.y, tile)).abs() <= allowed).all())


def assert_scales_close(
    scale_inv: Tensor,
    amax: Tensor | None,
    values: Values,
    tile: Sequence[int],
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> None:
    """The scale_inv of this amax, which is right; or where it is not known, of one that may be."""

    def of(amax: Tensor) -> Tensor:
        return scale_inv_from_scale(scale_from_amax(amax, format_of(dtype).max, power_of_two, margin))

    if amax is not None:
        assert_amax_close(amax, values, tile)
        assert same_bits(scale_inv, of(amax))
        return
    scale_inv = scale_inv.float()
    amax, allowed = (REFERENCE["amax"](v.float(), tile) for v in (values.y, values.size * ROUNDINGS))
    least, most = of((amax - allowed).clamp(min=2.0**-149)), of(amax + allowed)
    assert bool((((least <= scale_inv) & (scale_inv <= most)) | (scale_inv == of(amax))).all())


def assert_committed(left: dict[str, Any], right: dict[str, Any]) -> None:
    """The delayed state after a commit, but for the amax that it found: its scale is that of this history."""
    (scale, history), (expected, expected_history) = (
        (s["delayed_scale"], s["delayed_amax_history"]) for s in (left, right)
    )
    assert same_bits(history[:2], expected_history[:2]) and same_bits(history[2, 1:], expected_history[2, 1:])
    largest = history[2, :1] if left["reduce"] == "most_recent" else history[2].max().view(1)
    own = scale_from_amax(largest, left["limits"][2], left["powers_of_two"][2], left["margins"][2])
    assert same_bits(scale, torch.cat((expected[:2], torch.where(largest > 0, own, expected[2:]))))


def assert_sums(sums: Tensor, expected: Tensor, x: Tensor, size: Tensor | None = None) -> None:
    """Column sums of x, which may be added in any order; roundings in x itself are relative to ``size``."""
    assert sums.shape == expected.shape and sums.dtype == expected.dtype
    if sums.numel() == 0:
        return
    exact, size = x.double().sum(0), (x.double().abs() if size is None else size).sum(0)
    finite, infinite = exact.isfinite(), exact.isinf()
    assert torch.equal(sums.isnan(), exact.isnan())
    assert torch.equal(sums[infinite].double(), exact[infinite])
    info = torch.finfo(sums.dtype)
    allowed = info.eps / 2 * (exact.abs() + info.smallest_normal) + 2.0**-18 * size
    assert bool(((sums.double() - exact).abs() <= allowed)[finite].all())


def assert_counters_are_zero(kernels: TritonKernels) -> None:
    """What programs share is as the next launch expects it."""
    launch = kernels.module("launch")
    for work in (*launch._work.values(), *(work for pool in launch._pools.values() for work in pool)):
        assert not work.any(), "a launch left a counter or an amax behind"


def use_small_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels work in SMALL_TILES for the rest of the test."""
    launch = kernels.module("launch")
    config = launch.config

    def small(kernel: str, log2_elements: int) -> Any:
        name = kernel.removesuffix("_activation").removesuffix("_gradient").removesuffix("_gated").removesuffix("_norm")
        return launch.Config(*SMALL_TILES[name]) if name in SMALL_TILES else config(kernel, log2_elements)

    for module in kernels.modules.values():
        if vars(module).get("config") is config:
            monkeypatch.setattr(module, "config", small)


def count_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched in the rest of the test, as they are."""
    launch, names = kernels.module("launch").launch, []

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args, **options)

    for module in kernels.modules.values():
        if vars(module).get("launch") is launch:
            monkeypatch.setattr(module, "launch", record)
    return names


def update_args(
    reduce: str, powers_of_two: Sequence[bool] = (False, True, False), margins: Sequence[int] = (0, 1, 2)
) -> tuple[Any, ...]:
    """An update's limits, powers_of_two, margins and reduce."""
    return [448.0, 448.0, 57344.0], list(powers_of_two), list(margins), reduce


def input_of(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> Tensor:
    """The tensor of a case of INPUT, and small tiles if it asks for these."""
    if case["small"]:
        use_small_tiles(kernels, monkeypatch)
    return laid(values_of(case["values"], case["shape"], case["dtype"]), case["layout"], kernels.device)
