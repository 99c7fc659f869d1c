"""The ops as torch sees them: schemas, fakes, and that they trace."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

import octavo.nn
from octavo import kernels, recipes
from octavo.kernels.groups import of_equal_groups
from octavo.kernels.reference import KERNELS
from octavo.kernels.signatures import FAKES, SCHEMAS
from octavo.scaling.delayed import State
from tests.support.casts import ALL, E4M3, FORMATS, Call, drawn, poisoned_memory, update_args
from tests.support.definitions import same_bits
from tests.support.groups import offsets_of
from tests.support.helpers import FP8_RECIPES, to_fp8
from tests.support.passes import one_pass
from tests.support.product_cases import BLOCK, MX, SQUARE, operands, pair, rows_in_groups, terms_in_groups

SHAPES = [(7, 12), (1, 6), (6, 1), (0, 5), (5, 0), (1, 1)]


def state() -> State:
    return State(torch.tensor([0.0, 2.0, 3.0]), torch.rand(3, 4), State.empty(4).before)


def others(shape: tuple[int, int]) -> list[Call]:
    """Calls of every op but casts."""
    rows, cols = shape
    x, dy, gamma = *torch.randn(2, *shape), torch.randn(cols)
    all_calls = [Call("delayed_update", (*state(), torch.ones(1, 1), None, torch.zeros(1, 1), *update_args("max")))]
    all_calls.append(Call("scales_of_pass", state()[::2]))
    for tile in (ALL, BLOCK, (3, 5)):
        all_calls += [Call("amax", (one, tile)) for one in (x, torch.randn(cols, rows).bfloat16().t())]
        codes, counts = (*pair(x, tile), tile), (torch.zeros(71, dtype=torch.float64), torch.zeros(3))
        all_calls.append(Call("cast_statistics", (x, *codes, *counts)))
        for scales in ((codes[1], None), (None, torch.ones(1))):
            notes = torch.ones(1).int(), torch.zeros(4), torch.zeros(1).int()
            all_calls.append(Call("note_faults", (x, codes[0], *scales, *notes)))
        for dtype in (torch.bfloat16, torch.float32):
            all_calls.append(Call("dequantize", (*codes, dtype)))
            all_calls.append(Call("dequantize", (codes[0].t(), codes[1].t(), tile[::-1], dtype)))
    for tile, delayed in ((ALL, [state()[0]]), (SQUARE, [])):
        written = kernels.cast(x, None, 0, E4M3, tile, False, 0, True, 16)[:4]
        all_calls.append(Call("multi_tensor_cast", ([x], *([out] for out in written), delayed, 1, tile, True, 1)))
    for tiles in ((ALL, ALL), (MX, MX), (BLOCK, SQUARE)):
        for bias, dtype in ((None, torch.float32), (torch.randn(4), torch.bfloat16)):
            all_calls.append(Call("matmul", (*operands((rows, 4, cols), tiles, FORMATS), bias, dtype, True)))
            groups, biases = rows_in_groups([rows, 0], 1, tiles, 4, cols), None if bias is None else bias.expand(2, 4)
            all_calls.append(Call("grouped_matmul", (*groups, biases, dtype, False)))
        terms = terms_in_groups([rows, 0], 1, (tiles[0],) * 2, 4, cols)
        all_calls.append(Call("grouped_matmul", (*terms, None, torch.float32, False, 16)))
    if cols:
        how = x, torch.zeros(rows).long(), -100, 0.1, 30.0
        all_calls += [Call("cross_entropy", how), Call("cross_entropy_backward", (*how, *torch.rand(2, rows)))]
        laid = [torch.zeros(shape).to(torch.float8_e5m2) for shape in ((rows, cols), (cols, rows + 16))]
        all_calls.append(Call("cross_entropy_codes", (*how, torch.rand(rows), *laid, 16)))
    heads, angles = torch.randn(1, rows, 3, 4), torch.randn(1, rows, 4).cos()
    all_calls.append(Call("rotary", (heads[:, :, :2], heads[:, :, :0], heads[:, :, 2:], angles, angles, True)))
    named = {"k": heads[:, :, :0], "v": heads[:, :, 2:], "cos": angles, "sin": angles}
    all_calls.append(Call("cast", (heads[:, :, :2], None, 2, E4M3, (1, -1), False, 0, True, 16), named))
    commit = *state(), torch.ones(1, 1), None, E4M3, False, 0, *update_args("max"), True, 16, True
    all_calls.append(Call("cast_and_commit", (heads[:, :, :2], *commit), named))
    for kind, mean, residual in (("layer_norm", torch.rand(rows), None), ("rms_norm", torch.empty(0), dy.clone())):
        all_calls.append(Call("norm", (x, gamma, None if residual is None else gamma, kind, 1e-5, True, residual)))
        backward = dy, x, gamma, mean, torch.rand(rows), kind, True, residual is None, residual
        all_calls.append(Call("norm_backward", backward))
    return all_calls


def calls(shape: tuple[int, int], count: int, **options: Any) -> list[Call]:
    """Calls of every op, and casts of anything, or of what the options name."""
    return [*others(shape), *(call for _, call in drawn(count, SHAPES.index(shape), **options))]


def op_of(name: str) -> Any:
    return getattr(torch.ops.octavo, name).default


def copied(args: Any, *to: Any) -> Any:
    return tree_map(lambda a: (a.to(*to) if to else a.clone()) if isinstance(a, Tensor) else a, args)


def call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Call with arguments by place and by name."""
    args, named = arguments
    return function(*args, **named)


