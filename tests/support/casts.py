"""Random casts of anything, their expected results, and the one comparison.

What is due comes from tests/support/definitions.py, of the float32 values of the reference's activation or norm, which
tests hold against float64.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from octavo import formats
from octavo.formats import format_of
from octavo.granularity import MX, PADDING
from octavo.kernels.activations import ACTIVATIONS, activation_of
from octavo.kernels.groups import grouped_scale_shape, padded_columns
from octavo.kernels.layouts import multiply_tiles_, plain_scales, swizzled
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.activation import produced
from octavo.kernels.reference.codes import decode
from octavo.kernels.reference.norm import normalise
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.scaling.delayed import State
from tests.support import definitions
from tests.support.combinations import dealt
from tests.support.definitions import GRANULARITIES, same_bits
from tests.support.exact_activation import EXACT
from tests.support.groups import SIZES, offsets_of, parts, random_sizes, scale_slices, slices_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = [*formats.FORMATS]  # dtypes: a format that is added is cast by every implementation
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALL, COLUMN = (-1, -1), (32, 1)
LAYOUTS = ["rows", "columns", "strided", "offset"]
ROUNDINGS = 2.0**-20  # what float32's make of an activation, a slope or a norm, relative to what went into it

SHAPES = [(0, 17), (17, 0), (1, 1), (1, 270), (270, 1), (128, 17), (64, 256), (33, 270), (130, 140)]
TILES = [*(g.tile for g in GRANULARITIES), (32, 1), (64, 16), (2, 8), (1, 1), (256, 48), (-1, 48), (32, -1)]
# what one launch of a kernel casts: two scalings, or groups
PAIRS = [((1, 128), (128, 1)), ((1, 32), (32, 1)), ((1, -1), (-1, 1)), ((8, 2), (1, 64))]
OF_GROUPS = [ALL, (-1, 1), (1, -1), (1, 128), (1, 32), (128, 128), (32, 1)]
OPTIONS: dict[str, Sequence[Any]] = {
    "source": ["tensor", "tensor", "value", "gradient", "norm"],
    "how": ["cast", "cast", "delayed", "commit", "twice", "twice", "swizzled", "groups", "groups"],
    "shape": SHAPES,
    "sizes": [*SIZES, None],
    **{f"{which}dtype": DTYPES for which in ("", "h_", "gamma_")},
    **{f"{which}layout": LAYOUTS for which in ("", "h_", "scale_")},
    **{f"{which}values": ["varied", "faults", "only faults", "zeros", "edge"] for which in ("", "h_")},
    "activation": [*ACTIVATIONS],
    "h_tile": [None, None, ALL, (1, -1), (1, 32), (128, 128), (48, 1), (3, 5)],
    "h_format": FORMATS,
    "kind": ["layer_norm", "rms_norm"],
    **{name: [False, True] for name in ("beta", "zero_centered", "keep", "transpose", "column_sum", "small", "again")},
    "eps": [1e-5, 1e-3],
    "scaling": [*itertools.product(FORMATS, [False, True], [0, 3])],
    "second": [*itertools.product(FORMATS, [False, True], [0, 2])],
    "tile": TILES,
    "second_tile": TILES,
    "pair": [*PAIRS, None, None],
    "group_tile": [*OF_GROUPS, None],
    "scale": [0.0, -0.0, 0.37, 2.0**60],
    "role": range(3),
    "length": [1, 4, 5, 16],
    "reduce": ["max", "most_recent"],
    "amaxes": [(None, None), (3.0, None), (None, 0.0), (1e-3, 20.0)],
    "pad": [1, 2, PADDING],
    "written": [(True, False), (False, True), (True, True), (False, False)],
}


def second(dtype: torch.dtype, tile: Sequence[int], power_of_two: bool, margin: int) -> dict[str, Any]:
    """Return a second scaling, as ``cast`` takes it."""
    names = ("dtype", "tile", "power_of_two", "margin")
    return {f"second_{name}": value for name, value in zip(names, (dtype, tile, power_of_two, margin), strict=True)}


def of_norm(
    gamma: Tensor, beta: Tensor | None, kind: str, eps: float = 1e-5, zero_centered: bool = False
) -> dict[str, Any]:
    """Return a norm of the cast's source, as ``cast`` takes it."""
    return {"gamma": gamma, "beta": beta, "kind": kind, "eps": eps, "zero_centered": zero_centered}


