"""The time and memory of a training step, predicted from a model's shapes and a device's rates."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from octavo.cost.rates import HIGH_PRECISION, Rates, forms_of
from octavo.nn.candidates import Select, experts_class, features, fp8_class
from octavo.nn.convert import convert, set_recipe
from octavo.nn.linear import Grouped
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import storage_of, twin_of, without_data
from octavo.nn.summary import formulas
from octavo.private import FakeTensorMode, TorchDispatchMode, cpu_attention, cpu_attention_backward, pytree
from octavo.recipes import high_precision
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Phase, PhasePlan, PrecisionSchedule

# FLOP of attention on a CPU, which torch's counter lacks
_ATTENTION = {
    cpu_attention: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    cpu_attention_backward: (lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)),
}


class LinearWork(NamedTuple):
    """What a linear layer computes in a step."""

    name: str
    tokens: int  # rows of its input
    in_features: int
    out_features: int
    grad_input: bool  # whether backward needs it
    grad_weight: bool
    groups: int = 1  # how many matrices a layer of experts has, each of which multiplies some of the rows
    reads: int = 0  # its input's number in the model, the same for layers that cast one tensor; 0: not known

    @property
    def products(self) -> tuple[bool, bool, bool]:
        """Which of output, grad_input and grad_weight are computed."""
        return True, self.grad_input, self.grad_weight

    @property
    def flop(self) -> float:
        """The FLOP of one product."""
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
        """(seconds of products, seconds of casts) of a step under a recipe."""
        wanted, sizes = self.products, self.sizes
        products = 0.0
        # output is as large as grad_output, and grad_input as input
        for form, result, computed in zip(forms_of(recipe), (sizes[2], sizes[0], sizes[1]), wanted, strict=True):
            width = 2 if form == HIGH_PRECISION else 1
            moved = width * (sum(sizes) - result) + 2 * result
            products += rates.product_seconds(form, self.flop, moved) if computed else 0.0
        return products, sum(self.cast_seconds(recipe, rates))

    def cast_seconds(self, recipe: Recipe, rates: Rates) -> tuple[float, ...]:
        """Seconds of the casts of input, weight and grad_output in a step under a recipe."""
        wanted, casts = self.products, []
        readers = (wanted[0], wanted[2]), (wanted[0], wanted[1]), (wanted[1], wanted[2])  # whether each layout is read
        for role, size, (as_is, transposed) in zip(recipe.casts, self.sizes, readers, strict=True):
            made = [cast for cast, needed in ((role.as_is, as_is), (role.transposed, transposed)) if cast and needed]
            casts.append(rates.cast_seconds(made[0], size, len(made) == 2) if made else 0.0)
        return tuple(casts)


class Traffic(NamedTuple):
    """Of operations that are no products: bytes that they read and write in eager PyTorch, how many, bytes compiled.

    A compiled step writes a tensor once, if a product reads it or what comes after a product, and reads it once between
    two products.
    """

    bytes: int
    ops: int
    fused: int


class Blocks(NamedTuple):
    """A model's list of blocks: its name, how many, and what of ``Work.other`` is theirs."""

    name: str
    size: int
    other: Traffic


class Work(NamedTuple):
    """What a training step of a model computes."""

    linears: tuple[LinearWork, ...]  # that run, those of experts included
    other_flop: float  # of other products: attention, convolutions, experts that convert does not take
    other: Traffic
    blocks: Blocks | None


@dataclass(frozen=True)
class LayerTime:
    """A linear layer's seconds a step, in bf16 and as converted."""

    work: LinearWork
    bf16: float
    converted: float


@dataclass(frozen=True)
class Estimate:
    """A training step under a recipe.

    Attributes:
        name: the recipe's.
        products, casts, other, optimizer: seconds in eager PyTorch.
        fused: seconds of the other operations where ``torch.compile`` fuses those between two products.
        memory: bytes by kind.
        layers: the converted layers' times, as converted and in bf16.

    Example:
        >>> import torch, octavo
        >>> with torch.device("meta"):
        ...     layer, x = torch.nn.Linear(8192, 8192).bfloat16(), torch.empty(8192, 8192, dtype=torch.bfloat16)
        >>> found = estimate(layer, (x,), octavo.recipes.delayed(), octavo.cost.rates_of("H200"))
        >>> found.products < found.total, len(found.slower)
        (True, 0)
    """

    name: str
    products: float
    casts: float
    other: float
    optimizer: float
    memory: PhasePlan
    layers: tuple[LayerTime, ...]
    fused: float

    @property
    def total(self) -> float:
        """Seconds of a step in eager PyTorch."""
        return self.products + self.casts + self.other + self.optimizer

    @property
    def compiled(self) -> float:
        """Seconds of a compiled step."""
        return self.total - self.other + self.fused

    @property
    def slower(self) -> tuple[LayerTime, ...]:
        """Converted layers that bf16 would compute as fast or faster."""
        return tuple(layer for layer in self.layers if layer.converted >= layer.bf16)


