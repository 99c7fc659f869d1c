"""The time and memory of a training step, predicted from a model's shapes and a device's rates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.autograd.linear_cross_entropy import ROWS
from octavo.cost.parts import (
    BF16_KERNELS,
    CHUNK,
    CHUNKED_LOSS,
    COUNTED,
    FUSED_LOSS,
    LOSS,
    OCTAVO_KERNELS,
    PARTS,
    FusedPart,
    Moved,
    fused_parts,
)
from octavo.cost.rates import IN_BF16, HostTime, PlanError, Rates, form_of, host_kind
from octavo.cost.work import (
    ATTENTION_FLOP,
    NO_TRAFFIC,
    LinearWork,
    Traffic,
    Work,
    convert_quietly,
    extrapolated,
    head_of,
    on_meta,
    run_shorter,
    work_of,
)
from octavo.nn.candidates import Select
from octavo.nn.convert import convert, set_recipe
from octavo.nn.known_forwards import fused_modules
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import predicted_by_kind
from octavo.private import pytree
from octavo.recipes import as_recipe, default, high_precision
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.schedule import Phase, PhasePlan, PrecisionSchedule

FUSED_BF16 = "bf16, fused"  # the name of an estimate without a recipe and with ``fuse``
# index of a step's spans in device_seconds and host_seconds: the blocks' forward, and what comes after
FORWARD, AFTER = range(2)


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
        other_compiled: seconds of the other operations where ``torch.compile`` fuses those between two products.
        device: seconds of the device in eager PyTorch, by span: of the blocks' forward, and of what comes after.
        host: seconds of the host that launches the device's work, by the same spans.
        loss: bytes of ``memory`` that are there only before the first gradient of a weight.

    Example:
        >>> import torch, octavo
        >>> from octavo.cost import estimate, rates_of
        >>> with torch.device("meta"):
        ...     layer, x = torch.nn.Linear(8192, 8192).bfloat16(), torch.empty(8192, 8192, dtype=torch.bfloat16)
        >>> step = estimate(layer, (x,), octavo.recipes.delayed(), rates_of("H200"))
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
    other_compiled: float
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
        return self.products + self.casts + self.other_compiled + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at a time: those of the loss alone are freed before there are gradients of weights."""
        return self.memory.total - min(self.memory.gradients, self.loss)

    @property
    def slower(self) -> tuple[LayerTime, ...]:
        """Converted layers that bf16 would compute as fast or faster."""
        return tuple(layer for layer in self.layers if layer.converted >= layer.bf16)


def orthogonalising_seconds(shape: Sequence[float], rates: Rates, steps: int = 5) -> float:
    """Return seconds of the products that orthogonalise a matrix, or stacked ones, for octavo.optim.Muon."""
    matrices, (short, long) = math.prod(shape[:-2]), sorted(shape[-2:])
    large, small = (2.0 * matrices * short * short * side for side in (long, short))  # FLOP of a product
    return steps * (2 * rates.product_seconds(IN_BF16, large) + rates.product_seconds(IN_BF16, small))


class NamedParameters:
    """A model's parameters as ``model.parameters()`` yields them, for an optimizer that also asks for their names."""

    def __init__(self, model: nn.Module) -> None:
        self.by_name = dict(model.named_parameters())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.by_name.values())


