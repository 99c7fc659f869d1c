"""The work of a model's training step, counted from its shapes: products, and the traffic of all else."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
import re
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
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import fakes_of
from octavo.private import pytree
from octavo.recipes import high_precision
from octavo.scaling.recipe import ROLES, Recipe, RecipeMap
from octavo.weights.operands import weight_of

COMPARED = ("dynamic", "delayed", "rowwise", "blockwise", "mx")  # by default: one recipe for each way to share scales
# FLOP of attention that is not causal, for each query, key and feature: forward's two products, backward's five
ATTENTION_FLOP = 4, 10
TRACED = 3  # blocks that are run of many that are alike: the first, the last, and one for each between
REPEATED = TRACED - 2  # the number of that one, the last but one
Result = TypeVar("Result")  # of a run of a model
BLOCK_NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx"}  # names of a block's number in its modules


class LayerSizes(NamedTuple):
    """Elements of a layer's tensors; a gradient is as large as what it is of."""

    input: int
    weight: int
    output: int


class LinearWork(NamedTuple):
    """The products of a linear layer in a step, and their sizes."""

    name: str
    tokens: int  # rows of its input
    in_features: int
    out_features: int
    grad_input: bool  # whether backward needs it
    grad_weight: bool
    groups: int = 1  # how many matrices a layer of experts has, each of which multiplies some of the rows
    input_reader: str = ""  # the first layer that reads the same tensor; "": unknown

    @property
    def products(self) -> tuple[bool, bool, bool]:
        """Whether output, grad_input and grad_weight are computed."""
        return True, self.grad_input, self.grad_weight

    @property
    def flop(self) -> float:
        """FLOP of one product."""
        return 2.0 * self.tokens * self.in_features * self.out_features

    @property
    def sizes(self) -> LayerSizes:
        """Elements of input, weight and output."""
        weight = self.groups * self.in_features * self.out_features
        return LayerSizes(self.tokens * self.in_features, weight, self.tokens * self.out_features)

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
        sizes = self.sizes
        seconds = []
        results = sizes.output, sizes.input, sizes.weight  # the other two are the product's operands
        for kind, result, is_computed in zip(product_kinds(recipe), results, self.products, strict=True):
            moved = (2 if kind == IN_BF16 else 1) * (sum(sizes) - result) + 2 * result  # bytes of operands and result
            seconds.append(rates.product_seconds(kind, self.flop, moved) if is_computed else 0.0)
        return tuple(seconds)

    def cast_seconds(self, recipe: Recipe, rates: Rates, sizes: Sequence[float] | None = None) -> dict[str, float]:
        """Return {role: seconds of its casts} in a step; ``sizes``: cast elements of each role (default: all)."""
        output, grad_input, grad_weight = self.products
        is_read = (output, grad_weight), (output, grad_input), (grad_input, grad_weight)  # each role's two layouts
        seconds = dict.fromkeys(ROLES, 0.0)
        for name, role, size, needed in zip(ROLES, recipe.casts, sizes or self.sizes, is_read, strict=True):
            layouts = zip((role.as_is, role.transposed), needed, strict=True)
            if casts := [cast for cast, is_needed in layouts if cast and is_needed]:
                seconds[name] = rates.cast_seconds(casts[0], size, both=len(casts) == 2)
        return seconds


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
        return Traffic(*map(operator.sub, self, other))

    def plus(self, other: Traffic) -> Traffic:
        """Return this traffic and the other together."""
        return Traffic(*map(operator.add, self, other))


NO_TRAFFIC = Traffic(0, 0, 0)


class Blocks(NamedTuple):
    """A model's list of blocks: its name, how many, their share of ``Work.traffic``, and their forward's."""

    name: str
    size: int
    traffic: Traffic
    forward_traffic: Traffic


class Work(NamedTuple):
    """The work of a model's training step: products and the traffic of other operations."""

    linears: tuple[LinearWork, ...]  # that run, those of experts included
    other_flop: float  # of other products: attention, convolutions, experts that convert does not take
    traffic: Traffic  # of operations that are no products, with the loss of a language model
    blocks: Blocks | None
    attention: Mapping[int, float] = MappingProxyType({})  # of other_flop, by the size of a head
    inputs: Mapping[str, int] = MappingProxyType({})  # elements of the input of each other module, by name
    logits: int = 0  # elements of logits whose cross entropy is the loss; 0: the loss is another


class _Origin(NamedTuple):
    """The number of products in sequence that lead to a tensor, and whether it is in memory in a compiled step too."""

    products: int
    is_in_memory: bool  # a product's result, a parameter, an argument; others may never leave a fused kernel


