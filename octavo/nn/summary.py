"""Summary of a model: which matrices are converted, with which casts, which are not and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from octavo.nn.candidates import (
    REPLACED_SINCE,
    class_of,
    expert_weights,
    fp8_class,
    library_of_forward,
    reads_of_weights,
    shape_of,
    why_not_selected,
)
from octavo.nn.checkpointing import region_counts
from octavo.nn.convert import restore
from octavo.nn.counting import OperationCounter
from octavo.nn.experts import ExpertsPart
from octavo.nn.known_forwards import KnownForward, refusal
from octavo.nn.loss import has_loss
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.saved import MIB, predicted_by_kind
from octavo.scaling.recipe import Recipe
from octavo.weights.operands import WeightOwner, weight_of


@dataclass(frozen=True)
class ModuleSummary:
    """One module that holds a matrix.

    Attributes:
        name: its name in the model, "" for the model itself.
        kind: its class's name.
        shape: of its weight, as stored.
        recipe: what it is converted with, or None.
        reason: why it is left alone; for a converted one "", or why its product is not, or perhaps not, in FP8.
        gathered: under FSDP2 how its weight is gathered: "in FP8" (one pair, or two), "cast after" (sent in the
            parameter's dtype, or the mixed-precision policy's, and cast once an unshard) or "as it is", and why not in
            FP8; "" elsewhere.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str
    gathered: str = ""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a forward in training saves for backward besides parameters and inputs, by the kinds of nn/saved.py.

    Attributes:
        plain: bytes of the same model unconverted, whose checkpointed regions keep their inputs as they are.
        converted: bytes of the model as it is.
        reason: why one of them was not counted, and both are empty; else "".
        regions: (how many, their bytes as they are, as they are kept) of the arguments of octavo.checkpoint_in_fp8's
            regions: of those in FP8 under "", of others under why they are not.
    """

    plain: Mapping[str, int]
    converted: Mapping[str, int]
    reason: str = ""
    regions: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.reason:
            return f"what a forward saves for backward was not counted: {self.reason}"
        both = self.plain, self.converted
        plain, converted = (sum(size for kind, size in by_kind.items() if kind != "weights") for by_kind in both)
        share = f"{converted / plain:.3f} of what it does unconverted" if plain else ""
        size = f"{converted / MIB:,.2f} MiB where it saves nothing unconverted"
        lines = [f"a forward saves {share or size}, weights apart"]
        lines.append(f"  {'MiB':<16}  {'unconverted':>11}  {'as it is':>10}")
        for kind in self.converted:
            if any(sizes := [by_kind[kind] / MIB for by_kind in both]):
                lines.append(f"  {kind:<16}  {sizes[0]:>11,.2f}  {sizes[1]:>10,.2f}")
        for why, (count, plain_bytes, kept_bytes) in self.regions.items():
            state = f"left as they are: {why}" if why else f"kept in FP8, {kept_bytes / MIB:,.2f} MiB"
            lines.append(f"  {count} arguments of checkpointed regions, {plain_bytes / MIB:,.2f} MiB, {state}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Summary:
    """All of a model's matrices. ``str()`` of it is a table.

    Attributes:
        modules: one of each module that holds a matrix.
        flops: of a forward pass in training: the operations of products in FP8, and of all products; of one in
            evaluation where the model can't run without data; None where none was run.
        saved: of a forward pass: what it saves for backward; None where none was run.
        fused: the modules that ``octavo.convert(..., fuse=True)`` has fused, by name: their class.
        not_fused: those that it left as they are though they look alike, or that a library has replaced since: why.
            Both are empty where nothing was fused.
    """

    modules: tuple[ModuleSummary, ...]
    flops: tuple[int, int] | None = None
    saved: SavedBytes | None = None
    fused: Mapping[str, str] = field(default_factory=dict)
    not_fused: Mapping[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[ModuleSummary, ...]:
        """The modules that follow a recipe."""
        return tuple(m for m in self.modules if m.recipe is not None)

    @property
    def left_alone(self) -> tuple[ModuleSummary, ...]:
        """The modules that follow none."""
        return tuple(m for m in self.modules if m.recipe is None)

    def __str__(self) -> str:
        in_fp8 = [m for m in self.converted if not (m.recipe.is_high_precision or m.reason)]  # type: ignore[union-attr]
        total = sum(math.prod(m.shape) for m in self.modules) or 1
        share = 100 * sum(math.prod(m.shape) for m in in_fp8) / total
        codes = _codes_of([m.recipe for m in in_fp8])  # type: ignore[misc]
        lines = [f"{len(in_fp8)} of {len(self.modules)} matrices in {codes} ({share:.1f} % of their elements)"]
        if self.flops is not None:
            part = 100 * self.flops[0] / max(self.flops[1], 1)
            lines.append(f"{part:.1f} % of the forward pass's {self.flops[1]:.3g} FLOPs in {codes}")
        if self.saved is not None:
            lines.append(str(self.saved))
        if self.fused:
            counts = sorted(Counter(self.fused.values()).items())
            lines.append(f"fused: {', '.join(f'{count} {kind}' for kind, count in counts)}")
        first = {why: name for name, why in reversed([*self.not_fused.items()])}
        for why, count in Counter(self.not_fused.values()).items():
            lines.append(f"not fused: {count}, first {first[why]}: {why}")
        width = max((len(m.name or "(model)") for m in self.modules), default=0)
        for m in self.modules:
            state = f"left alone: {m.reason}"
            if m.recipe is not None:
                state = f"recipe {m.recipe.name}" + (f", but {m.reason}" if m.reason else "")
            state += f", gathered {m.gathered}" if m.gathered else ""
            lines.append(f"  {m.name or '(model)':<{width}}  {m.kind} {list(m.shape)}  {state}")
        recipes = {m.recipe: None for m in self.converted if m.recipe is not None}
        return "\n".join([*lines, *map(str, recipes)])

    __repr__ = __str__


def _codes_of(recipes: Sequence[Recipe]) -> str:
    """Return what to call the codes that these recipes multiply: "FP8", "4 bits", or both."""
    packed = {recipe.has_e2m1 for recipe in recipes}
    return "FP8 and 4 bits" if len(packed) == 2 else "4 bits" if packed == {True} else "FP8"


def summary(model: nn.Module, *args: Any, **kwargs: Any) -> Summary:
    """Return which of a model's matrices are converted, with which casts, and why the others are not.

    Args:
        model: any module.
        args: of one forward pass, which then runs in evaluation mode without gradients, and on a copy without data in
            training; the summary says how much of its FLOPs (products of matrices, attention, convolutions) is in FP8
            in training, or in evaluation if the copy can't run. An unconverted copy runs too: what both save for
            backward is counted by kind. Without any, none runs.
        kwargs: of the same forward pass.

    Returns:
        a Summary; print it, or read ``.converted``, ``.left_alone``, ``.flops`` and ``.saved``. It lists every module
        that holds a parameter of two or more dimensions: 3-D expert weights, embeddings and convolutions among those
        left alone.

    Example:
        >>> import torch, octavo
        >>> print(octavo.summary(torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8))))
        0 of 2 matrices in FP8 (0.0 % of their elements)
          0  Embedding [16, 8]  left alone: Embedding is not a linear layer
          1  Linear [8, 8]  left alone: 8 x 8 features; the default select converts from 512 on
    """
    flops = is_in_fp8_by_id = saved = counts_in_training = None
    if args or kwargs:
        counts_in_evaluation = forward_flops(model, args, kwargs)
        saved, counts_in_training = _count_in_training(model, args, kwargs)
        flops, in_fp8 = counts_in_training or counts_in_evaluation
        names = model.named_modules(remove_duplicate=False)  # the counter may use a shared module's last name
        is_in_fp8_by_id = {id(module): in_fp8[name] for name, module in names if name in in_fp8}
    rows = tuple(_rows(model, _Reasons(model, is_in_fp8_by_id, counts_in_training is not None)))
    return Summary(rows, flops, saved, *_fused(model))


def _rows(model: nn.Module, reasons: _Reasons) -> Iterator[ModuleSummary]:
    """Yield a row for each matrix of a model."""
    parametrization_ids: set[int] = set()  # of what computes a linear layer's weight, which counts as one matrix
    for name, module in model.named_modules():
        if id(module) in parametrization_ids or isinstance(module, ExpertsPart):  # whose matrix is another module's
            continue
        readers: Mapping[str, Any] = module.weight_readers if isinstance(module, WeightOwner) else {}
        parameters = dict(module.named_parameters(recurse=False)).items()
        # biases of experts have two dimensions too
        matrices = {key: tuple(p.shape) for key, p in parameters if p.ndim >= 2 and not key.endswith("bias")}
        if (isinstance(module, RecipeModule) or fp8_class(module) is not None) and weight_of(module) is None:
            matrices = {"weight": shape_of(module)}  # in place of weight_v or weight_orig
            if parametrize.is_parametrized(module, "weight"):
                parametrization_ids.add(id(module.parametrizations.weight))
        for key, shape in matrices.items():
            label = name if key == "weight" else f"{name}.{key}".lstrip(".")
            reader = readers.get(key, module)
            recipe = reader.recipe if isinstance(reader, RecipeModule) else None
            is_gathered = key in readers and reader.fp8.gather.parameter is not None
            gathered = str(reader.fp8.gather.way(reader)) if is_gathered else ""
            reason = reasons.reason(module, key, recipe)
            yield ModuleSummary(label, class_of(module).__name__, shape, recipe, reason, gathered)


class _Reasons:
    """Why a model's matrices are left alone, or their products are not, or perhaps not, in FP8.

    ``is_in_fp8_by_id``: by the ids of modules that computed any, whether some were in FP8; None where no forward ran.
    ``in_training``: whether one in training did.
    """

    def __init__(self, model: nn.Module, is_in_fp8_by_id: Mapping[int, bool] | None, in_training: bool) -> None:
        self.is_in_fp8_by_id, self.in_training = is_in_fp8_by_id, in_training
        self.reads_of_weights, self.parts_of_fused = reads_of_weights(model), _parts_of_fused(model)
        self.converted = [module for _, module in RecipeModule.named_in(model) if isinstance(module, nn.Linear)]

    def reason(self, module: nn.Module, key: str, recipe: Recipe | None) -> str:
        """Return ``ModuleSummary.reason`` of a module's parameter ``key``, which is converted with this recipe."""
        reads = self.reads_of_weights.get(id(module))
        if reads is not None and not reads.is_called:
            return str(reads)
        if recipe is None:
            if key in expert_weights(module):
                return "a 3-D parameter (expert weights) is not a linear layer"
            return why_not_selected(module, self.converted) or "not selected"
        if "forward" in module.__dict__:
            why = REPLACED_SINCE
        elif reads is not None:
            why = str(reads)
        elif self.in_training and id(module) not in self.parts_of_fused:
            why = "a forward in training does not call it"
        else:
            return ""
        if self.is_in_fp8_by_id is None:
            return f"{why}, or calls it: octavo.summary(model, *inputs) says which"
        is_in_fp8 = self.is_in_fp8_by_id.get(id(module))  # None: it computed no product
        return "" if is_in_fp8 or (is_in_fp8 is not None and recipe.output is None) else why


