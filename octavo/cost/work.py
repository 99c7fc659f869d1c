"""The work of a model's training step, counted from its shapes: products, and the traffic of all else."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from octavo.cost.rates import IN_BF16, Rates, product_kinds
from octavo.nn.candidates import Select, sizes_of
from octavo.nn.convert import convert, set_recipe
from octavo.nn.counting import OperationCounter
from octavo.nn.known_forwards import refusal
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import fakes_of
from octavo.private import pytree
from octavo.recipes import high_precision
from octavo.scaling.recipe import ROLES, Recipe, RecipeMap
from octavo.weights.plain import weight_of

COMPARED = ("dynamic", "delayed", "rowwise", "blockwise", "mx")  # by default: one recipe for each way to share scales
# FLOP of attention that is not causal, for each query, key and feature: forward's two products, backward's five
ATTENTION_FLOP = 4, 10
TRACED = 3  # blocks that are run of many that are alike: the first, the last, and one for each between
Result = TypeVar("Result")  # of a run of a model
NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx"}  # names of a block's number in its modules


class LinearWork(NamedTuple):
    """The products of a linear layer in a step, and their sizes."""

    name: str
    tokens: int  # rows of its input
    in_features: int
    out_features: int
    grad_input: bool  # whether backward needs it
    grad_weight: bool
    groups: int = 1  # how many matrices a layer of experts has, each of which multiplies some of the rows
    reads: int = 0  # its input's number in the model, the same for layers that cast one tensor; 0: unknown

    @property
    def products(self) -> tuple[bool, bool, bool]:
        """Whether output, grad_input and grad_weight are computed."""
        return True, self.grad_input, self.grad_weight

    @property
    def flop(self) -> float:
        """FLOP of one product."""
        return 2.0 * self.tokens * self.in_features * self.out_features

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of input, weight and grad_output."""
        weight = self.groups * self.in_features * self.out_features
        return self.tokens * self.in_features, weight, self.tokens * self.out_features

    @property
    def shape(self) -> str:
        """The weight's shape, as text."""
        one = f"{self.out_features} x {self.in_features}"
        return one if self.groups == 1 else f"{self.groups} x {one}"

    def seconds(self, recipe: Recipe, rates: Rates) -> tuple[float, float]:
        """Return (seconds of products, seconds of casts) of a step under a recipe."""
        return sum(self.product_seconds(recipe, rates)), sum(self.cast_seconds(recipe, rates).values())

    def product_seconds(self, recipe: Recipe, rates: Rates) -> tuple[float, ...]:
        """Return seconds of output, grad_input and grad_weight in a step under a recipe."""
        wanted, sizes, products = self.products, self.sizes, []
        # output is as large as grad_output, and grad_input as input
        for kind, result, computed in zip(product_kinds(recipe), (sizes[2], sizes[0], sizes[1]), wanted, strict=True):
            width = 2 if kind == IN_BF16 else 1
            moved = width * (sum(sizes) - result) + 2 * result
            products.append(rates.product_seconds(kind, self.flop, moved) if computed else 0.0)
        return tuple(products)

    def cast_seconds(self, recipe: Recipe, rates: Rates) -> dict[str, float]:
        """Return {role: seconds of its casts} in a step under a recipe."""
        wanted, seconds = self.products, []
        readers = (wanted[0], wanted[2]), (wanted[0], wanted[1]), (wanted[1], wanted[2])  # whether each layout is read
        for role, size, (as_is, transposed) in zip(recipe.casts, self.sizes, readers, strict=True):
            layouts = (role.as_is, as_is), (role.transposed, transposed)
            needed_casts = [cast for cast, needed in layouts if cast and needed]
            seconds.append(rates.cast_seconds(needed_casts[0], size, len(needed_casts) == 2) if needed_casts else 0.0)
        return dict(zip(ROLES, seconds, strict=True))


class Traffic(NamedTuple):
    """The traffic of operations that are no products.

    A compiled step writes a tensor once, if a product or an operation after one reads it, and reads it once between two
    products.
    """

    bytes: float  # read and written in eager
    ops: float  # how many operations, each a launch in eager
    compiled: float  # bytes where torch.compile fuses the operations between two products

    def less(self, other: Traffic) -> Traffic:
        """Return this traffic less the other."""
        return Traffic(*(size - other_size for size, other_size in zip(self, other, strict=True)))

    def plus(self, size: float, ops: float) -> Traffic:
        """Return this traffic with so many more bytes and operations in eager."""
        return self._replace(bytes=self.bytes + size, ops=self.ops + ops)


NO_TRAFFIC = Traffic(0, 0, 0)