def update_args(
    reduce: str, powers_of_two: Sequence[bool] = (False, True, False), margins: Sequence[int] = (0, 1, 2)
) -> tuple[Any, ...]:
    """Return an update's limits, powers_of_two, margins and reduce."""
    return [448.0, 448.0, 57344.0], list(powers_of_two), list(margins), reduce


# --- inputs of casts --------------------------------------------------------------------------------------------------


def values_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a tensor [R, C] on the CPU, whose rows and columns differ in size.

    ``kind``: "varied": finite; "faults": with inf and NaN; "only faults": some rows and columns hold no other; "zeros";
    "edge": the largest and the smallest numbers too.
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
        x.view(-1)[(7 * i + 1) % 11 :: 211 + i] = value
    return x


def laid(x: Tensor, layout: str, device: torch.device | str = "cpu") -> Tensor:
    """Return ``x`` [R, C] on the device, in memory whose other elements are the largest numbers.

    ``layout``: "rows": contiguous; "columns": that of a transposed tensor; "strided": both strides odd; "offset":
    contiguous, but where no vector may be read.
    """
    if x.itemsize == 1 and x.dtype != torch.uint8:
        return laid(x.view(torch.uint8), layout, device).view(x.dtype)
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


def to(device: str | torch.device, tree: Any) -> Any:
    """Return a copy, with its tensors on the device."""
    return tree_map(lambda a: a.detach().to(device, copy=True) if isinstance(a, Tensor) else a, tree)


def negated(values: Tensor) -> Tensor:
    """Return float32 values as a part of a conjugated complex tensor, which torch has not negated yet."""
    part = torch.complex(torch.full_like(values, 9.0), -values).conj().imag
    assert part.is_neg() and torch.equal(part, values)
    return part


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty with NaN within the block."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Call(NamedTuple):
    """An op, its arguments by place and by name."""

    op: str
    args: tuple[Any, ...]
    named: dict[str, Any] = {}  # noqa: RUF012

    @property
    def by_name(self) -> dict[str, Any]:
        """Return all arguments, on the CPU, by the names of the op's schema."""
        schema = getattr(torch.ops.octavo, self.op).default._schema.arguments
        arguments = {a.name: a.default_value for a in schema}
        return to("cpu", arguments | dict(zip(arguments, self.args, strict=False)) | self.named)

    @property
    def is_exact(self) -> bool:
        """Whether the values to cast have the same bits wherever they are computed."""
        arguments = self.by_name
        return arguments["activation"] in EXACT and arguments.get("gamma") is None


def drawn(count: int, seed: int = 0, device: torch.device | str = "cpu", **options: Any) -> Iterator[tuple[Any, Call]]:
    """Yield ``count`` cases, each with its call, in which any value of an option occurs equally often."""
    for case in dealt(seed, count, **OPTIONS | options):
        if case["source"] == "norm" and case["how"] in ("groups", "commit"):
            case["how"] = "twice"
        yield case, call_of(case, device)


def call_of(case: dict[str, Any], device: torch.device | str = "cpu") -> Call:
    """Return the call of a case."""
    how, tile, sizes = case["how"], case["tile"], None
    if how == "groups":
        sizes, ungrouped = case["sizes"] or random_sizes(2 * int(torch.randint(50, ())) + 1)
        case = case | {"shape": (sum(sizes) + ungrouped, case["shape"][1] or 3)}
    x, named = source_of(case, sizes, device)
    dtype, power_of_two, margin = case["scaling"]
    state = torch.full((3,), 7.0)
    if how == "commit":
        history = State(state, torch.rand(3, case["length"]), State.empty(1).before)
        state[2] = case["scale"]
        amaxes = (None if a is None else torch.full((1, 1), a) for a in case["amaxes"])
        update = update_args(case["reduce"], (False, True, power_of_two), (0, 1, margin))
        args = (*history, *amaxes, dtype, power_of_two, margin, *update, case["transpose"])
        flat = tuple(named.get(name, default) for name, default in FLAT)
        again = recast_of(case, named, device)
        return Call("cast_and_commit", (x, *to(device, args), case["pad"], case["column_sum"], *flat), again)
    if how == "groups":
        named["as_is"], transpose = case["written"]
        named["offsets"] = offsets_of(sizes).to(device)
        tile = case["group_tile"] or tile
    else:
        transpose = case["transpose"]
        named["column_sum"] = case["column_sum"] and "gamma" not in named
    role, delayed = case["role"], how == "delayed" or (how == "groups" and tile == ALL and case["reduce"] == "max")
    state[role] = case["scale"]
    if how == "swizzled":
        tile, power_of_two, named["swizzle"] = MX if case["beta"] or transpose else COLUMN, True, True
        if tile == MX and case["keep"]:
            named |= second(case["second"][0], COLUMN, True, 0)
    if how == "twice":
        tile, other = case["pair"] or (tile, case["second_tile"])
        named |= second(case["second"][0], other, *case["second"][1:])
    tile = ALL if how == "delayed" else tile
    if tile == ALL and how in ("cast", "delayed") and "gamma" not in named:
        named |= {"keep": case["keep"]} | recast_of(case, named, device)
    args = (state if delayed else None, role, dtype, tile, power_of_two, margin, transpose, case["pad"])
    return Call("cast", (x, *to(device, args)), named)