class _Counter(TorchDispatchMode):
    """Counts the Traffic of operations, except products: those that torch counts, and ``products``.

    ``made``: for each storage, after how many products it was computed, and whether by one.
    """

    def __init__(self, products: Container[Any]) -> None:
        super().__init__()
        self.bytes, self.ops, self.fused, self.products = 0, 0, 0, products
        self.made: dict[int, tuple[int, bool]] = {}
        self.moved: set[tuple[int, int]] = set()  # (storage, after how many products it is read; -1: written)
        self.held: list[Any] = []  # so that no other storage gets its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = ([x for x in pytree.tree_leaves(xs) if isinstance(x, Tensor)] for xs in ((args, kwargs), result))
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not made or is_view or any(word in func._schema.name for word in ("empty", "_unsafe_view")):
            return result
        is_product = func._overloadpacket in flop_registry or func._overloadpacket in self.products
        after = max((self.made.get(storage_of(x), (0, True))[0] for x in read), default=0)
        if not is_product:
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *made))
            self.ops += 1
        for x in read:
            key, size = storage_of(x), x.numel() * x.element_size()
            before, of_product = self.made.get(key, (-1, True))
            if is_product or of_product or before < after:
                uses = {use for use, counts in (((key, -1), not of_product), ((key, after), not is_product)) if counts}
                self.fused += size * len(uses - self.moved)
                self.moved |= uses
        self.made |= {storage_of(x): (after + is_product, is_product) for x in made}
        self.held += made
        return result

    @property
    def counts(self) -> Traffic:
        """Until now."""
        return Traffic(self.bytes, self.ops, self.fused)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model in high precision whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin: Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    copied = copy.deepcopy(model, memo)
    if any(isinstance(module, RecipeModule) for module in copied.modules()):
        set_recipe(copied, high_precision())
    return copied


def work_of(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """What a step of a model computes in high precision, found by running forward and backward without data.

    ``inputs``: as for ``estimate``. ValueError, if no result of the forward needs a gradient.
    """
    found: dict[str, LinearWork] = {}
    numbers: dict[tuple[int, int], int] = {}
    held: list[Tensor] = []  # so that no other tensor gets its place

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: object) -> None:
            x, groups = arguments[0], 1
            if isinstance(module, Grouped):
                weight: Tensor = module.operands()[0]
                groups, rows, columns = weight.shape
            else:
                weight, (columns, rows) = next(module.parameters()), features(module)
            tokens, reads = x.numel() // columns, numbers.setdefault((id(x), x._version), len(numbers) + 1)
            held.append(x)
            if name in found:  # called more than once: the rows of its products add up
                tokens, reads = tokens + found[name].tokens, 0
            needs = x.requires_grad, weight.requires_grad
            found[name] = LinearWork(name, tokens, columns, rows, *needs, groups, reads)

        return hook

    mode = FakeTensorMode(allow_non_fake_inputs=True)  # unlike the meta device, it lets models ask for values
    twin = twin_of(on_meta(model), mode)
    # experts are converted so that each product is a module's, and no loop depends on a router's choices
    _convert(twin, high_precision(), lambda module, name: experts_class(module) is not None)
    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear | Grouped) or fp8_class(module) is not None:
            module.register_forward_hook(note(name))
    arguments = pytree.tree_map_only(
        Tensor, lambda x: without_data(x, mode).requires_grad_(x.requires_grad), tuple(inputs)
    )
    products = {**formulas(), **_ATTENTION}
    traffic, name = _Counter(products), blocks_of(twin)
    marks = [] if name is None else _marks(twin.get_submodule(name), traffic)
    with mode, FlopCounterMode(display=False, custom_mapping=products) as flop, traffic:
        outputs = pytree.tree_leaves(twin(*arguments))
        results = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not results:
            raise ValueError("no result of the model's forward needs a gradient: there is nothing to train")
        sum(result.float().sum() for result in results).backward()  # type: ignore[union-attr]
    linears = tuple(found.values())
    of_linears = sum(work.flop * sum(work.products) for work in linears)
    other_flop = max(flop.get_total_flops() - of_linears, 0.0)
    of_blocks = None
    if name is not None:  # where nothing is trained before the blocks, all counts as theirs
        counts = zip(*marks[:4], strict=True) if len(marks) >= 4 else ((0, count, 0, 0) for count in traffic.counts)
        size = len(list(twin.get_submodule(name).children()))
        of_blocks = Blocks(name, size, Traffic(*(b - a + d - c for a, b, c, d in counts)))
    return Work(linears, other_flop, traffic.counts, of_blocks)


def _marks(blocks: Any, traffic: _Counter) -> list[Traffic]:
    """What was counted before and after a step's blocks, in forward and then in backward: filled by the step."""
    marks: list[Traffic] = []

    def mark(_: object, given: Any, output: Any = None) -> None:
        marks.append(traffic.counts)
        x = next(leaf for leaf in pytree.tree_leaves(given if output is None else output) if isinstance(leaf, Tensor))
        if x.requires_grad:  # backward begins at the last block's output, and ends at the first one's input
            x.register_hook(lambda _: marks.append(traffic.counts))

    blocks[0].register_forward_pre_hook(mark)
    blocks[-1].register_forward_hook(mark)
    return marks