def in_filled_memory(function: Any, *args: Any) -> Any:
    """Call where torch.empty is filled with NaN."""
    with poisoned_memory():
        return function(*args)


def describe(result: Any) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in tree_leaves(result) if isinstance(t, Tensor)]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[] if s in SHAPES[:4:3] else pytest.mark.full) for s in SHAPES], ids=str
)
def test_a_call_by_name_is_the_op_and_fakes_agree_with_it(shape: tuple[int, int]) -> None:
    """A call by name, past the dispatcher, gives what the op and its fake give; nobody reads unwritten memory."""
    seen = set()
    for name, *of_call in calls(shape, 15):
        seen.add(name)
        by_name, copies = getattr(kernels, name), (copied(of_call), copied(of_call))
        results = one_pass(partial(call, by_name, copies[0]), partial(in_filled_memory, call, op_of(name), copies[1]))
        for a, b in zip(*map(tree_leaves, zip(results, copies, strict=True)), strict=True):
            assert same_bits(a, b) if isinstance(a, Tensor) else a == b, name
        real = describe(results[0])
        with FakeTensorMode() as mode:
            fake = call(by_name, tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, of_call))
            assert describe(fake) == real, name
        meta = call(by_name, copied(of_call, "meta"))
        assert [d[:2] for d in describe(meta)] == [d[:2] for d in real], name
    assert seen == {name for name in SCHEMAS if shape[1] or not name.startswith("cross_entropy")}  # targets are columns


@pytest.mark.parametrize("shape", [(7, 12), (0, 5)], ids=str)
def test_opcheck(shape: tuple[int, int]) -> None:
    for name, args, named in calls(shape, 20):
        # the schema check compares arguments by allclose, which torch lacks for float8: test_cast.py looks itself
        # whether they are left alone, test_multi_tensor_cast.py at what is written
        if not any(isinstance(a, Tensor) and a.dtype.itemsize == 1 for a in tree_leaves((args, named))):
            torch.library.opcheck(op_of(name), args, named, test_utils="test_schema")


@pytest.mark.full  # the seams compile layers for any number of tokens
def test_opcheck_of_dynamic_shapes() -> None:
    seen, finite = set(), ["varied", "zeros"]  # opcheck finds NaN unequal to NaN
    for name, args, named in calls((7, 12), 30, values=finite, h_values=finite):
        if (name, *named) not in seen:
            seen.add((name, *named))
            torch.library.opcheck(op_of(name), args, named, test_utils="test_aot_dispatch_dynamic")
    assert {name for name, *_ in seen} == {*SCHEMAS}


def test_every_op_has_its_parts() -> None:
    assert set(SCHEMAS) == set(FAKES) == set(KERNELS)
    for name in SCHEMAS:
        assert getattr(kernels, name).__name__ == name


def test_only_the_state_is_written() -> None:
    arguments = {name: op_of(name)._schema.arguments for name in SCHEMAS}
    written = {name: [a.name for a in of if a.alias_info and a.alias_info.is_write] for name, of in arguments.items()}
    state = ["delayed_scale", "delayed_amax_history", "delayed_before"]
    assert {name: names for name, names in written.items() if names} == {
        "cast_and_commit": state,
        "delayed_update": state,
        "multi_tensor_cast": ["qdata", "transposed", "scale_inv", "amax"],
        "cast_statistics": ["sums", "extremes"],
        "cross_entropy_codes": ["codes", "transposed"],
        "note_faults": ["faults", "first"],
    }


