"""The time and memory of a training step, predicted from a model's shapes and a device's rates."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from octavo.autograd.linear_cross_entropy import ROWS
from octavo.cost.parts import (
    BF16_KERNELS,
    CHUNKED_LOSS,
    COUNTED,
    FUSED_LOSS,
    LOSS,
    OF_CHUNK,
    PARTS,
    Moved,
    fused_parts,
)
from octavo.cost.rates import (
    GRAD_OUTPUT,
    HIGH_PRECISION,
    INPUT,
    WEIGHT,
    HostTime,
    PlanError,
    Rates,
    form_of,
    forms_of,
    host_kind,
)
from octavo.nn.candidates import Select, features, fp8_class
from octavo.nn.convert import convert, set_recipe
from octavo.nn.known_forwards import fused_modules, refusal
from octavo.nn.linear import Grouped
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import fakes_of, storage_of
from octavo.nn.summary import formulas
from octavo.private import TorchDispatchMode, pytree
from octavo.recipes import default, high_precision
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Phase, PhasePlan, PrecisionSchedule

FUSED_BF16 = "bf16, fused"  # the name of an estimate without a recipe and with ``fuse``


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
        return sum(self.product_seconds(recipe, rates)), sum(self.cast_seconds(recipe, rates))

    def product_seconds(self, recipe: Recipe, rates: Rates) -> tuple[float, ...]:
        """Return seconds of output, grad_input and grad_weight in a step under a recipe."""
        wanted, sizes, products = self.products, self.sizes, []
        # output is as large as grad_output, and grad_input as input
        for form, result, computed in zip(forms_of(recipe), (sizes[2], sizes[0], sizes[1]), wanted, strict=True):
            width = 2 if form == HIGH_PRECISION else 1
            moved = width * (sum(sizes) - result) + 2 * result
            products.append(rates.product_seconds(form, self.flop, moved) if computed else 0.0)
        return tuple(products)

    def cast_seconds(self, recipe: Recipe, rates: Rates) -> tuple[float, ...]:
        """Return seconds of the casts of input, weight and grad_output in a step under a recipe."""
        wanted, casts = self.products, []
        readers = (wanted[0], wanted[2]), (wanted[0], wanted[1]), (wanted[1], wanted[2])  # whether each layout is read
        for role, size, (as_is, transposed) in zip(recipe.casts, self.sizes, readers, strict=True):
            needed_casts = [
                cast for cast, needed in ((role.as_is, as_is), (role.transposed, transposed)) if cast and needed
            ]
            casts.append(rates.cast_seconds(needed_casts[0], size, len(needed_casts) == 2) if needed_casts else 0.0)
        return tuple(casts)


class Traffic(NamedTuple):
    """The traffic of operations that are no products: bytes read and written in eager, how many, bytes compiled.

    A compiled step writes a tensor once, if a product or an operation after one reads it, and reads it once between two
    products.
    """

    bytes: float
    ops: float
    fused: float

    def less(self, other: Traffic) -> Traffic:
        """Return this traffic less the other."""
        return Traffic(*(size - other_size for size, other_size in zip(self, other, strict=True)))


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
    inputs: Mapping[str, int] = MappingProxyType(
        {}
    )  # elements of the input of each norm that octavo knows, by its name
    logits: int = 0  # elements of logits whose cross entropy is the loss; 0: the loss is another


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
        products, casts, other, optimizer: seconds of the device in eager PyTorch.
        memory: bytes by kind.
        layers: the converted layers' times, as converted and in bf16.
        fused: seconds of the other operations where ``torch.compile`` fuses those between two products.
        device, host: seconds of the device, and of the host that launches its work, in eager PyTorch: of the blocks'
            forward, and of what comes after.
        loss: bytes of ``memory`` that are there only before the first gradient of a weight.

    Example:
        >>> import torch, octavo
        >>> with torch.device("meta"):
        ...     layer, x = torch.nn.Linear(8192, 8192).bfloat16(), torch.empty(8192, 8192, dtype=torch.bfloat16)
        >>> step = estimate(layer, (x,), octavo.recipes.delayed(), octavo.cost.rates_of("H200"))
        >>> step.products < step.total, len(step.slower)
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
    device: tuple[float, ...] = ()
    host: tuple[float, ...] = ()
    loss: int = 0

    @property
    def waits(self) -> float:
        """Seconds that the device waits for the host in eager PyTorch, in a step that begins when it is idle."""
        launched = done = 0.0
        for busy, launching in zip(self.device, self.host, strict=True):
            launched += launching
            done = max(done + busy, launched)
        return done - sum(self.device)

    @property
    def total(self) -> float:
        """Seconds of a step in eager PyTorch."""
        return self.products + self.casts + self.other + self.optimizer + self.waits

    @property
    def compiled(self) -> float:
        """Seconds of a compiled step, whose host is ahead."""
        return self.products + self.casts + self.fused + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at a time: those of the loss alone are freed before there are gradients of weights."""
        return self.memory.total - min(self.memory.gradients, self.loss)

    @property
    def slower(self) -> tuple[LayerTime, ...]:
        """Converted layers that bf16 would compute as fast or faster."""
        return tuple(layer for layer in self.layers if layer.converted >= layer.bf16)