class Blocks(NamedTuple):
    """A model's list of blocks: its name, how many, their share of ``Work.other``, and their forward's share."""

    name: str
    size: int
    other: Traffic
    forward: Traffic


class Work(NamedTuple):
    """The work of a model's training step: products and the traffic of other operations."""

    linears: tuple[LinearWork, ...]  # that run, those of experts included
    other_flop: float  # of other products: attention, convolutions, experts that convert does not take
    other: Traffic  # with the loss of a language model
    blocks: Blocks | None
    attention: Mapping[int, float] = MappingProxyType({})  # of other_flop, by the size of a head
    inputs: Mapping[str, int] = MappingProxyType({})  # elements of the input of each norm that octavo knows, by name
    logits: int = 0  # elements of logits whose cross entropy is the loss; 0: the loss is another


class _Counter(OperationCounter):
    """A mode that counts the Traffic of operations, except products: those that torch counts, and ``products``.

    ``origins``: {storage: (after how many products it was computed, whether by a product)}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.ops, self.compiled, self.products = 0, 0, 0, self.formulas()
        self.attention: Counter[int] = Counter()  # FLOP by the size of a head
        self.origins: dict[int, tuple[int, bool]] = {}
        self.moved: set[tuple[int, int]] = set()  # (storage, after how many products it is read; -1: written)

    def count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        read, written = (
            [x for x in pytree.tree_leaves(xs) if isinstance(x, Tensor)] for xs in ((args, kwargs), result)
        )
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not written or is_view or any(word in func._schema.name for word in ("empty", "_unsafe_view")):
            return
        is_product = func._overloadpacket in flop_registry or func._overloadpacket in self.products
        if func._overloadpacket in self.products and "attention" in func._schema.name:
            flop: Any = self.products[func._overloadpacket]
            self.attention[read[0].shape[-1]] += flop(*(x.shape for x in args if isinstance(x, Tensor)))
        after = max((self.origins.get(self.storage_of(x), (0, True))[0] for x in read), default=0)
        if not is_product:
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written))
            self.ops += 1
        for x in read:
            key, size = self.storage_of(x), x.numel() * x.element_size()
            written_after, of_product = self.origins.get(key, (-1, True))
            if is_product or of_product or written_after < after:
                uses = {use for use, counts in (((key, -1), not of_product), ((key, after), not is_product)) if counts}
                self.compiled += size * len(uses - self.moved)
                self.moved |= uses
        self.origins |= {self.storage_of(x): (after + is_product, is_product) for x in written}
        self.held += written

    @property
    def counts(self) -> Traffic:
        """The traffic counted so far."""
        return Traffic(self.bytes, self.ops, self.compiled)


def _without_memory(model: nn.Module, left_out: Iterable[nn.Module] = ()) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory; modules left out are not copied."""
    memo: dict[int, Any] = {id(module): module for module in left_out}
    for tensor in (*model.parameters(), *model.buffers()):
        twin: Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model in high precision whose parameters and buffers have no memory."""
    copied = _without_memory(model)
    if any(isinstance(module, RecipeModule) for module in copied.modules()):
        set_recipe(copied, high_precision())
    return copied


def work_of(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """Return the Work of a model's step in high precision, by running forward and backward without data.

    The loss of a model that returns logits of its tokens is their cross entropy, in float32; else a sum. Of many blocks
    that are alike TRACED and one more are run. ``inputs``: as for ``estimate``. Raises ValueError if no result of the
    forward needs a gradient.
    """
    short, long, more = run_shorter(model, lambda twin: _traced(twin, inputs))
    if long is None:
        return short
    return _lengthened(short, long, more) if _is_in_order(short) else _traced(model, inputs)


def run_shorter(model: nn.Module, run: Callable[[nn.Module], Result]) -> tuple[Result, Result | None, int]:
    """Return (``run`` of a copy of TRACED blocks, of one of a block more, how many more than TRACED the model has).

    What a step does and keeps grows by the same with each block, if blocks are alike. Where they are not, or a forward
    counts on all of them, it is (``run`` of the model, None, 0).
    """
    name = blocks_of(model)
    blocks: Any = [] if name is None else model.get_submodule(name)
    more = len(blocks) - TRACED
    if more > 1 and len({*map(id, blocks)}) == len(blocks) and len({str(_description(block)) for block in blocks}) == 1:
        with contextlib.suppress(IndexError, KeyError, ValueError, RuntimeError):
            return run(_shortened(model, name, TRACED)), run(_shortened(model, name, TRACED + 1)), more
    return run(model), None, 0


def _shortened(model: nn.Module, name: str | None, count: int) -> nn.Module:
    """Return a copy without memory of a model's first ``count`` blocks, and of all else."""
    assert name is not None
    twin = _without_memory(model, [*model.get_submodule(name).children()][count:])
    del twin.get_submodule(name)[count:]  # type: ignore[operator]
    return twin