def test_groups_of_other_sizes_need_no_other_graph() -> None:
    w = torch.randn(4, 6, 32)
    weight = kernels.cast(w.flatten(0, 1), None, 0, E4M3, (128, 128), True, 0, offsets=offsets_of([6] * 4))
    operand = *of_equal_groups(weight[0], weight[2], (128, 128), w.shape), (128, 128)

    def step(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        q, _, scale_inv, _ = kernels.cast(x, None, 0, E4M3, (1, 32), True, 0, offsets=offsets)
        y = kernels.grouped_matmul(q, scale_inv, (1, 32), *operand, offsets, None, torch.float32, False)
        _, t, scale_inv, _ = kernels.cast(x, None, 0, E4M3, (32, 1), True, 0, True, 16, offsets=offsets, as_is=False)
        laid = t, scale_inv.t(), (1, 32)
        return y, kernels.grouped_matmul(*laid, *laid, offsets, None, torch.float32, False, 16)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for sizes in ([5, 5, 5, 5], [0, 17, 0, 3], [0, 0, 0, 0], [1, 2, 3, 4]):
        x, offsets = torch.randn(20, 32), offsets_of(sizes)
        assert all(map(same_bits, compiled(x, offsets), step(x, offsets)))
    assert counter.frame_count == 1


def test_a_wrong_dtype_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"torch.uint8 .*torch.float8_e4m3fn, torch.float8_e5m2 or torch.float4_e2m1fn_x2"
    ):
        kernels.cast(torch.randn(2, 2), None, 0, torch.uint8, (-1, -1), False, 0)


class _Names(TorchDispatchMode):
    """The names of the operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def seen_by_mode(function: Any, x: Tensor) -> set[str]:
    with _Names() as mode:
        function(x)
    return mode.names


def seen_by_compiler(function: Any, x: Tensor) -> set[str]:
    names: set[str] = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names.update(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    assert same_bits(torch.compile(function, backend=backend)(x), function(x))
    return names


def seen_by_jit(function: Any, x: Tensor) -> set[str]:
    traced = torch.jit.trace(function, (x,))
    torch.full((64, 64), 1e30)  # what a graph read of memory that nobody wrote
    assert same_bits(traced(2 * x), function(2 * x))
    return {node.kind().replace("::", ".") for node in traced.graph.nodes()}


def names_in(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes}


# who watches what torch's dispatcher is given -> the operators' names that it sees of a function
WATCHERS: dict[str, Callable[[Any, Tensor], set[str]]] = {
    "a dispatch mode": seen_by_mode,
    "torch.compile": seen_by_compiler,
    "make_fx": lambda function, x: names_in(make_fx(function)(x).graph),
    "make_fx of fake tensors": lambda function, x: names_in(make_fx(function, tracing_mode="symbolic")(x).graph),
    "torch.jit.trace": seen_by_jit,
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_who_watches_the_dispatcher_sees_every_op(watcher: str) -> None:
    """The short way around it would leave them a graph that reads memory that nobody wrote."""

    def function(x: Tensor) -> Tensor:
        q, _, scale_inv, *_ = kernels.cast(x, None, 0, E4M3, ALL, False, 0)
        return kernels.matmul(q, scale_inv, ALL, q, scale_inv, ALL, None, torch.float32, False)

    names = WATCHERS[watcher](function, torch.randn(7, 12))
    assert {name.removesuffix(".default") for name in names} >= {"octavo.cast", "octavo.matmul"}


def test_an_exported_program_runs_with_gradients_on_and_says_that_it_has_none() -> None:
    layer, x = octavo.nn.Linear(16, 8), torch.randn(4, 16)
    y = torch.export.export(layer, (x,)).module()(x)
    assert torch.equal(y, layer(x))
    with pytest.warns(UserWarning, match=r"octavo::matmul.*backprop"):
        y.sum().backward()


def flops(call: Callable[[], Any]) -> int:
    """The FLOPs of a call that torch counts."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def counted_step(layer: nn.Module, *inputs: Tensor) -> int:
    """The FLOPs of forward and backward that torch counts."""
    return flops(lambda: layer(*inputs).square().sum().backward())


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "high_precision"])
def test_torch_counts_the_flops_of_products(recipe: str) -> None:
    """torch counts as many FLOPs as of the same products without octavo, in sizes that no tile divides."""
    settings = getattr(recipes, recipe)()
    x, layer = torch.randn(37, 24, requires_grad=True), nn.Linear(24, 40)
    plain = counted_step(layer, x)
    assert plain == 3 * 2 * 37 * 24 * 40
    assert counted_step(to_fp8(nn.Sequential(layer), settings), x) == plain
    experts = octavo.nn.Experts(3, 24, 40, recipe=settings)
    index, weights = torch.randint(3, (37, 2)), torch.rand(37, 2)
    assert counted_step(experts, x, index, weights) == 3 * 2 * (2 * 37) * (24 * 80 + 40 * 24)


@pytest.mark.parametrize("pad", [1, 16])
def test_padding_between_groups_is_no_product(pad: int) -> None:
    sizes, outside = [5, 0, 20], 7
    terms = terms_in_groups(sizes, outside, (ALL, ALL), 6, 10, pad)
    product = partial(kernels.grouped_matmul, *terms, None, torch.float32, False)
    assert flops(lambda: product(pad)) == flops(lambda: product(pad=pad)) == 2 * 32 * 6 * 10