class _Counter(TorchDispatchMode):
    """A mode that counts the Traffic of operations, except products: those that torch counts, and ``products``.

    ``origins``: {storage: (after how many products it was computed, whether by a product)}.
    """

    def __init__(self, products: Mapping[Any, Any]) -> None:
        super().__init__()
        self.bytes, self.ops, self.fused, self.products = 0, 0, 0, products
        self.attention: Counter[int] = Counter()  # FLOP by the size of a head
        self.origins: dict[int, tuple[int, bool]] = {}
        self.moved: set[tuple[int, int]] = set()  # (storage, after how many products it is read; -1: written)
        self.held: list[Any] = []  # so that no other storage gets its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = (
            [x for x in pytree.tree_leaves(xs) if isinstance(x, Tensor)] for xs in ((args, kwargs), result)
        )
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if not written or is_view or any(word in func._schema.name for word in ("empty", "_unsafe_view")):
            return result
        is_product = func._overloadpacket in flop_registry or func._overloadpacket in self.products
        if func._overloadpacket in self.products and "attention" in func._schema.name:
            flop: Any = self.products[func._overloadpacket]
            self.attention[read[0].shape[-1]] += flop(*(x.shape for x in args if isinstance(x, Tensor)))
        after = max((self.origins.get(storage_of(x), (0, True))[0] for x in read), default=0)
        if not is_product:
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written))
            self.ops += 1
        for x in read:
            key, size = storage_of(x), x.numel() * x.element_size()
            written_after, of_product = self.origins.get(key, (-1, True))
            if is_product or of_product or written_after < after:
                uses = {use for use, counts in (((key, -1), not of_product), ((key, after), not is_product)) if counts}
                self.fused += size * len(uses - self.moved)
                self.moved |= uses
        self.origins |= {storage_of(x): (after + is_product, is_product) for x in written}
        self.held += written
        return result

    @property
    def counts(self) -> Traffic:
        """The traffic counted so far."""
        return Traffic(self.bytes, self.ops, self.fused)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model in high precision whose parameters and buffers have no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin: Tensor = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    copied = copy.deepcopy(model, memo)
    if any(isinstance(module, RecipeModule) for module in copied.modules()):
        set_recipe(copied, high_precision())
    return copied