def _block_number(name: str, blocks: str) -> str:
    """Return the number, as text, of the block that a module is in; "" outside of blocks."""
    return name.removeprefix(f"{blocks}.").split(".")[0] if name.startswith(f"{blocks}.") else ""


def _is_in_order(work: Work) -> bool:
    """Return whether the layers of a Work's last two blocks are the same, one after the other."""
    if work.blocks is None:
        return False
    inside = [(_block_number(each.name, work.blocks.name), each) for each in work.linears]
    numbers = [number for number, _ in inside if number]
    count = numbers.count(str(TRACED - 1))
    in_order = [str(TRACED - 2)] * count + [str(TRACED - 1)] * count
    first = next((index for index, (number, _) in enumerate(inside) if number == str(TRACED - 2)), 0)
    return count > 0 and [number for number, _ in inside[first : first + 2 * count]] == in_order


def _description(block: nn.Module) -> list[Any]:
    """Return what tells a block from others: its modules' parameters, recipes and settings, but not its number."""
    modules = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        parameters = [(key, p.shape, p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        recipe = repr(module.recipe) if isinstance(module, RecipeModule) else ""
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        ordered = sorted((key, value) for key, value in settings.items() if key not in NUMBERS)
        modules.append((name, type(module), ordered, parameters, recipe, hooks))
    return modules


def lengthened(short: float, long: float, more: int) -> Any:
    """Return what grows by ``long`` - ``short`` with a block, ``more`` blocks after ``short``."""
    return short + more * (long - short)


def _lengthened(short: Work, long: Work, more: int) -> Work:
    """Return the Work of a model of ``more`` blocks more than ``short``'s TRACED; ``long``'s model has one more."""
    assert short.blocks is not None and long.blocks is not None
    name = short.blocks.name

    def traffic(first: Traffic, second: Traffic) -> Traffic:
        return Traffic(*(lengthened(*both, more) for both in zip(first, second, strict=True)))

    of_block = {key: size for key, size in short.inputs.items() if f"{key}.".startswith(f"{name}.{TRACED - 2}.")}
    repeated = {_in_block(key, name, TRACED + i): size for i in range(more) for key, size in of_block.items()}
    blocks = Blocks(
        name,
        short.blocks.size + more,
        traffic(short.blocks.other, long.blocks.other),
        traffic(short.blocks.forward, long.blocks.forward),
    )
    return short._replace(
        linears=_lengthened_linears(short.linears, name, more),
        other_flop=lengthened(short.other_flop, long.other_flop, more),
        other=traffic(short.other, long.other),
        blocks=blocks,
        attention={size: lengthened(flop, long.attention[size], more) for size, flop in short.attention.items()},
        inputs={**short.inputs, **repeated},
    )


def _lengthened_linears(linears: Sequence[LinearWork], blocks: str, more: int) -> tuple[LinearWork, ...]:
    """Return a model's layers with ``more`` blocks like the last but one of TRACED; the numbers of inputs go on."""
    before_last, last = (
        [each for each in linears if _block_number(each.name, blocks) == str(number)]
        for number in (TRACED - 2, TRACED - 1)
    )
    steps = [after.reads - before.reads for before, after in zip(before_last, last, strict=True)]  # of these numbers
    repeated = [
        each._replace(name=_in_block(each.name, blocks, TRACED - 2 + i), reads=each.reads + i * step)
        for i in range(more + 2)
        for each, step in zip(before_last, steps, strict=True)
    ]
    begin = linears.index(before_last[0])
    end = begin + len(before_last + last)
    after_blocks = [each._replace(reads=each.reads + more * max(steps)) for each in linears[end:]]
    return (*linears[:begin], *repeated, *after_blocks)


def _in_block(name: str, blocks: str, number: int) -> str:
    """Return a module's name in another block of the list ``blocks``."""
    _, *inside = name.removeprefix(f"{blocks}.").split(".", 1)
    return ".".join([f"{blocks}.{number}", *inside])


def _traced(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """Return the Work of a model, all of whose blocks are run."""
    mode, twin, arguments = fakes_of(on_meta(model), tuple(inputs))
    for fake, x in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(tuple(inputs)), strict=True):
        if isinstance(x, Tensor):
            fake.requires_grad_(x.requires_grad)
    # experts are converted so that each product is a module's, and no loop depends on a router's choices
    convert_quietly(twin, high_precision(), lambda module, name: not any(sizes_of(module)))
    works_by_name, sizes = _watch(twin)
    traffic, name = _Counter(), blocks_of(twin)
    marks = [] if name is None else _marks(twin.get_submodule(name), traffic)
    with mode, FlopCounterMode(display=False, custom_mapping=traffic.products) as flop, traffic:
        outputs = pytree.tree_leaves(twin(*arguments))
        results = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not results:
            raise ValueError("no result of the model's forward needs a gradient: there is nothing to train")
        logits = _logits(twin, results, arguments)
        _loss(results, logits).backward()
    linears = tuple(works_by_name.values())
    of_linears = sum(work.flop * sum(work.products) for work in linears)
    other_flop = max(flop.get_total_flops() - of_linears, 0.0)
    of_blocks = None
    if name is not None:  # where nothing is trained before the blocks, all counts as theirs
        before, after, begin, end = marks if len(marks) == 4 else (*[NO_TRAFFIC] * 3, traffic.counts)
        forward, size = after.less(before), len(list(twin.get_submodule(name).children()))
        other = Traffic(*(sum(both) for both in zip(forward, end.less(begin), strict=True)))
        of_blocks = Blocks(name, size, other, forward)
    count = 0 if logits is None else logits.numel()
    return Work(linears, other_flop, traffic.counts, of_blocks, dict(traffic.attention), sizes, count)


def _logits(model: nn.Module, results: Sequence[Tensor], arguments: Sequence[Any]) -> Tensor | None:
    """Return the result that has a row for each token and a column for each word; None: it is no language model."""
    words = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    tokens = [x.shape for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor) and x.dtype == torch.int64]
    return next((y for y in results if y.ndim and y.shape[-1] in words and y.shape[:-1] in tokens), None)


def _loss(results: Sequence[Tensor], logits: Tensor | None) -> Tensor:
    """Return the loss as training computes it: transformers', octavo.train's; of no language model a sum."""
    if logits is None:
        return sum(result.float().sum() for result in results)  # type: ignore[return-value]
    rows = logits.float().flatten(0, -2)
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))