def _fused(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return ``Summary.fused`` and ``Summary.not_fused``."""
    modules = [*model.named_modules()]
    known = [(name, module) for name, module in modules if isinstance(module, KnownForward)]
    fused = {name: class_of(module).__name__ for name, module in known if module.why_bypassed() is None}
    with_loss = [(name, module) for name, module in modules if has_loss(module)]
    not_fused = {name: why for name, module in modules if (known or with_loss) and (why := refusal(module))}
    for name, module in with_loss:
        label = f"{name}.loss_function".lstrip(".")
        if library := library_of_forward(module):
            not_fused[label] = f"the model's forward is {library}'s, which may compute the loss itself"
        else:
            fused[label] = "causal_lm_loss"
    return fused, not_fused


def _count_in_training(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[SavedBytes, _ForwardCounts | None]:
    """Return (bytes saved as the model is and unconverted, ``forward_flops`` in training or None if it can't run)."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    counter = FlopCounterMode(display=False, custom_mapping=OperationCounter.formulas())
    try:
        with region_counts(in_fp8=False):
            plain = predicted_by_kind(model, args, kwargs, restore)
        with region_counts() as regions:
            converted = predicted_by_kind(model, args, kwargs, watching=counter)
    except Exception as error:  # of a model's own forward, which may ask tensors for their values
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return SavedBytes({}, {}, why), None
    return SavedBytes(plain, converted, regions=regions), _counts_of(counter)


def _parts_of_fused(model: nn.Module) -> set[int]:
    """Return the ids of modules whose products a fused parent may compute without calling them."""
    known = [m for m in model.modules() if isinstance(m, KnownForward) and m.why_bypassed() is None]
    ours = [m for m in model.modules() if class_of(m).__module__.startswith("octavo.")]
    return {id(child) for parent in (*known, *ours) for child in parent.children()}


# How many floating-point operations of a forward pass are in FP8, counted by torch's FlopCounterMode.

_FP8 = torch.ops.octavo.matmul, torch.ops.octavo.grouped_matmul


class _ForwardCounts(NamedTuple):
    """The operations of products in FP8, and of all products; of each module that computed any, whether in FP8."""

    flops: tuple[int, int]
    # {name of a module: whether some were}; torch counts a fused module's products under its own name, not under those
    # of its parts, which have the rows
    in_fp8: dict[str, bool]


def forward_flops(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _ForwardCounts:
    """Return the floating-point operations of a forward in evaluation, without gradients."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    modes = {module: module.training for module in model.modules()}
    counter = FlopCounterMode(display=False, custom_mapping=OperationCounter.formulas())
    try:
        with counter, torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for module, is_training in modes.items():
            module.training = is_training
    return _counts_of(counter)


def _counts_of(counter: Any) -> _ForwardCounts:
    """Return the result of ``forward_flops`` from the counts of a FlopCounterMode."""
    counts = counter.get_flop_counts()
    total = counts.pop("Global", {})
    # names stand after the model's class
    in_fp8 = {name.partition(".")[2]: any(op in by_op for op in _FP8) for name, by_op in counts.items()}
    return _ForwardCounts((sum(total.get(op, 0) for op in _FP8), sum(total.values())), in_fp8)