def work_of(model: nn.Module, inputs: Sequence[Any]) -> Work:
    """Return the Work of a model's step in high precision, by running forward and backward without data.

    The loss of a model that returns logits of its tokens is their cross entropy, in float32; else a sum. ``inputs``: as
    for ``estimate``. Raises ValueError if no result of the forward needs a gradient.
    """
    mode, twin, arguments = fakes_of(on_meta(model), tuple(inputs))
    for fake, x in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(tuple(inputs)), strict=True):
        if isinstance(x, Tensor):
            fake.requires_grad_(x.requires_grad)
    # experts are converted so that each product is a module's, and no loop depends on a router's choices
    _convert(twin, high_precision(), lambda module, name: fp8_class(module) is None)
    works_by_name, sizes = _watch(twin)
    products = formulas()
    traffic, name = _Counter(products), blocks_of(twin)
    marks = [] if name is None else _marks(twin.get_submodule(name), traffic)
    with mode, FlopCounterMode(display=False, custom_mapping=products) as flop, traffic:
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
        nothing = Traffic(0, 0, 0)
        before, after, begin, end = marks if len(marks) == 4 else (nothing, nothing, nothing, traffic.counts)
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
            x, groups = arguments[0], 1
            if isinstance(module, Grouped):
                weight: Tensor = module.operands()[0]
                groups, rows, columns = weight.shape
            else:
                weight, (columns, rows) = next(module.parameters()), features(module)
            tokens, reads = x.numel() // columns, numbers.setdefault((id(x), x._version), len(numbers) + 1)
            live_inputs.append(x)
            if name in works_by_name:  # called more than once: the rows of its products add up
                tokens, reads = tokens + works_by_name[name].tokens, 0
            needs = x.requires_grad, weight.requires_grad
            works_by_name[name] = LinearWork(name, tokens, columns, rows, *needs, groups, reads)

        return hook

    def size(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any], output: object) -> None:
            sizes[name] = sizes.get(name, 0) + (*arguments, *keywords.values())[0].numel()

        return hook

    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear | Grouped) or fp8_class(module) is not None:
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


def _convert(model: nn.Module, recipe: Recipe | RecipeMap, select: Select | None, fuse: bool = False) -> None:
    """Call octavo.convert, without the warning that there is nothing to convert or fuse."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.convert (converted|fused) nothing")
        convert(model, recipe, select, fuse=fuse)


def orthogonalising(shape: Sequence[float], rates: Rates, steps: int = 5) -> float:
    """Return seconds of the products that orthogonalise a matrix, or stacked ones, for octavo.optim.Muon."""
    *stacked, less, more = *shape[:-2], *sorted(shape[-2:])
    large, small = (2.0 * math.prod(stacked) * less * less * size for size in (more, less))
    return steps * (2 * rates.product_seconds(HIGH_PRECISION, large) + rates.product_seconds(HIGH_PRECISION, small))


class _Times:
    """Seconds of a step under a converted model's recipes, by kind, as in ``Estimate``; layers are added one by one."""

    def __init__(
        self, work: Work, rates: Rates, fused: Iterable[tuple[str, str, float]], kernels: Mapping[str, Moved]
    ) -> None:
        """Begin with all but linear layers; ``fused``: from fused_parts; ``kernels``: the traffic of fused parts."""
        self.work, self.rates = work, rates
        others = work.other_flop - sum(work.attention.values())
        attention = rates.attention_seconds(work.attention, causal=work.logits > 0)
        attention += rates.product_seconds(HIGH_PRECISION, others) if others > 0 else 0.0
        self.fused = work.other.fused / rates.copy + attention
        forward = Traffic(0, 0, 0) if work.blocks is None else work.blocks.forward
        moved = [[*forward[:2]], [*work.other.less(forward)[:2]]]
        for name, part, elements in fused:
            plain, less = PARTS[part].plain, kernels[part]
            first = moved[self.span(name)]
            first[0] += elements * (less.forward - plain.forward)
            first[1] += less.forward_launches - plain.forward_launches
            moved[1][0] += elements * (less.backward - plain.backward)
            moved[1][1] += less.backward_launches - plain.backward_launches
        self.device = [size / rates.copy + launches * rates.launch for size, launches in moved]
        share = 0.0 if work.blocks is None else 4 / 14  # of attention's products, forward's
        self.device[0] += share * attention
        self.device[1] += (1 - share) * attention
        self.other = sum(self.device)
        times = rates.host.get("operation", HostTime(0.0, 0.0))
        self.host = [moved[0][1] * times.forward, moved[1][1] * times.backward]
        self.products = self.casts = 0.0

    def span(self, name: str) -> int:
        """Return 0 for a module of the blocks, whose forward is the first span of ``Estimate.device``; else 1."""
        return 0 if self.work.blocks is not None and name.startswith(f"{self.work.blocks.name}.") else 1

    def add(self, linear: LinearWork, recipe: Recipe, spared: Container[int]) -> LayerTime:
        """Add a layer, but for the casts of the roles ``spared``; return its times with all casts."""
        multiplied, cast = linear.product_seconds(recipe, self.rates), [*linear.cast_seconds(recipe, self.rates)]
        layer = LayerTime(linear, linear.seconds(high_precision(), self.rates)[0], sum(multiplied) + sum(cast))
        times = self.rates.host.get(host_kind(recipe), HostTime(0.0, 0.0))
        cast = [0.0 if role in spared else seconds for role, seconds in enumerate(cast)]
        self.products, self.casts = self.products + sum(multiplied), self.casts + sum(cast)
        span, launched = self.span(linear.name), times.forward - times.cast * sum(r in spared for r in (INPUT, WEIGHT))
        self.device[span] += multiplied[0] + cast[INPUT] + cast[WEIGHT]
        self.device[1] += sum(multiplied[1:]) + cast[GRAD_OUTPUT]
        self.host[span] += launched
        self.host[1] += times.backward
        return layer