def recast_of(case: dict[str, Any], named: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return the arguments by which the cast of an activation's gradient casts the activation too; or none."""
    if not case["again"] or "preactivation" not in named or "h_scale_inv" in named:
        return {}
    scale = torch.full((1,), case["scale"] or 3.0).to(device)
    return {"recast_scale": scale, "recast_dtype": case["second"][0], "recast_transposed": case["zero_centered"]}


FLAT = [("activation", ""), ("preactivation", None), ("h_scale_inv", None), ("h_tile", ALL)]


def source_of(case: dict[str, Any], sizes: Any, device: torch.device | str) -> tuple[Tensor, dict[str, Any]]:
    """Return the tensor to cast, of a case's shape, and the named arguments that describe it."""
    (rows, cols), source, activation = case["shape"], case["source"], case["activation"]
    x = laid(values_of(case["values"], (rows, cols), case["dtype"]), case["layout"], device)
    if source == "tensor":
        return x, {}
    if source == "norm":
        if case["values"] == "edge":  # whose squares float32 does not hold
            x = laid(values_of("faults", (rows, cols), case["dtype"]), case["layout"], device)
        gamma, beta = (torch.randn(cols, 2).to(case["gamma_dtype"]).to(device)[:, 1] for _ in range(2))
        norm = of_norm(gamma, beta if case["beta"] else None, case["kind"], case["eps"], case["zero_centered"])
        return x, norm | {"keep": case["keep"]}
    if sizes is not None:
        activation = ["reglu", "squared_relu"][len(activation) % 2]
    wide = rows, 2 * cols if ACTIVATIONS[activation].gated else cols
    h, named = values_of(case["h_values"], wide, case["h_dtype"]), {"activation": activation}
    if case["h_tile"] is not None:
        cast = h.float(), None, 0, case["h_format"], case["h_tile"], False, 0
        offsets = {} if sizes is None else {"offsets": offsets_of(sizes)}
        h, _, scale_inv, *_ = REFERENCE["cast"](*cast, **offsets)
        named |= {"h_scale_inv": laid(scale_inv, case["scale_layout"], device), "h_tile": case["h_tile"]}
    h = laid(h, case["h_layout"], device)
    return (h, named) if source == "value" else (x, named | {"preactivation": h})


# --- expected results -------------------------------------------------------------------------------------------------


class Values(NamedTuple):
    """The values to cast, and the magnitudes that roundings on the way to them are relative to."""

    y: Tensor  # [R, C]
    size: Tensor  # [R, C] fp64
    besides: dict[str, Tensor] = {}  # noqa: RUF012  a norm's mean, rstd and y

    def t(self) -> "Values":
        """Return them transposed."""
        return Values(self.y.t(), self.size.t())


def values_due(arguments: dict[str, Any]) -> Values:
    """Return the values to cast, of rows in no groups."""
    x = arguments["x"]
    if arguments.get("gamma") is None:
        flat = tuple(arguments[name] for name, _ in FLAT)
        return Values(produced(x, *flat), magnitude(x, *flat))
    norm = tuple(arguments[name] for name in ("gamma", "beta", "kind", "eps", "zero_centered"))
    y, mean, rstd = normalise(x, *norm)
    gamma, beta, kind, eps, zero_centered = norm
    wide = x.double()
    size, centred = wide.abs().mean(1), wide - wide.mean(1, keepdim=True) * (kind == "layer_norm")
    exact = (centred.square().mean(1) + eps).rsqrt()
    growth = 1 + (size * exact) ** 2  # of roundings, where the mean is far from 0
    size = (wide.abs() + size[:, None]) * (exact * growth)[:, None] * (gamma.double().abs() + zero_centered)
    size = size.nan_to_num(0.0) + (0.0 if beta is None else beta.double().abs())
    return Values(y, size, {"mean": mean, "rstd": rstd, "y": y.to(x.dtype) if arguments["keep"] else x.new_empty(0, 0)})


def magnitude(
    x: Tensor, activation: str, preactivation: Tensor | None, h_scale_inv: Tensor | None, h_tile: Sequence[int]
) -> Tensor:
    """Return |h| or |gate up|; of a gradient |dy| or (|dy up| | |dy gate|). float64."""
    h = x if preactivation is None else preactivation
    size = (h if h_scale_inv is None else decode(h, torch.float32, h_scale_inv, h_tile)).double()
    if activation and activation_of(activation).gated:
        gate, up = size.chunk(2, dim=1)
        size = gate * up if preactivation is None else torch.cat((x * up, x * gate), 1)
    elif preactivation is not None:
        size = x.double()
    return size.abs()


def scaling_of(arguments: dict[str, Any], which: str = "") -> tuple[Any, ...]:
    """Return definitions.cast's arguments after the values, of the first or the ``second_`` scaling."""
    names = ("dtype", "tile", "power_of_two", "margin")
    state = None if which else arguments["delayed_scale"]
    scaling = tuple((arguments | {"tile": arguments.get("tile", ALL)})[which + name] for name in names)
    return *scaling, 0.0 if state is None else float(state[arguments.get("role", 2)])


def padded(codes: Tensor, dtype: torch.dtype, pad: int) -> Tensor:
    """Return bytes as codes, whose rows end with zeros."""
    return F.pad(codes, (0, -codes.shape[1] % pad)).view(dtype)


def due(arguments: dict[str, Any], values: Values) -> dict[str, Tensor]:
    """Return the expected pairs and the amax, by their names, of rows in no groups; no scale is swizzled."""
    y, pad, first = values.y, arguments["pad"], scaling_of(arguments)
    codes, scale_inv, amax = definitions.cast(y, *first)
    results = {"q": padded(codes, first[0], pad), "scale_inv": scale_inv, "amax": amax}
    none = torch.empty(0, 0, dtype=first[0])
    if arguments.get("second_dtype") is None:
        return results | {"t": padded(codes.t(), first[0], pad) if arguments["transpose"] else none}
    del results["amax"]
    other = scaling_of(arguments, "second_")
    codes, scale_inv, _ = (r.t() if arguments["transpose"] else r for r in definitions.cast(y, *other))
    return results | {"second": padded(codes, other[0], pad), "second_scale_inv": scale_inv}


def due_by_group(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return the expected results of rows in groups: each as if it were alone, zeros and ones about them."""
    ends, (dtype, tile, *_), pad = arguments["offsets"].tolist(), scaling_of(arguments), arguments["pad"]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    flat = [arguments["x"], *(arguments[name] for name, _ in FLAT)]
    h_rows, rows = scale_slices(sizes, arguments["h_tile"][0]), slices_of(sizes)
    each = zip(*(parts(one, h_rows if place == 3 else rows) for place, one in enumerate(flat)), strict=True)
    alone = [due(arguments | {"pad": 1, "transpose": True}, Values(produced(*one), torch.empty(0))) for one in each]
    shape, grid_rows = (len(arguments["x"]), alone[0]["q"].shape[1]), scale_slices(sizes, tile[0])
    grid, columns = grouped_scale_shape(shape, len(sizes), tile), slices_of(sizes, pad)
    q = torch.zeros(shape[0], -(-shape[1] // pad) * pad, dtype=torch.uint8)
    t = torch.zeros(shape[1], padded_columns(shape[0], len(sizes), pad), dtype=torch.uint8)
    scale_inv, amax = torch.ones(grid).to(alone[0]["scale_inv"].dtype), torch.zeros(grid)
    for place, laid_at, scales, one in zip(rows, columns, grid_rows, alone, strict=True):
        q[place, : shape[1]], t[:, laid_at] = one["q"].view(torch.uint8), one["t"].view(torch.uint8)
        scale_inv[scales], amax[scales] = one["scale_inv"], one["amax"]
    both = {"q": q if arguments["as_is"] else q[:0, :0], "t": t if arguments["transpose"] else t[:0, :0]}
    return {name: codes.view(dtype) for name, codes in both.items()} | {"scale_inv": scale_inv, "amax": amax}


# --- the comparison ---------------------------------------------------------------------------------------------------


def check(op: Callable[..., Any], call: Call, is_exact: bool, sums: bool = True) -> dict[str, Tensor]:
    """Run an op into poisoned memory and compare all that it returns and writes; return the results by their names.

    Args:
        is_exact: whether what is cast has the reference's bits; else it may differ by roundings.
        sums: False where column sums may depend on the order.
    """
    arguments = call.by_name
    with poisoned_memory():
        results = op(*call.args, **call.named)
    left = call.by_name
    names = ["q", "t", "scale_inv", "amax"]
    if arguments.get("second_dtype") is not None:
        names = ["q", "second", "scale_inv", "second_scale_inv"]
    if call.op == "cast_and_commit":
        names.remove("amax")
    grouped = arguments.get("offsets") is not None
    is_norm = arguments.get("gamma") is not None
    names += ["mean", "rstd", "y"] if is_norm else [] if grouped else ["sums"]
    names += ["scale"] if arguments.get("keep") and not is_norm else []
    names += ["recast"] if arguments["recast_scale"] is not None or call.op == "cast_and_commit" else []
    actual = dict(zip(names, results, strict=True))
    for name, one in actual.items():
        assert one.is_contiguous() or ((name.endswith("scale_inv") or name == "amax") and one.t().is_contiguous()), name
        actual[name] = one.cpu()
    if grouped:
        assert_same(actual, due_by_group(arguments))
    else:
        values = values_due(arguments)
        check_recast(actual.pop("recast", None), arguments, is_exact)
        check_scale(actual.pop("scale", None), actual, arguments)
        expected = due(arguments, values)
        if arguments.get("swizzle"):
            actual = unswizzled(actual, arguments, values.y.shape)
        expected |= values.besides
        if is_exact:
            assert_same(actual, expected)
        else:
            assert_close(actual, expected, arguments, values)
        if sums and "sums" in actual and arguments["column_sum"]:
            assert_sums(actual["sums"], values, torch.float32 if arguments["x"].itemsize == 1 else arguments["x"].dtype)
    written = assert_committed(arguments, left, expected["amax"], is_exact) if call.op == "cast_and_commit" else ()
    read = {name: a for name, a in arguments.items() if isinstance(a, Tensor) and name not in written}
    assert all(same_bits(a, left[name]) for name, a in read.items())
    return actual


def check_recast(codes: Tensor | None, arguments: dict[str, Any], is_exact: bool) -> None:
    """Check the codes of an activation whose gradient is cast."""
    if codes is None or arguments["recast_scale"] is None:
        assert codes is None or codes.shape == (0, 0)
        return
    h, activation, dtype = arguments["preactivation"], arguments["activation"], arguments["recast_dtype"]
    values = Values(produced(h, activation), magnitude(h, activation, None, None, ALL))
    values = values.t() if arguments["recast_transposed"] else values
    expected, scale_inv, _ = definitions.cast(values.y, dtype, ALL, scale=float(arguments["recast_scale"]))
    expected = padded(expected, dtype, arguments["pad"])
    if is_exact:
        assert same_bits(codes, expected)
    else:
        assert_codes_close(codes, expected, scale_inv, values, ALL)


def check_scale(scale: Tensor | None, actual: dict[str, Tensor], arguments: dict[str, Any]) -> None:
    """Check the one scale of a cast, which gave its scale_inv."""
    if scale is not None:
        dtype, _, power_of_two, margin, known = scaling_of(arguments)
        of_amax = scale_from_amax(actual["amax"].view(1), format_of(dtype).max, power_of_two, margin)
        assert same_bits(scale, torch.tensor([known]) if known else of_amax)
        assert same_bits(scale_inv_from_scale(scale), actual["scale_inv"].view(1))


def unswizzled(actual: dict[str, Tensor], arguments: dict[str, Any], shape: Sequence[int]) -> dict[str, Tensor]:
    """Return the results with plain scales, once the swizzled ones equal these with their padding."""
    other = slice(None, None, -1 if arguments["transpose"] else 1)
    for name, of_codes, tile in (
        ("scale_inv", shape, arguments["tile"]),
        ("second_scale_inv", shape[other], arguments["second_tile"][other]),
    ):
        if name in actual:
            swizzled_scales, actual[name] = actual[name], plain_scales(actual[name], of_codes, tile)
            assert same_bits(swizzled_scales, swizzled(actual[name] if tuple(tile) == MX else actual[name].t()))
    return actual


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that all but column sums have the same bits; a norm's NaN may have any.

    No arithmetic defines the bits of a NaN: torch widens those of float16 to others in a contiguous tensor than in a
    strided one, and they stay through a norm. Codes and scales have one NaN.
    """
    for name, one in actual.items():
        due = expected[name] if name != "sums" else one
        if name in ("mean", "rstd", "y"):
            one, due = (torch.where(values.isnan(), math.nan, values) for values in (one, due))
        assert same_bits(one, due), f"{name} differs"


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], arguments: dict[str, Any], values: Values
) -> None:
    """Check a cast's results where the values to cast may be wrong by roundings.

    An amax is wrong by no more than float32's roundings, a scale is that of the amax found, and codes are those of such
    values. All else is the same, and the transposed codes are the others, transposed.
    """
    assert all((a.shape, a.dtype) == (expected[n].shape, expected[n].dtype) for n, a in actual.items() if n != "sums")
    dtype, tile, power_of_two, margin, scale_is_known = scaling_of(arguments)
    assert_codes_close(actual["q"], expected["q"], actual["scale_inv"], values, tile)
    if scale_is_known:
        assert same_bits(actual["scale_inv"], expected["scale_inv"])
    else:
        assert_scales_close(actual["scale_inv"], actual.get("amax"), values, tile, dtype, power_of_two, margin)
    if "amax" in actual:
        exact, allowed = amaxes_near(values, tile)
        assert bool(((actual["amax"] - exact).abs() <= allowed).all())
    if arguments["transpose"] and "t" in actual:
        codes = actual["q"].view(torch.uint8)[:, : values.y.shape[1]]
        assert same_bits(actual["t"], padded(codes.t(), dtype, arguments["pad"]))
    if "second" in actual:
        dtype, tile, power_of_two, margin, _ = scaling_of(arguments, "second_")
        if arguments["transpose"]:
            values_there, tile = values.t(), tile[::-1]
        else:
            values_there = values
        scale_inv = actual["second_scale_inv"]
        assert_codes_close(actual["second"], expected["second"], scale_inv, values_there, tile)
        assert_scales_close(scale_inv, None, values_there, tile, dtype, power_of_two, margin)
    if "rstd" in actual:
        assert_statistics(actual, arguments, values)


