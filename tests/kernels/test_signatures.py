"""The ops as torch sees them: schemas, fakes, and that they trace."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import octavo.nn
from octavo import kernels
from octavo.kernels.groups import of_equal_groups
from octavo.kernels.reference import KERNELS
from octavo.kernels.signatures import FAKES, SCHEMAS
from octavo.scaling.delayed import State
from tests.support.casts import of_norm, second
from tests.support.definitions import same_bits
from tests.support.groups import offsets_of
from tests.support.passes import one_pass
from tests.support.triton_cases import poisoned_memory

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILES = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (3, 5)]
SHAPES = [(7, 12), (1, 6), (6, 1), (0, 5), (5, 0), (1, 1)]
Case = tuple[str, tuple[Any, ...], dict[str, Any]]  # an op, its arguments by place, and by name
UPDATE = ([448.0, 448.0, 57344.0], [False, True, False], [0, 0, 1], "max")


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """A tensor of this shape in several layouts."""
    rows, cols = shape
    return [torch.randn(shape).to(dtype), torch.randn(cols, rows).to(dtype).t()]


def state() -> State:
    return State(torch.tensor([0.0, 2.0, 3.0]), torch.rand(3, 4), State.empty(4).before)


def pair(shape: tuple[int, int], tile: tuple[int, int], fmt: torch.dtype) -> tuple[Tensor, Tensor]:
    return kernels.cast(torch.randn(shape), None, 0, fmt, tile, False, 0)[:3:2]


def many_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """What multi_tensor_cast takes."""
    return tile if tile in ((-1, -1), (1, 128)) else (128, 128)


def produced_by(shape: tuple[int, int], tile: tuple[int, int]) -> list[tuple[Any, ...]]:
    """x and the arguments from ``pad`` on, of casts of activations and of their gradients."""
    rows, cols = shape
    x, wide = torch.randn(shape).bfloat16(), torch.randn(rows, 2 * cols)
    codes, scale_inv = pair((rows, 2 * cols), tile, E4M3)
    return [
        (x, 1, False, "gelu"),
        (wide, 16, True, "swiglu"),
        (x, 1, True, "silu", x.t().contiguous().t()),
        (x, 2, True, "geglu", wide),
        (codes, 1, True, "reglu", None, scale_inv, tile),
        (x, 16, False, "geglu_tanh", codes, scale_inv, tile),
    ]


def casts(x: Tensor, tile: tuple[int, int], some_extras: list[tuple[tuple[Any, ...], bool]]) -> list[Case]:
    """Arguments for the ops that cast x; of (extras, transpose), extras are those from ``pad`` on."""
    found: list[Case] = []
    for extras, transpose in some_extras:
        for scale in [None, state()[0]][: 2 if tile == (-1, -1) else 1]:
            found.append(("cast", (x, scale, 1, E4M3, tile, True, 1, False, *extras), {}))
            found.append(("cast", (x, scale, 0, E5M2, tile, False, 0, True, *extras), {}))
        two = x, None, 0, E4M3, tile, False, 0, transpose, *extras
        found.append(("cast", two, second(E5M2, tile[::-1], True, 1)))
        amaxes = (torch.ones(1, 1), None)
        found.append(("cast_and_commit", (x, *state(), *amaxes, E5M2, False, 0, *UPDATE, transpose, *extras), {}))
    return found


def norms(shape: tuple[int, int], tile: tuple[int, int]) -> list[Case]:
    """Arguments for the ops that have a norm in them."""
    found: list[Case] = []
    rows, cols = shape
    delayed = state()[0] if tile == (-1, -1) else None
    for x, kind, beta, extras in (
        (inputs(shape, torch.bfloat16)[1], "layer_norm", torch.randn(cols), (16, True)),
        (inputs(shape, torch.float32)[0], "layer_norm", None, ()),
        (inputs(shape, torch.float16)[0], "rms_norm", None, (1, True)),
    ):
        gamma, dy, rstd = torch.randn(cols), torch.randn(cols, rows).t().to(x.dtype), torch.rand(rows)
        norm = of_norm(gamma, beta, kind, 1e-5, bool(extras)) | ({"keep": True} if extras else {})
        cast = 0, E4M3, tile, True, 0, kind == "layer_norm", *extras[:1]
        found.append(("cast", (x, delayed, *cast), norm))
        found.append(("cast", (x, None, *cast), norm | second(E5M2, tile[::-1], True, 1)))
        mean, residual = rstd if kind == "layer_norm" else rstd[:0], None if extras else dy.clone()
        backward = dy, x, gamma, mean, rstd, kind, bool(extras), beta is not None, residual
        found.append(("norm_backward", backward, {}))
    return found


def grouped(shape: tuple[int, int], tile: tuple[int, int]) -> list[Case]:
    """Arguments for the ops on rows in groups, one of which is empty; the last row is in none."""
    cols, pad = shape[1], 16 if tile[1] in (-1, 128) else 1
    offsets = torch.tensor([shape[0] // 3] * 2 + [max(shape[0] - 1, 0)], dtype=torch.int32)
    found: list[Case] = []
    for scale in [None, state()[0]][: 2 if tile == (-1, -1) else 1]:
        for x, *extras in [(x,) for x in inputs(shape, torch.bfloat16)] + produced_by(shape, (-1, -1))[:4]:
            as_is, *written = ((True, False, 1), (False, True, 16), (True, True, 2))[len(extras) % 3]
            given = *written, False, *extras[2:]  # groups have no column sums
            found.append(("cast", (x, scale, 1, E4M3, tile, True, 1, *given), {"offsets": offsets, "as_is": as_is}))
    cast = (None, 0, E4M3, tile, False, 0, True, pad)
    q, t, scale_inv, _ = kernels.cast(torch.randn(shape), *cast, offsets=offsets)
    w = torch.randn(3 * 5, cols)
    w_codes = of_equal_groups(*kernels.cast(w, *cast, offsets=offsets_of([5] * 3))[::2], tile, (3, 5, cols))
    for bias, dtype in ((None, torch.float32), (torch.randn(3, 5), torch.bfloat16)):
        product = q, scale_inv, tile, w_codes[0], w_codes[1], tile, offsets, bias, dtype, True
        found.append(("grouped_matmul", product, {}))
    laid = t, scale_inv.t(), tile[::-1]
    found.append(("grouped_matmul", (*laid, *laid, offsets, None, torch.float32, False, pad), {}))
    return found


def cases(shape: tuple[int, int], tile: tuple[int, int]) -> list[Case]:
    """Arguments for every op."""
    found: list[Case] = []
    for x in (*inputs(shape, torch.bfloat16), inputs(shape, torch.float32)[0]):
        found.append(("amax", (x, tile), {}))
        found += casts(x, tile, [((), False), ((16, True), True), ((2,), False)])
    for i, (x, *extras) in enumerate(produced_by(shape, tile)):  # every other op each
        found += casts(x, tile, [(tuple(extras), len(extras) > 4)])[i % 2 :: 2]
    found += norms(shape, tile) + grouped(shape, tile)
    found.append(("delayed_update", (*state(), torch.ones(1, 1), None, torch.zeros(1, 1), *UPDATE), {}))
    found.append(("scales_of_pass", state()[::2], {}))
    outputs = kernels.cast(torch.randn(shape), None, 0, E4M3, many_tile(tile), False, 0, True, 16)[:4]
    for delayed_scales in [[], [state()[0]]][: 2 if tile == (-1, -1) else 1]:
        many = (delayed_scales, 1, many_tile(tile), True, 1)
        found.append(("multi_tensor_cast", ([torch.randn(shape)], *([out] for out in outputs), *many), {}))
    a, b = pair(shape, tile, E4M3), pair((4, shape[1]), tile, E5M2)
    counts = torch.zeros(71, dtype=torch.float64), torch.zeros(3)
    found.append(("cast_statistics", (torch.randn(shape), *a, tile, *counts), {}))
    for given in ((a[1], None), (None, torch.ones(1))):
        notes = torch.ones(1).int(), torch.zeros(4), torch.zeros(1).int()
        found.append(("note_faults", (torch.randn(shape), a[0], *given, *notes), {}))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found.append(("dequantize", (*a, tile, dtype), {}))
        found.append(("matmul", (*a, tile, *b, tile, None, dtype, False), {}))
    found.append(("dequantize", (a[0].t(), a[1].t(), tile[::-1], torch.bfloat16), {}))
    laid = (b[0].t().contiguous().t(), b[1].t().contiguous().t())
    product = (*a, tile, *laid, tile, torch.randn(4).bfloat16())
    found.append(("matmul", (*product, torch.bfloat16, True), {}))
    return found


def op_of(name: str) -> Any:
    return getattr(torch.ops.octavo, name).default


def copied(args: Any, *to: Any) -> Any:
    return tree_map(lambda a: (a.to(*to) if to else a.clone()) if isinstance(a, Tensor) else a, args)


def call(function: Any, given: tuple[Any, ...]) -> Any:
    """Call with arguments by place and by name."""
    args, named = given
    return function(*args, **named)


def in_filled_memory(function: Any, *given: Any) -> Any:
    """Call where torch.empty is filled with NaN."""
    with poisoned_memory():
        return function(*given)


def describe(result: Any) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in tree_leaves(result) if isinstance(t, Tensor)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_call_by_name_is_the_op_and_fakes_agree_with_it(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    """Where a call by name leaves the dispatcher out, it isn't seen; nor is memory read that nobody wrote."""
    seen = set()
    for name, *given in cases(shape, tile):
        seen.add(name)
        by_name, arguments = getattr(kernels, name), (copied(given), copied(given))
        results = one_pass(
            partial(call, by_name, arguments[0]), partial(in_filled_memory, call, op_of(name), arguments[1])
        )
        for a, b in zip(*map(tree_leaves, zip(results, arguments, strict=True)), strict=True):
            assert same_bits(a, b) if isinstance(a, Tensor) else a == b, name
        real = describe(results[0])
        with FakeTensorMode() as mode:
            fake = call(by_name, tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, given))
            assert describe(fake) == real, name
        meta = call(by_name, copied(given, "meta"))
        assert [d[:2] for d in describe(meta)] == [d[:2] for d in real], name
        assert all(d[3] for d in real), f"{name} returns a tensor that is not contiguous"
    assert seen == {*SCHEMAS}


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", [(-1, -1), (3, 5)], ids=str)
@pytest.mark.parametrize("shape", [(7, 12), (0, 5)], ids=str)
def test_opcheck(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    for name, args, named in cases(shape, tile):
        # the schema check compares arguments by allclose, which torch lacks for float8: the references' tests look
        # themselves whether theirs are left alone, test_multi_tensor_cast.py at what is written
        with_codes = any(isinstance(a, Tensor) and a.dtype in (E4M3, E5M2) for a in tree_leaves((args, named)))
        if not with_codes:
            torch.library.opcheck(op_of(name), args, named, test_utils="test_schema")


@pytest.mark.full  # the seams compile layers for any number of tokens
def test_opcheck_of_dynamic_shapes() -> None:
    seen = set()
    # the most arguments of each op, and of each kind of cast
    for name, args, named in sorted(cases((7, 12), (1, 5)), key=lambda case: -len(case[1])):
        if (name, *named) not in seen:
            seen.add((name, *named))
            torch.library.opcheck(op_of(name), args, named, test_utils="test_aot_dispatch_dynamic")
    assert {name for name, *_ in seen} == {*SCHEMAS}


def test_every_op_has_its_parts() -> None:
    assert set(SCHEMAS) == set(FAKES) == set(KERNELS) == set(kernels.__all__) - {"normalise", "normalised", "produced"}
    for name in SCHEMAS:
        assert getattr(kernels, name).__name__ == name


def test_only_the_state_is_written() -> None:
    written = {
        name: [a.name for a in op_of(name)._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in SCHEMAS
    }
    state = ["delayed_scale", "delayed_amax_history", "delayed_before"]
    assert {name: names for name, names in written.items() if names} == {
        "cast_and_commit": state,
        "delayed_update": state,
        "multi_tensor_cast": ["qdata", "transposed", "scale_inv", "amax"],
        "cast_statistics": ["sums", "extremes"],
        "note_faults": ["found", "first"],
    }


def test_groups_of_other_sizes_need_no_other_graph() -> None:
    w = torch.randn(4, 6, 32)
    weight = kernels.cast(w.flatten(0, 1), None, 0, E4M3, (128, 128), True, 0, offsets=offsets_of([6] * 4))
    operand = *of_equal_groups(weight[0], weight[2], (128, 128), w.shape), (128, 128)

    def step(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        q, _, scale_inv, _ = kernels.cast(x, None, 0, E4M3, (1, 32), True, 0, offsets=offsets)
        y = kernels.grouped_matmul(q, scale_inv, (1, 32), *operand, offsets, None, torch.float32, False)
        columns = None, 0, E4M3, (32, 1), True, 0, True, 16
        _, t, scale_inv, _ = kernels.cast(x, *columns, offsets=offsets, as_is=False)
        laid = t, scale_inv.t(), (1, 32)
        return y, kernels.grouped_matmul(*laid, *laid, offsets, None, torch.float32, False, 16)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for sizes in ([5, 5, 5, 5], [0, 17, 0, 3], [0, 0, 0, 0], [1, 2, 3, 4]):
        x, offsets = torch.randn(20, 32), offsets_of(sizes)
        assert all(map(same_bits, compiled(x, offsets), step(x, offsets)))
    assert counter.frame_count == 1


def test_a_wrong_dtype_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"torch.uint8 .*torch.float8_e4m3fn or torch.float8_e5m2"):
        kernels.cast(torch.randn(2, 2), None, 0, torch.uint8, (-1, -1), False, 0)


def test_an_exported_program_runs_with_gradients_on_and_says_that_it_has_none() -> None:
    layer, x = octavo.nn.Linear(16, 8), torch.randn(4, 16)
    program = torch.export.export(layer, (x,)).module()
    y = program(x)
    assert torch.equal(y, layer(x))
    with pytest.warns(UserWarning, match=r"octavo::matmul.*backprop"):
        y.sum().backward()