def head_of(work: Work) -> LinearWork | None:
    """Return the layer that computes the logits; None in a model without any."""
    return next((each for each in reversed(work.linears) if work.logits and each.sizes[2] == work.logits), None)


def _fused(model: nn.Module, twin: nn.Module, work: Work, kernels: Container[str]) -> list[tuple[str, str, float]]:
    """Return the parts, as fused_parts yields them, that ``kernels`` has and ``twin`` fuses, but not ``model``."""
    already = {module.name for module in fused_modules(model) if module.kind != "loss"}
    parts = [part for part in fused_parts(twin, work.inputs, work) if part[1] in kernels]
    return [part for part in parts if part[0] not in already or part[1] not in COUNTED]


def _chunked(work: Work, modules: Mapping[str, nn.Module]) -> tuple[LinearWork, bool, int]:
    """Return (the head that octavo.nn.linear_cross_entropy computes with the loss, whether no gradient is cast, bytes).

    Blocks along the contraction are cast by the recipe, from logits' gradient; other codes are written in its place.
    The bytes are those at a time. Raises PlanError where the head's gradients are no products in FP8.
    """
    head = head_of(work)
    recipe = getattr(modules.get(head.name), "recipe", None) if head else None
    if head is None or recipe is None or recipe.grad_input is None or recipe.grad_weight is None:
        problem = "no layer computes logits" if head is None else f"the gradients of {head.name} are no products in FP8"
        raise PlanError(
            f"a chunked loss: {problem}; it is planned for a head in FP8, such as by dynamic_with_output_hp()"
        )
    writes_codes = form_of(recipe.grad_output_casts.as_is) in ("tensor", "row")
    of_chunk = OF_CHUNK + 2 * (not writes_codes)
    size = CHUNKED_LOSS * work.logits + of_chunk * min(work.logits, ROWS * head.out_features) + 2 * head.sizes[0]
    return head, writes_codes, size