def _watch(twin: nn.Module) -> tuple[dict[str, LinearWork], dict[str, int]]:
    """Return the LinearWork of layers, and elements of the inputs of norms that octavo knows: filled by a forward."""
    works_by_name: dict[str, LinearWork] = {}
    sizes: dict[str, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    live_inputs: list[Tensor] = []  # so that no other tensor gets its place

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: object) -> None:
            x, (groups, columns, rows) = arguments[0], sizes_of(module)
            weight = next(p for p in (weight_of(module), *module.parameters()) if p is not None)
            tokens, reads = x.numel() // columns, numbers.setdefault((id(x), x._version), len(numbers) + 1)
            live_inputs.append(x)
            if name in works_by_name:  # called more than once: the rows of its products add up
                tokens, reads = tokens + works_by_name[name].tokens, 0
            needs = x.requires_grad, weight.requires_grad
            works_by_name[name] = LinearWork(name, tokens, columns, rows, *needs, groups or 1, reads)

        return hook

    def size(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any], output: object) -> None:
            sizes[name] = sizes.get(name, 0) + (*arguments, *keywords.values())[0].numel()

        return hook

    for name, module in twin.named_modules():
        if any(sizes_of(module)):
            module.register_forward_hook(note(name))
        elif refusal(module) is None:
            module.register_forward_hook(size(name), with_kwargs=True)
    return works_by_name, sizes


def _marks(blocks: Any, traffic: _Counter) -> list[Traffic]:
    """Return the counts before and after a step's blocks, in forward and then in backward: filled by the step."""
    marks: list[Traffic] = []

    def mark(_: object, inputs: Any, output: Any = None) -> None:
        marks.append(traffic.counts)
        x = next(leaf for leaf in pytree.tree_leaves(inputs if output is None else output) if isinstance(leaf, Tensor))
        if x.requires_grad:  # backward begins at the last block's output, and ends at the first one's input
            x.register_hook(lambda _: marks.append(traffic.counts))

    blocks[0].register_forward_pre_hook(mark)
    blocks[-1].register_forward_hook(mark)
    return marks


def blocks_of(model: nn.Module) -> str | None:
    """Return the name of the list of modules that has the most parameters; None without any."""
    lists = [(sum(p.numel() for p in module.parameters()), name) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList)]  # fmt: skip
    return max(lists)[1] if lists else None


def convert_quietly(model: nn.Module, recipe: Recipe | RecipeMap, select: Select | None, fuse: bool = False) -> None:
    """Call octavo.convert, without the warning that there is nothing to convert or fuse."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.convert (converted|fused) nothing")
        convert(model, recipe, select, fuse=fuse)


def head_of(work: Work) -> LinearWork | None:
    """Return the layer that computes the logits; None in a model without any."""
    return next((each for each in reversed(work.linears) if work.logits and each.sizes[2] == work.logits), None)