_NO_OPERATION = _Origin(0, True)


class _Move(NamedTuple):
    """A write of a tensor, or a read after so many products in sequence."""

    storage: int
    read_after: int | None = None


class _Counter(OperationCounter):
    """A mode that counts the Traffic of operations, except products: those with formulas of torch or its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = NO_TRAFFIC
        self.flop_formulas = self.formulas()
        self.attention: Counter[int] = Counter()  # FLOP by the size of a head
        self.origins: dict[int, _Origin] = {}  # by storage
        self.moved: set[_Move] = set()

    def count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        read, written = _tensors((args, kwargs)), _tensors(result)
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not written or is_view or any(word in func._schema.name for word in ("empty", "_unsafe_view")):
            return
        packet = func._overloadpacket
        is_product = packet in flop_registry or packet in self.flop_formulas
        if packet in self.flop_formulas and "attention" in func._schema.name:
            self.attention[read[0].shape[-1]] += self.flop_formulas[packet](*(x.shape for x in _tensors(args)))
        products = max([0, *(self._origin(x).products for x in read)])
        size = 0 if is_product else sum(x.nbytes for x in (*read, *written))
        compiled = self._compiled_bytes(read, products, is_product)
        self.counts = self.counts.plus(Traffic(size, int(not is_product), compiled))
        self.origins |= {self.storage_of(x): _Origin(products + is_product, is_product) for x in written}
        self.held += written

    def _compiled_bytes(self, read: Iterable[Tensor], products: int, is_product: bool) -> int:
        """Return the bytes that a compiled step moves for an operation after so many products.

        It writes a tensor once, if no product has, and reads it once between two products, if this is none. It does
        neither where the same kernel has computed the tensor. In ``a = x * w; b = a + 1; y = b @ v`` of a parameter x
        the kernel in front of the product reads x and w, and the product has b written; a stays in the kernel.
        """
        size = 0
        for x in read:
            storage, origin = self.storage_of(x), self._origin(x)
            if not (is_product or origin.is_in_memory or origin.products < products):
                continue
            moves: set[_Move] = set() if origin.is_in_memory else {_Move(storage)}
            moves |= set() if is_product else {_Move(storage, products)}
            size += x.nbytes * len(moves - self.moved)
            self.moved |= moves
        return size

    def _origin(self, tensor: Tensor) -> _Origin:
        return self.origins.get(self.storage_of(tensor), _NO_OPERATION)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _without_memory(model: nn.Module, left_out: Iterable[nn.Module] = ()) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory; modules left out are not copied."""
    memo: dict[int, Any] = {id(module): module for module in left_out}
    for tensor in (*model.parameters(), *model.buffers()):
        blank: Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model in high precision whose parameters and buffers have no memory."""
    copied = _without_memory(model)
    if RecipeModule.named_in(copied):
        set_recipe(copied, high_precision())
    return copied


def work_of(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """Return the Work of a model's step in high precision, by running forward and backward without data.

    The loss of a model that returns logits of its tokens is their cross entropy, in float32; else a sum. Of many blocks
    that are alike TRACED and one more are run. ``inputs``: as for ``estimate``. Raises ValueError if no result of the
    forward needs a gradient.
    """
    return run_shorter(model, lambda twin: _traced(twin, inputs), _extrapolated_work)


def run_shorter(
    model: nn.Module, run: Callable[[nn.Module], Result], extrapolate: Callable[[Result, Result, int], Result]
) -> Result:
    """Run a model, or run two short copies and extrapolate to all its blocks, if these are many and alike.

    ``extrapolate`` takes ``run`` of a copy of TRACED blocks, that of one of a block more, and how many more than TRACED
    the model has: what a step does and keeps grows by the same with each block. Where blocks are not alike, a forward
    counts on all of them, or ``extrapolate`` raises ValueError, the model is run.
    """
    if (name := blocks_of(model)) is None:
        return run(model)
    blocks: Any = model.get_submodule(name)
    more = len(blocks) - TRACED
    if more > 1 and len({*map(id, blocks)}) == len(blocks) and len({str(_description(block)) for block in blocks}) == 1:
        # a forward that needs all blocks fails in a copy: by an index, a name, or a shape that does not fit, which
        # torch raises as RuntimeError; an error of the model itself comes again below
        with contextlib.suppress(IndexError, KeyError, ValueError, RuntimeError):
            return extrapolate(run(first_blocks(model, name, TRACED)), run(first_blocks(model, name, TRACED + 1)), more)
    return run(model)


def first_blocks(model: nn.Module, blocks: str, count: int) -> nn.Module:
    """Return a copy without memory of a model with the first ``count`` blocks of the list of this name, or fewer."""
    twin = _without_memory(model, [*model.get_submodule(blocks).children()][count:])
    del twin.get_submodule(blocks)[count:]  # type: ignore[operator]
    return twin


def _description(block: nn.Module) -> list[Any]:
    """Return what tells a block from others: its modules' parameters, recipes and settings, but not its number."""
    modules = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        parameters = [(key, p.shape, p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)]
        recipe = repr(module.recipe) if isinstance(module, RecipeModule) else ""
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        ordered = sorted((key, value) for key, value in settings.items() if key not in BLOCK_NUMBERS)
        modules.append((name, type(module), ordered, parameters, recipe, hooks))
    return modules