def assert_codes_close(codes: Tensor, expected: Tensor, scale_inv: Tensor, values: Values, tile: Sequence[int]) -> None:
    """Check codes [R, C'] that values within their roundings have in this scale_inv; few differ from the expected.

    Faults and padding are the same.
    """
    cols = values.y.shape[1]
    a, b = (c.view(torch.uint8).int() for c in (codes, expected))
    assert torch.equal(a[:, cols:], b[:, cols:])
    a, b, fault = a[:, :cols], b[:, :cols], 0x7F if codes.dtype == E4M3 else 0x7C
    faulty = ((a & 0x7F) >= fault) | ((b & 0x7F) >= fault)
    assert torch.equal(a[faulty], b[faulty])
    wide = multiply_tiles_(torch.ones(values.y.shape), scale_inv.float(), tile)
    scaled, limit = values.y / wide.double(), torch.finfo(codes.dtype).max
    error = values.size * ROUNDINGS / wide + scaled.abs() * 2.0**-22
    bounds = ((scaled + e).clamp(-limit, limit).float().to(codes.dtype) for e in (-error, error))
    least, most = (ordered(bound.view(torch.uint8).int()) for bound in bounds)
    actual = ordered(a)
    assert bool(((least <= actual) & (actual <= most) | faulty).all())