def blocks_of(model: nn.Module) -> str | None:
    """The name of the list of modules that has the most parameters; None without any."""
    lists = [(sum(p.numel() for p in module.parameters()), name) for name, module in model.named_modules()
             if isinstance(module, nn.ModuleList)]  # fmt: skip
    return max(lists)[1] if lists else None


def _convert(model: nn.Module, recipe: Recipe | RecipeMap, select: Select | None, fuse: bool = False) -> None:
    """octavo.convert, without the warning that there is nothing to convert or fuse."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.convert (converted|fused) nothing")
        convert(model, recipe, select, fuse=fuse)


def orthogonalising(shape: Sequence[float], rates: Rates, steps: int = 5) -> float:
    """Seconds of the products that orthogonalise a matrix, or stacked ones, for octavo.optim.Muon."""
    *stacked, less, more = *shape[:-2], *sorted(shape[-2:])
    large, small = (2.0 * math.prod(stacked) * less * less * size for size in (more, less))
    return steps * (2 * rates.product_seconds(HIGH_PRECISION, large) + rates.product_seconds(HIGH_PRECISION, small))


def estimate(
    model: nn.Module,
    inputs: Sequence[Any],
    recipe: Recipe | RecipeMap | None,
    rates: Rates,
    select: Select | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = torch.optim.AdamW,
    work: Work | None = None,
    fuse: bool = False,
) -> Estimate:
    """Predict a training step of a model on one device, in eager PyTorch and compiled, without computing it.

    Products and casts take their time by the rates; all other operations, and the optimizer, that of the bytes that
    they move. Layers that read one tensor cast it once. Nothing overlaps: this is the sum over the kernels in a
    profile. ``torch.compile`` fuses the other operations, which then move less.

    Args:
        model: on any device; the meta device (``with torch.device("meta"):``) takes no memory.
        inputs: positional arguments of its forward, as in training; their values are not read.
        recipe: as for octavo.convert; None: nothing is converted.
        rates: of the device; see octavo.cost.rates_of.
        select: as for octavo.convert.
        optimizer: makes the optimizer from the parameters.
        work: what ``work_of`` returned for the model, to be counted once for several recipes.
        fuse: as for octavo.convert; it changes the memory that is predicted, not the time.

    Returns:
        an Estimate.

    Example:
        >>> import torch, octavo
        >>> from octavo.cost import estimate, rates_of
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, dtype=torch.bfloat16))
        >>> x = torch.empty(16384, 8192, dtype=torch.bfloat16, device="meta", requires_grad=True)
        >>> bf16, fp8 = (estimate(model, (x,), r, rates_of("H200")) for r in (None, octavo.recipes.delayed()))
        >>> bf16.total > fp8.total
        True
    """
    twin = on_meta(model)
    work = work or work_of(model, inputs)
    if recipe is not None:
        _convert(twin, recipe, select, fuse)
    modules = dict(twin.named_modules())
    products = casts = 0.0
    layers, cast_inputs = [], set()
    for linear in work.linears:
        module = modules.get(linear.name)  # None for experts that are not converted
        followed = module.recipe if isinstance(module, RecipeModule) else high_precision()
        multiplied, cast = linear.seconds(followed, rates)
        key = linear.reads, linear.grad_weight, followed.input_casts
        if key in cast_inputs:
            cast -= linear.cast_seconds(followed, rates)[0]
        cast_inputs |= {key} if linear.reads else set()
        products, casts = products + multiplied, casts + cast
        if not followed.is_high_precision:
            layers.append(LayerTime(linear, linear.seconds(high_precision(), rates)[0], multiplied + cast))
    other = work.other.bytes / rates.copy + work.other.ops * rates.launch
    attention = rates.product_seconds(HIGH_PRECISION, work.other_flop) if work.other_flop else 0.0
    fused = work.other.fused / rates.copy + attention
    if not any(isinstance(module, RecipeModule) for module in twin.modules()):
        convert(twin, high_precision(), lambda module, name: True)  # a schedule needs converted layers
    phase = Phase(high_precision() if recipe is None else recipe)
    schedule = PrecisionSchedule(twin, made := optimizer(twin.parameters()), [phase])
    on = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta").requires_grad_(x.requires_grad), tuple(inputs))
    memory = schedule.plan(example_inputs=on).phases[0]
    update = (2 * (memory.weights + memory.masters + memory.moments) + memory.gradients) / rates.copy
    for group in made.param_groups:
        if group.get("algorithm") == "muon":
            update += sum(orthogonalising(param.shape, rates, group["ns_steps"]) for param in group["params"])
    name = "bf16" if recipe is None else getattr(recipe, "name", "map")
    return Estimate(name, products, casts, other + attention, update, memory, tuple(layers), fused)