def extrapolated(short: Result, long: Result, more: int) -> Result:
    """Return a tree of numbers for ``more`` blocks than ``short``'s, which grow with each by ``long`` - ``short``."""
    return pytree.tree_map(lambda x, y: x if x == y else x + more * (y - x), short, long)


def _extrapolated_work(short: Work, long: Work, more: int) -> Work:
    """Return the Work of a model of ``more`` blocks more than ``short``'s TRACED; ``long``'s model has one more.

    Numbers grow by the difference; layers and modules' inputs have names, which are those of block REPEATED again.
    """
    assert short.blocks is not None
    blocks = short.blocks.name
    sizes = {name: size for name, size in short.inputs.items() if f"{name}.".startswith(f"{blocks}.{REPEATED}.")}
    inputs = {_in_block(name, blocks, TRACED + i): size for i in range(more) for name, size in sizes.items()}
    numbers, longer = (work._replace(linears=(), inputs={}) for work in (short, long))
    linears = _with_repeated_block(short.linears, blocks, more)
    return extrapolated(numbers, longer, more)._replace(linears=linears, inputs={**short.inputs, **inputs})


def _with_repeated_block(linears: Sequence[LinearWork], blocks: str, more: int) -> tuple[LinearWork, ...]:
    """Return a model's layers with ``more`` blocks like the one of number REPEATED.

    Raises ValueError if the last two blocks' layers are not the same, one block after the other.
    """
    before_last = [each for each in linears if f"{each.name}.".startswith(f"{blocks}.{REPEATED}.")]
    repeated = [
        each._replace(
            name=_in_block(each.name, blocks, number), input_reader=_in_block(each.input_reader, blocks, number)
        )
        for number in range(REPEATED, REPEATED + more + 2)
        for each in before_last
    ]
    begin = linears.index(before_last[0])
    end = begin + 2 * len(before_last)
    if list(linears[begin:end]) != repeated[: end - begin]:
        raise ValueError("layers of two blocks run in turn, or share inputs otherwise")
    return (*linears[:begin], *repeated, *linears[end:])


def _in_block(name: str, blocks: str, number: int) -> str:
    """Return the name of a module of block REPEATED in another block; names of other modules as they are."""
    return re.sub(rf"^{re.escape(blocks)}\.{REPEATED}(?=\.|$)", f"{blocks}.{number}", name)


def _is_block_of_experts(module: nn.Module, name: str) -> bool:
    """Whether a module that can be converted has layers of experts, and is no layer itself."""
    return not any(sizes_of(module))


def _traced(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """Return the Work of a model, all of whose blocks are run."""
    # a GPU's tensors too become fakes on the CPU, where those of parameters are
    inputs = pytree.tree_map_only(Tensor, lambda x: x if x.device.type == "cpu" else x.to("meta"), tuple(inputs))
    mode, twin, arguments = fakes_of(on_meta(model), inputs)
    for fake, x in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(inputs), strict=True):
        if isinstance(x, Tensor):
            fake.requires_grad_(x.requires_grad)
    # so that each product is a module's, and no loop depends on a router's choices
    convert_quietly(twin, high_precision(), _is_block_of_experts)
    works_by_name, input_sizes = _watch(twin)
    counter = _Counter()
    blocks = blocks_of(twin)
    marks = [] if blocks is None else _marks(twin.get_submodule(blocks), counter)
    with mode, FlopCounterMode(display=False, custom_mapping=counter.flop_formulas) as flop, counter:
        if not (results := [result for result in _tensors(twin(*arguments)) if result.requires_grad]):
            raise ValueError("no result of the model's forward needs a gradient: there is nothing to train")
        logits = _logits(twin, results, arguments)
        _loss(results, logits).backward()
    linears = tuple(works_by_name.values())
    return Work(
        linears=linears,
        other_flop=max(flop.get_total_flops() - sum(work.flop * sum(work.products) for work in linears), 0.0),
        traffic=counter.counts,
        blocks=None if blocks is None else _blocks(blocks, twin, marks, counter.counts),
        attention=dict(counter.attention),
        inputs=input_sizes,
        logits=0 if logits is None else logits.numel(),
    )