def ordered(codes: Tensor) -> Tensor:
    """Return bits of codes as integers that ascend with their values."""
    return torch.where(codes < 0x80, codes, 0x80 - codes)


def amaxes_near(values: Values, tile: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the amax, and how far off one may be."""
    amax, allowed = (REFERENCE["amax"](v.float(), tile) for v in (values.y, values.size * ROUNDINGS))
    return amax, allowed


def assert_scales_close(
    scale_inv: Tensor, amax: Tensor | None, values: Values, tile: Sequence[int], *scaling: Any
) -> None:
    """Check the scale_inv of this amax; or where it is not known, of one within roundings."""
    dtype, *how = scaling

    def of(amax: Tensor) -> Tensor:
        return scale_inv_from_scale(scale_from_amax(amax, format_of(dtype).max, *how))

    if amax is not None:
        assert same_bits(scale_inv.float(), of(amax))
        return
    exact, allowed = amaxes_near(values, tile)
    least, most = of((exact - allowed).clamp(min=2.0**-149)), of(exact + allowed)
    actual = scale_inv.float()
    is_zero = (exact <= allowed) & (actual == of(torch.zeros_like(exact)))  # an amax of 0 has a scale of its own
    assert bool((((least <= actual) & (actual <= most)) | (actual == of(exact)) | is_zero).all())


def assert_statistics(actual: dict[str, Tensor], arguments: dict[str, Any], values: Values) -> None:
    """Check a norm's mean, rstd and y."""
    wide, exact = arguments["x"].double(), values.besides
    size, finite = wide.abs().mean(1), exact["rstd"].isfinite() & (exact["rstd"] > 0)
    growth = 1 + (size * exact["rstd"]) ** 2
    if arguments["kind"] == "layer_norm":
        assert ((actual["mean"] - exact["mean"]).abs() <= ROUNDINGS * size)[finite].all()
    assert ((actual["rstd"] - exact["rstd"]).abs() <= ROUNDINGS * exact["rstd"] * growth)[finite].all()
    written_y, y = actual["y"], values.y
    if written_y.numel() > 0:
        fault, info = ~y.isfinite(), torch.finfo(written_y.dtype)
        allowed = info.eps / 2 * (y.double().abs() + info.smallest_normal) + ROUNDINGS * values.size
        assert ((written_y.double() - y).abs() <= allowed)[~fault].all()
        assert torch.equal(written_y[fault].isnan(), y[fault].isnan())


def assert_committed(arguments: dict[str, Any], left: dict[str, Any], amax: Tensor, is_exact: bool) -> list[str]:
    """Compare the delayed state after a commit, by its own amax if that is not exact; return the written arguments."""
    names = ["delayed_scale", "delayed_amax_history", "delayed_before"]
    state = State(*copy.deepcopy([arguments[name] for name in names]))
    amax = amax if is_exact else left[names[1]][2:, :1]
    how = [arguments[name] for name in ("limits", "powers_of_two", "margins", "reduce")]
    REFERENCE["delayed_update"](*state, arguments["amax_input"], arguments["amax_weight"], amax, *how)
    assert same_bits(left[names[0]], state.scale) and same_bits(left[names[1]], state.amax_history)
    assert same_bits(left[names[2]][1], state.before[1])  # outside of a backward each call is a pass by itself
    return names


def assert_sums(sums: Tensor, values: Values, dtype: torch.dtype) -> None:
    """Check column sums, which may be added in any order."""
    x, size = values.y, values.size.sum(0)
    assert sums.shape == x.shape[1:] and sums.dtype == dtype
    exact = x.double().sum(0)
    finite, infinite = exact.isfinite(), exact.isinf()
    assert torch.equal(sums.isnan(), exact.isnan())
    assert torch.equal(sums[infinite].double(), exact[infinite])
    info = torch.finfo(dtype)
    allowed = info.eps / 2 * (exact.abs() + info.smallest_normal) + 2.0**-18 * size
    assert bool(((sums.double() - exact).abs() <= allowed)[finite].all())


def each_value(cast: Callable[..., Any], x: Tensor, *activation: Any) -> Tensor:
    """Return the values that an implementation of ``octavo::cast`` rounds, float32: signed amaxes of elements."""
    codes, _, _, amax, _ = cast(x, None, 0, E4M3, (1, 1), True, 0, False, 1, False, *activation)
    return torch.where(codes.view(torch.uint8) >= 0x80, -amax, amax)