class _Times:
    """Seconds of a step by kind, as in ``Estimate``: of all but linear layers, to which ``add_layers`` adds these."""

    def __init__(self, work: Work, rates: Rates, fused: Iterable[FusedPart], kernels: Mapping[str, Moved]) -> None:
        """Time all but linear layers, with the parts ``fused`` that ``kernels`` has computed by these."""
        self.work = work
        self.rates = rates
        other_products = work.other_flop - sum(work.attention.values())
        attention = rates.attention_seconds(work.attention, causal=work.logits > 0)
        attention += rates.product_seconds(IN_BF16, other_products) if other_products > 0 else 0.0
        self.other_compiled = work.traffic.compiled / rates.copy + attention
        traffic = self._traffic(fused, kernels)
        forward_share = 0.0 if work.blocks is None else ATTENTION_FLOP[0] / sum(ATTENTION_FLOP)
        self.device_seconds = [
            each.bytes / rates.copy + each.ops * rates.launch + share * attention
            for each, share in zip(traffic, (forward_share, 1 - forward_share), strict=True)
        ]
        self.other = sum(self.device_seconds)
        times = rates.host.get("operation", HostTime(0.0, 0.0))
        self.host_seconds = [traffic[FORWARD].ops * times.forward, traffic[AFTER].ops * times.backward]
        self.products = self.casts = 0.0
        self.layers: list[LayerTime] = []  # the converted ones

    def _traffic(self, fused: Iterable[FusedPart], kernels: Mapping[str, Moved]) -> list[Traffic]:
        """Return the traffic in eager of each span, where these parts are fused."""
        of_blocks = NO_TRAFFIC if self.work.blocks is None else self.work.blocks.forward_traffic
        traffic = [of_blocks, self.work.traffic.less(of_blocks)]
        for module, part, elements in (each for each in fused if each.part in kernels):
            change = Moved(*map(operator.sub, kernels[part], PARTS[part].plain))  # mostly below 0
            span = self._forward_span(module)
            traffic[span] = traffic[span].plus(Traffic(elements * change.forward, change.forward_launches, compiled=0))
            in_backward = Traffic(elements * change.backward, change.backward_launches, compiled=0)
            traffic[AFTER] = traffic[AFTER].plus(in_backward)
        return traffic

    def _forward_span(self, name: str) -> int:
        """Return the span of the forward of the module of this name, which may be outside the blocks."""
        blocks = self.work.blocks
        return FORWARD if blocks is not None and name.startswith(f"{blocks.name}.") else AFTER

    def add_layers(
        self, recipes: Mapping[str, Recipe], weight_storage: str | None, uncast_head: LinearWork | None
    ) -> None:
        """Add the linear layers of the step, without casts that are not made.

        ``recipes``: those of converted layers, by name. ``uncast_head``: the head, if the loss writes its output's
        gradient in codes.
        """
        cast_inputs = set()
        for linear in self.work.linears:
            recipe = recipes.get(linear.name, high_precision())
            cast_input = linear.input_reader, linear.grad_weight, recipe.input_casts
            is_spared = {
                "weight": weight_storage is not None,
                "input": cast_input in cast_inputs,
                "grad_output": linear is uncast_head,
            }
            if linear.input_reader:
                cast_inputs.add(cast_input)
            self._add(linear, recipe, {role for role, spared in is_spared.items() if spared})

    def _add(self, linear: LinearWork, recipe: Recipe, spared: set[str]) -> None:
        """Add a layer, but for the casts of the roles ``spared``; its LayerTime has all casts."""
        product_seconds = linear.product_seconds(recipe, self.rates)
        cast_seconds = linear.cast_seconds(recipe, self.rates)
        if not recipe.is_high_precision:
            in_bf16 = sum(linear.product_seconds(high_precision(), self.rates))
            self.layers.append(LayerTime(linear, in_bf16, sum(product_seconds) + sum(cast_seconds.values())))
        times = self.rates.host.get(host_kind(recipe), HostTime(0.0, 0.0))
        cast_seconds |= dict.fromkeys(spared, 0.0)
        self.products += sum(product_seconds)
        self.casts += sum(cast_seconds.values())
        span = self._forward_span(linear.name)
        output, *gradients = product_seconds
        self.device_seconds[span] += output + cast_seconds["input"] + cast_seconds["weight"]
        self.device_seconds[AFTER] += sum(gradients) + cast_seconds["grad_output"]
        self.host_seconds[span] += times.forward - times.cast * len(spared & {"input", "weight"})
        self.host_seconds[AFTER] += times.backward


def _converted_twin(
    model: nn.Module, work: Work, recipe: Recipe | RecipeMap | None, select: Select | None, fuse: bool, are_stored: bool
) -> tuple[nn.Module, list[FusedPart]]:
    """Return (a copy of a model without memory, converted as for ``estimate``, and the parts that are fused by that).

    Parts are read before the copy is put into bf16: octavo joins layers in FP8 alone, and not if their weights
    ``are_stored`` in FP8. Norms and residuals that ``model`` fuses already are left out, as ``work`` counted those
    fused.
    """
    twin = on_meta(model)
    if recipe is not None:
        convert_quietly(twin, recipe, select, fuse)
    elif fuse:  # the same modules are fused as in FP8
        convert_quietly(twin, default(), lambda *_: True, fuse)
    already = {module.name for module in fused_modules(model) if module.kind != "loss"}
    parts = fused_parts(twin, work, are_stored) if fuse else ()
    newly_fused = [each for each in parts if each.module not in already or each.part not in COUNTED]
    if not RecipeModule.named_in(twin):
        convert(twin, high_precision(), lambda *_: True)  # a schedule needs converted layers
    elif recipe is None:
        set_recipe(twin, high_precision())
    return twin, newly_fused