def _blocks(name: str, model: nn.Module, marks: Sequence[Traffic], total: Traffic) -> Blocks:
    """Return the Blocks of the list of this name; ``marks``: of ``_marks``; ``total``: the whole step's traffic."""
    # where nothing is trained before the blocks, backward ends inside them, and all counts as theirs
    before, after, begin, end = marks if len(marks) == 4 else (NO_TRAFFIC, NO_TRAFFIC, NO_TRAFFIC, total)
    forward, backward = after.less(before), end.less(begin)
    return Blocks(name, len(list(model.get_submodule(name).children())), forward.plus(backward), forward)


def _logits(model: nn.Module, results: Sequence[Tensor], arguments: Sequence[Any]) -> Tensor | None:
    """Return the result that has a row for each token and a column for each word; None: it is no language model."""
    words = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    tokens = [x.shape for x in _tensors(arguments) if x.dtype == torch.int64]
    return next((y for y in results if y.ndim and y.shape[-1] in words and y.shape[:-1] in tokens), None)


def _loss(results: Sequence[Tensor], logits: Tensor | None) -> Tensor:
    """Return the loss as training computes it: transformers', octavo.train's; of no language model a sum."""
    if logits is None:
        return sum(result.float().sum() for result in results)  # type: ignore[return-value]
    rows = logits.float().flatten(0, -2)
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))


def _watch(twin: nn.Module) -> tuple[dict[str, LinearWork], dict[str, int]]:
    """Return the LinearWork of layers, and elements of the inputs of other modules, by name: filled by a forward."""
    works_by_name: dict[str, LinearWork] = {}
    input_sizes: dict[str, int] = {}
    readers: dict[tuple[int, int], str] = {}  # the first one of each input
    live_inputs: list[Tensor] = []  # so that no other tensor gets its place

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        inputs = _inputs(module, arguments, keywords)
        matrices, in_features, out_features = sizes_of(module)
        if not in_features:  # no layer
            input_sizes[name] = input_sizes.get(name, 0) + sum(x.numel() for x in inputs[:1] if isinstance(x, Tensor))
            return
        x = inputs[0]
        weight = next(p for p in (weight_of(module), *module.parameters()) if p is not None)
        tokens = x.numel() // in_features
        reader = readers.setdefault((id(x), x._version), name)
        live_inputs.append(x)
        if name in works_by_name:  # called more than once: the rows of its products add up
            tokens += works_by_name[name].tokens
            reader = ""
        needs = x.requires_grad, weight.requires_grad
        works_by_name[name] = LinearWork(name, tokens, in_features, out_features, *needs, matrices or 1, reader)

    for name, module in twin.named_modules():
        module.register_forward_hook(functools.partial(note, name), with_kwargs=True)
    return works_by_name, input_sizes


def _inputs(module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a module's call in the order of its forward's parameters."""
    names = [*inspect.signature(module.forward).parameters, *keywords]  # which may be in any order
    return [*arguments, *(keywords[name] for name in sorted(keywords, key=names.index))]


def _marks(blocks: Any, counter: _Counter) -> list[Traffic]:
    """Return the counts before and after a step's blocks, in forward and then in backward: filled by the step."""
    marks: list[Traffic] = []

    def mark(block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any = None) -> None:
        marks.append(counter.counts)
        x = _tensors(_inputs(block, arguments, keywords) if output is None else output)[0]
        if x.requires_grad:  # backward begins at the last block's output, and ends at the first one's input
            x.register_hook(lambda _: marks.append(counter.counts))

    blocks[0].register_forward_pre_hook(mark, with_kwargs=True)
    blocks[-1].register_forward_hook(mark, with_kwargs=True)
    return marks


def blocks_of(model: nn.Module) -> str | None:
    """Return the name of the list of modules that has the most parameters; None where all are empty, or none is."""
    lists = [(sum(p.numel() for p in module.parameters()), name) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList) and len(module)]  # fmt: skip
    return max(lists)[1] if lists else None


def convert_quietly(model: nn.Module, recipe: Recipe | RecipeMap, select: Select | None, fuse: bool = False) -> None:
    """Call octavo.convert, without the warning that there is nothing to convert or fuse."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.convert (converted|fused) nothing")
        convert(model, recipe, select, fuse=fuse)


def head_of(work: Work) -> LinearWork | None:
    """Return the layer that computes the logits; None in a model without any."""
    return next((each for each in reversed(work.linears) if work.logits and each.sizes.output == work.logits), None)