def estimate(
    model: nn.Module,
    inputs: Sequence[Any],
    recipe: Recipe | RecipeMap | None,
    rates: Rates,
    select: Select | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = torch.optim.AdamW,
    work: Work | None = None,
    fuse: bool = False,
    weight_storage: Literal["fp8"] | None = None,
    chunked_loss: bool = False,
) -> Estimate:
    """Predict a training step of a model on one device, in eager PyTorch and compiled, without computing it.

    Products, attention and casts take their time by the rates; all other operations, and the optimizer, that of the
    bytes that they move. Layers that read one tensor cast it once. Nothing overlaps on the device, which in eager waits
    where the host takes longer to launch its work. ``torch.compile`` fuses the other operations, which then move less.

    Args:
        model: on any device; the meta device (``with torch.device("meta"):``) takes no memory.
        inputs: positional arguments of its forward, as in training; their values are not read.
        recipe: as for octavo.convert; None: nothing is converted.
        rates: of the device; see octavo.cost.rates_of.
        select: as for octavo.convert.
        optimizer: returns the optimizer of the parameters.
        work: what ``work_of`` returned for the model, to be counted once for several recipes.
        fuse: as for octavo.convert; octavo.cost.parts says what it changes, in eager. With ``recipe=None`` norms, gated
            feed-forwards, rotary positions and the loss are a kernel each in bf16, as Liger-Kernel's, and no products
            are joined; the memory is then that of octavo's norms and loss alone.
        weight_storage: as for octavo.convert; "fp8" needs an optimizer of octavo.optim.
        chunked_loss: logits are computed in chunks with their loss, as octavo.nn.linear_cross_entropy does.

    Returns:
        an Estimate.

    Raises:
        PlanError: for a chunked loss without a head whose gradients are products in FP8.

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
    if recipe is not None or fuse:  # the same modules are fused in bf16 as in FP8
        _convert(twin, recipe or default(), select if recipe else lambda *_: True, fuse)
    modules = dict(twin.named_modules())
    kernels = {part: each.fused for part, each in PARTS.items()} if recipe else BF16_KERNELS
    parts = _fused(model, twin, work, kernels) if fuse else []
    loss = (FUSED_LOSS if any(part == "loss" for _, part, _ in parts) else LOSS) * work.logits
    head, writes_codes = None, False
    if chunked_loss:
        head, writes_codes, loss = _chunked(work, modules)
        parts = [part for part in parts if part[1] != "loss"] + [("", "chunked loss", work.logits)]
    if recipe is None and fuse:
        set_recipe(twin, high_precision())
    times = _Times(work, rates, parts, kernels)
    layers, cast_inputs = [], set()
    for linear in work.linears:
        module = modules.get(linear.name)  # None for experts that are not converted
        followed = module.recipe if isinstance(module, RecipeModule) else high_precision()
        key = linear.reads, linear.grad_weight, followed.input_casts
        spared = {INPUT} if key in cast_inputs else set()
        cast_inputs |= {key} if linear.reads else set()
        spared |= ({WEIGHT} if weight_storage else set()) | (
            {GRAD_OUTPUT} if linear is head and writes_codes else set()
        )
        layer = times.add(linear, followed, spared)
        layers += [] if followed.is_high_precision else [layer]
    if not any(isinstance(module, RecipeModule) for module in twin.modules()):
        convert(twin, high_precision(), lambda module, name: True)  # a schedule needs converted layers
    stored: dict[str, Any] = {} if weight_storage is None else {"weight_storage": weight_storage}
    phase = Phase(high_precision() if recipe is None else recipe, **stored)
    schedule = PrecisionSchedule(twin, optimizer_of_twin := optimizer(twin.parameters()), [phase])
    meta_inputs = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to("meta").requires_grad_(x.requires_grad), tuple(inputs)
    )
    memory = schedule.plan(example_inputs=meta_inputs).phases[0]
    update = (2 * (memory.weights + memory.masters + memory.moments) + memory.gradients) / rates.copy
    for group in optimizer_of_twin.param_groups:
        if group.get("algorithm") == "muon":
            update += sum(orthogonalising(param.shape, rates, group["ns_steps"]) for param in group["params"])
    saved = dict(memory.saved or {})
    memory = replace(memory, saved=saved | {"logits and loss": saved["logits and loss"] + loss})
    name = getattr(recipe, "name", "map") if recipe else FUSED_BF16 if fuse else HIGH_PRECISION
    seconds = times.products, times.casts, times.other
    spans = tuple(times.device), tuple(times.host)
    return Estimate(name, *seconds, update, memory, tuple(layers), times.fused, *spans, loss)