def _chunked(work: Work, recipes: Mapping[str, Recipe]) -> tuple[int, LinearWork | None]:
    """Return (peak bytes of a chunked loss, the head whose grad_output is not cast; None if its recipe still casts it).

    The loss is octavo.nn.linear_cross_entropy, which writes codes of the logits' gradient in the place of a cast, but
    where the recipe scales blocks along the contraction. Raise PlanError where the head's gradients are no products in
    FP8.
    """
    head = head_of(work)
    recipe = recipes.get(head.name) if head else None
    if head is None or recipe is None or recipe.grad_input is None or recipe.grad_weight is None:
        why = "no layer computes logits" if head is None else f"the gradients of {head.name} are no products in FP8"
        raise PlanError(f"a chunked loss: {why}; it is planned for a head in FP8, such as by dynamic_with_output_hp()")
    gradient_cast, _ = recipe.grad_input  # of the operands: the logits' gradient, and the weight
    writes_codes = form_of(gradient_cast) in ("tensor", "row")
    chunk_bytes = CHUNK + 2 * (not writes_codes)  # a gradient in bf16, that a cast reads
    chunk = min(work.logits, ROWS * head.out_features)
    input_gradient = 2 * head.sizes.input  # in bf16: forward computes it, chunk by chunk, and keeps it for backward
    return CHUNKED_LOSS * work.logits + chunk_bytes * chunk + input_gradient, head if writes_codes else None


def estimate(
    model: nn.Module,
    inputs: Sequence[Any],
    recipe: Recipe | RecipeMap | str | None,
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
        recipe: as for octavo.convert, or its name; None: nothing is converted.
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
    recipe = None if recipe is None else as_recipe(recipe)
    work = work or work_of(model, inputs)
    twin, parts = _converted_twin(model, work, recipe, select, fuse, weight_storage is not None)
    recipes = {name: module.recipe for name, module in RecipeModule.named_in(twin)}
    loss_bytes = (FUSED_LOSS if any(each.part == "loss" for each in parts) else LOSS) * work.logits
    uncast_head = None
    if chunked_loss:
        loss_bytes, uncast_head = _chunked(work, recipes)
        parts = [each for each in parts if each.part != "loss"] + [FusedPart("", "chunked loss", work.logits)]
    times = _Times(work, rates, parts, BF16_KERNELS if recipe is None else OCTAVO_KERNELS)
    times.add_layers(recipes, weight_storage, uncast_head)
    optimizer_of_twin = optimizer(NamedParameters(twin))
    phase = Phase(high_precision() if recipe is None else recipe, weight_storage=weight_storage or "same")
    memory = _memory_in(phase, twin, optimizer_of_twin, inputs, loss_bytes)
    return Estimate(
        name=(FUSED_BF16 if fuse else IN_BF16) if recipe is None else getattr(recipe, "name", "map"),
        products=times.products,
        casts=times.casts,
        other=times.other,
        optimizer=_update_seconds(memory, optimizer_of_twin, rates),
        memory=memory,
        layers=tuple(times.layers),
        other_compiled=times.other_compiled,
        device=tuple(times.device_seconds),
        host=tuple(times.host_seconds),
        loss=loss_bytes,
    )


def _memory_in(phase: Phase, twin: nn.Module, optimizer: Optimizer, inputs: Sequence[Any], loss: int) -> PhasePlan:
    """Put a model without memory, and its optimizer, into a phase; return a step's bytes, with so many of the loss."""
    plan = PrecisionSchedule(twin, optimizer, [phase]).plan().phases[0]
    meta_inputs = pytree.tree_map_only(Tensor, lambda x: x.detach().to("meta"), tuple(inputs))
    saved = run_shorter(twin, lambda shorter: predicted_by_kind(shorter, meta_inputs), extrapolated)
    return replace(plan, saved=saved | {"logits and loss": saved["logits and loss"] + loss})


def _update_seconds(memory: PhasePlan, optimizer: Optimizer, rates: Rates) -> float:
    """Return seconds of the optimizer's update, which reads and writes weights and state, and reads gradients."""
    seconds = (2 * (memory.weights + memory.masters + memory.moments) + memory.gradients) / rates.copy
    for group in optimizer.param_groups:
        if group.get("algorithm") == "muon":
            seconds += sum(orthogonalising_seconds(param.shape, rates, group["ns_steps"]) for param in group["params"])
    return seconds
