"""A product whose weight is sharded over a tensor-parallel mesh: each rank multiplies its part, by the same casts.

    weight        input         output     gradients
    Shard(0)      Replicate     Shard(-1)  of the input Partial
    Shard(1)      Shard(-1)     Partial    of the bias whole on every rank
    Replicate     any but       as input   of weight and bias Partial where the input is sharded
                  Shard(-1)

An input that lies otherwise is redistributed, as torch's own Linear does.

In a fused module the norm's weight is Replicate, the first layer's Shard(0) and the second's Shard(1); its input is
Replicate, or Shard of tokens that are gathered in FP8. In any other layout its parts run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.autograd.gather_input import (
    GatheredInput,
    GatherReader,
    can_gather,
    gather_input,
    input_cast_arguments,
    scatter_output,
)
from octavo.autograd.observer import Observer
from octavo.autograd.products import NeededGradients, requires_grad
from octavo.autograd.rows import DENSE, Parts, Rows, Wire
from octavo.autograd.shared_casts import InputCasts, casts_to_share
from octavo.nn.inputs import product_dtype
from octavo.private import is_dtensor
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, Recipe


class Sending(NamedTuple):
    """The settings by which a layer's tokens are sent; sums are made by ``reduce``.

    ``exact``: tokens of a role that the recipe scales in two ways are sent in their dtype.
    ``output``: where RowwiseParallel puts sums.
    """

    exact: bool
    reduce: Callable[[Tensor, str], Tensor] | None
    output: Any = None

    def wire(self, mesh: Any, x: Tensor, dim: int) -> Wire:
        """Return the Wire of x's tokens along a dimension, over a mesh."""
        return Wire(mesh.get_group().group_name, mesh.size(), math.prod(x.shape[:dim]), self.reduce)


STYLE = "_octavo_style"  # on a module: its Style


@dataclass(frozen=True)
class Style:
    """The work of a style of octavo.distributed around a module; a fused module does it in its part's place."""

    hooks: int  # the number of the style's hooks; by their ids each block would be compiled separately
    input: Any  # the placement of a plain input
    output: Any  # the placement that the output is brought to, or None: as it is
    finish: Callable[[Any, Any, Any], Any]  # (module, output DTensor, mesh) -> what the style returns
    sending: Sending | None = None  # for a layer whose tokens octavo sends
    reads_gathered: bool = False  # whether an input that was gathered in FP8 has reached it


def hooks_on(module: nn.Module) -> int:
    """Return how many hooks of forward and backward a module has."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return sum([len(getattr(module, kind)) for kind in kinds])


def style_of(module: object) -> Style | None:
    """Return the style of octavo.distributed that a module is under, or None."""
    return module.__dict__.get(STYLE)


def sending_of(module: object) -> Sending | None:
    """Return the settings by which a layer's tokens are sent, from the style of octavo.distributed over it; or None."""
    style = style_of(module)
    return None if style is None else style.sending


# this rank's weight [N, K] and bias [N], and the parameter, a leaf of autograd's graph, that the weight is a view of
LayerTensors = tuple[Tensor, Tensor | None, Tensor]


class ShardedLayer(Protocol):
    """A layer that multiplies its part of a weight: a RecipeModule, which imports this file."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of its products."""

    @property
    def observing(self) -> Observer | None:
        """The observer of a forward that runs now; None in evaluation."""

    def state_of_input(self) -> State | None:
        """Return the delayed state that a cast of the next input reads."""

    def local_product(self, input: Any, tensors: LayerTensors, x_casts: InputCasts | None, rows: Rows) -> Tensor:
        """Return the product of this rank's parts."""


class FusedParts(NamedTuple):
    """This rank's shards of a fused module's input and parameters (all of them without a mesh)."""

    input: Tensor  # [..., K]
    linears: Sequence[LayerTensors]
    norm: tuple[Tensor | None, Tensor | None] = (None, None)  # gamma and beta [K]
    mesh: Any = None
    shape: Sequence[int] | None = None  # of the whole input, if there is a mesh
    rows: Sequence[Rows] = (DENSE, DENSE)  # of each layer; the first one's wire gathers the input


def _can_run_as_one(styles: Sequence[Style | None], norm: Any, weights: Sequence[Any], input: Any) -> bool:
    """Whether a norm and linear layers under tensor parallelism run as one, and not one by one.

    ``styles``: the norm's, then the layers'.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = getattr(weights[0], "device_mesh", None)
    last = input.ndim - 1
    norm_style, first, *later = styles
    if mesh is None or mesh.ndim != 1 or first is None or None in later:
        return False  # octavo.distributed's styles are not over all linear layers, on one mesh of one dimension
    if (norm_style is None) == is_dtensor(norm.weight):
        return False  # only one of the norm and its weight is parallel
    for weight, expected in zip(weights, (Shard(0), Shard(1)), strict=False):
        if not is_dtensor(weight) or weight.placements != (expected,) or weight.device_mesh != mesh:
            return False  # the first weight is not cut by rows, or the second by columns
    if later and not (_is_shard(first.output, last, last) and _is_shard(later[0].input, last, last)):  # type: ignore[union-attr]
        return False  # the activation is not cut by features
    placement = first.input if norm_style is None else norm_style.input
    tokens_are_cut = any(_is_shard(placement, dim, last) for dim in range(last))
    if first.input != placement or not (tokens_are_cut or placement == Replicate()):
        return False  # the norm and the first layer don't both take tokens that are cut, or whole ones
    if not isinstance(input, DTensor):
        return True
    if norm_style is None or input.placements != (placement,) or input.device_mesh != mesh:
        return False  # the norm's style does not take such an input
    return not (tokens_are_cut and input.shape[placement.dim] % mesh.size())  # else ranks have unequal tokens


def fused_parts(norm: Any, linears: Sequence[Any], weights: Sequence[Any], input: Any) -> FusedParts | None:
    """Return this rank's tensors for a norm and one or two linear layers that run as one.

    None if the parts run one by one: see _can_run_as_one; or tokens are cut that can't be gathered in FP8.
    """
    biases = [linear.bias for linear in linears]
    if not any(map(is_dtensor, weights)):
        return FusedParts(input, [*zip(weights, biases, weights, strict=True)], (norm.weight, norm.bias))
    from torch.distributed.tensor import Partial

    styles = [style_of(part) for part in (norm, *linears)]
    if not _can_run_as_one(styles, norm, weights, input):
        return None
    assert styles[1] is not None
    mesh, placement, sending = weights[0].device_mesh, styles[1].input, styles[1].sending
    group = mesh.get_group().group_name
    x = input.to_local(grad_placements=[placement]) if is_dtensor(input) else input
    shape = [*x.shape]
    norm_grad = Partial() if placement.is_shard() else placement
    wire = None
    if placement.is_shard():
        assert sending is not None
        dim = placement.dim % x.ndim
        reader = GatherReader(linears[0].recipe, None, torch.is_grad_enabled() and weights[0].requires_grad)
        if not can_gather(reader, INPUT, sending.exact):
            return None
        # counting casts needs tokens in memory; sums in FP8 end a graph
        if _is_counted(linears[0]) or (sending.reduce is not None and torch.compiler.is_compiling()):
            return None
        wire = sending.wire(mesh, x, dim)
        shape[dim] *= mesh.size()
    gamma, beta = (
        parameter.to_local(grad_placements=[norm_grad]) if is_dtensor(parameter) else parameter
        for parameter in (norm.weight, norm.bias)
    )
    local_linears: list[LayerTensors] = []
    for weight, bias in zip(weights, biases, strict=True):
        local = weight.to_local(grad_placements=weight.placements)
        local_linears.append((local, _local_bias(bias, weight.placements[0].dim == 1, mesh), weight))
    rank = mesh.get_local_rank()
    first_parts, second_parts = (Parts(group, roles, rank=rank) for roles in (_COLUMNWISE_ROLES, _ROWWISE_ROLES))
    rows = Rows(None, first_parts, wire), Rows(None, second_parts)
    return FusedParts(x, local_linears, (gamma, beta), mesh, shape, rows)


def as_styles_return(parts: FusedParts, norm: Any, last: Any, y: Any, normed: Tensor | None) -> tuple[Any, Any]:
    """Return (a fused module's output, its norm's), as the styles of its parts return them.

    ``y`` and ``normed`` are this rank's results, of the ``last`` layer and of the norm.
    """
    mesh = parts.mesh
    if mesh is None or parts.shape is None:
        return y, normed
    from torch.distributed.tensor import Partial, Shard

    norm_style, last_style = style_of(norm), style_of(last)
    assert last_style is not None
    if len(parts.linears) == 2:
        needs_dx = any(map(requires_grad, (parts.input, *parts.norm, *parts.linears[0])))
        needs_dw, needs_db, _ = map(requires_grad, parts.linears[1])
        if (output := _scatter_sum(last, y, (needs_dx, needs_dw, needs_db), mesh)) is not None:
            return last_style.finish(last, output, mesh), None
    shape = [*parts.shape[:-1], last.out_features]
    output = as_dtensor(y, shape, mesh, Shard(len(shape) - 1) if len(parts.linears) == 1 else Partial())
    if normed is not None and norm_style is not None:
        normed = norm_style.finish(norm, as_dtensor(normed, parts.shape, mesh, norm_style.input), mesh)
    return last_style.finish(last, output, mesh), normed


def _is_counted(module: ShardedLayer) -> bool:
    """Whether octavo.inspect counts the casts of a layer's forward that runs now."""
    observer = module.observing
    return observer is not None and observer.counts is not None


def _is_shard(placement: Any, dim: int, last: int) -> bool:
    """Whether a placement shards dimension ``dim`` of a tensor of ``last + 1``; its own may count from the end."""
    return placement.is_shard() and placement.dim % (last + 1) == dim


def _local_bias(bias: Any, rowwise: bool, mesh: Any, grad_placement: Any = None) -> Tensor | None:
    """Return this rank's part of a bias; if ranks' outputs are addends of a sum, zeros but on the first rank."""
    if bias is None:
        return None
    local: Tensor = bias.to_local(grad_placements=[grad_placement or bias.placements[0]])
    # zeros through which the bias's gradient flows
    return local - local.detach() if rowwise and mesh.get_local_rank() != 0 else local


def gathered_for(readers: Sequence[Any], input: Any, sending: Sending) -> GatheredInput | None:
    """Return an input [..., K] that is sharded by tokens, gathered in FP8; or None if its readers can't take it so.

    ``input`` is a DTensor on the mesh of the readers' weights, Shard(d) of another dimension than the last. The
    readers' recipes must cast it alike. Layers that have read such an input before decide the delayed scale; if none
    has (in a first forward, and in compiled ones), it is the scale that all readers have in common, else the input's
    own.
    """
    mesh = input.device_mesh
    dim = input.placements[0].dim % input.ndim
    earlier_readers = [reader for reader in readers if getattr(style_of(reader), "reads_gathered", False)]
    deciding_readers = earlier_readers or readers
    first = deciding_readers[0]
    arguments = input_cast_arguments(first.recipe)
    if any(input_cast_arguments(reader.recipe) != arguments for reader in readers) or input.shape[dim] % mesh.size():
        return None
    trains = torch.is_grad_enabled() and any(p.requires_grad for reader in readers for p in reader.parameters())
    observers = tuple((reader.recipe, reader.observing) for reader in deciding_readers if reader.observing is not None)
    state = first.state_of_input() if earlier_readers else _state_of_all(readers)
    gather_reader = GatherReader(first.recipe, state, trains, observers)
    if not can_gather(gather_reader, INPUT, sending.exact):
        return None
    x = input.to_local()
    return gather_input(x.to(product_dtype(input, first.weight)), dim, gather_reader, sending.wire(mesh, x, dim))


def _state_of_all(readers: Sequence[Any]) -> State | None:
    """Return the first layer's delayed state, with scale 0 where the layers' scales differ; or None."""
    states = [reader.state_of_input() for reader in readers]
    if len(states) == 1 or states[0] is None:
        return states[0]
    scales = torch.stack([state.scale for state in states])
    return states[0]._replace(scale=torch.where((scales == scales[0]).all(0), scales[0], 0.0))


def _scatter_sum(module: ShardedLayer, y: Tensor, needs: NeededGradients, mesh: Any) -> Any:
    """Return the sum over ranks of their outputs y [..., N], a DTensor whose gradient is gathered in FP8.

    None if torch has to compute the sum. A gradient that octavo.inspect counts is gathered in its dtype.
    """
    from torch.distributed.tensor import DTensor, Shard

    if (sending := sending_of(module)) is None or not isinstance(sending.output, Shard):
        return None
    dim, (needs_dx, needs_dw, needs_db) = sending.output.dim % y.ndim, needs
    if dim == y.ndim - 1 or y.shape[dim] % mesh.size():
        return None
    reader = GatherReader(module.recipe, module.state_of_input(), needs_dw)
    # a compiled graph takes no facade for a gradient
    fits = needs_dx and not _is_counted(module) and not torch.compiler.is_compiling()
    fits = fits and can_gather(reader, GRAD_OUTPUT, sending.exact)
    if not fits and sending.reduce is None:
        return None
    part_of_sum = scatter_output(y, dim, reader if fits else None, sending.wire(mesh, y, dim), needs_db)
    return DTensor.from_local(part_of_sum, mesh, [sending.output], run_check=False)


def parallel_product(module: ShardedLayer, input: Any, weight: Any, bias: Any) -> Any:
    """Return input [..., K] . weight^T + bias [N] of DTensors by the module's recipe, a DTensor; see the table."""
    from torch.distributed.tensor import DTensor

    mesh = weight.device_mesh
    if isinstance(input, GatheredInput):
        return _product_of_gathered(module, input, weight, bias)
    if not isinstance(input, DTensor):
        raise ValueError(
            f"the weight is sharded {weight.placements} over {mesh}, but the input is a plain tensor: give it through "
            "ColwiseParallel, RowwiseParallel or PrepareModuleInput of parallelize_module, or as a DTensor"
        )
    if mesh.ndim != 1 or input.device_mesh != mesh:
        raise ValueError(
            f"the weight lies on {mesh} and the input on {input.device_mesh}: FP8 products want one mesh of one "
            "dimension; shard over others by fully_shard"
        )
    (weight_placement,), (input_placement,) = weight.placements, input.placements
    places = _placements(weight_placement, input_placement, input.ndim - 1)
    rowwise = _is_shard(weight_placement, 1, 1)
    if places.input != input_placement:
        input = input.redistribute(placements=[places.input])
    x = input.to_local(grad_placements=[places.input_grad])
    local_weight = weight.to_local(grad_placements=[places.weight_grad])
    bias_grad = None if places.weight_grad == weight_placement else places.weight_grad
    local_bias = _local_bias(bias, rowwise, mesh, bias_grad)
    # ranks that share scales cast together, and then layers share no casts
    x_casts = None if places.roles[INPUT] else casts_to_share(x, module, is_view=True)
    parts = Parts(mesh.get_group().group_name, places.roles, rank=mesh.get_local_rank())
    y = module.local_product(x, (local_weight, local_bias, weight), x_casts, Rows(parts=parts))
    needs = requires_grad(x), requires_grad(local_weight), requires_grad(local_bias)
    if rowwise and (output := _scatter_sum(module, y, needs, mesh)) is not None:
        return output
    return as_dtensor(y, (*input.shape[:-1], weight.shape[0]), mesh, places.output)


class _Placements(NamedTuple):
    """The placements of a product's tensors, and which of input, weight and grad_output ranks have in parts."""

    input: Any
    input_grad: Any
    weight_grad: Any
    output: Any
    roles: tuple[bool, bool, bool]


_COLUMNWISE_ROLES, _ROWWISE_ROLES = (False, True, True), (True, True, False)


def _placements(weight: Any, input: Any, last: int) -> _Placements:
    """Return the row of the file's table for the placements of a weight and an input, whose last dimension is K."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    columns = Shard(last)
    if isinstance(weight, Replicate):
        rows = Replicate() if isinstance(input, Partial) or input == columns else input
        is_cut = isinstance(rows, Shard)
        return _Placements(rows, rows, Partial() if is_cut else weight, rows, (is_cut, False, is_cut))
    if _is_shard(weight, 1, 1):
        return _Placements(columns, columns, weight, Partial(), _ROWWISE_ROLES)
    if _is_shard(weight, 0, 1):
        return _Placements(Replicate(), Partial(), weight, columns, _COLUMNWISE_ROLES)
    raise ValueError(f"a weight with placement {weight}: FP8 products want Shard(0), Shard(1) or Replicate()")


def as_dtensor(y: Tensor, shape: Sequence[int], mesh: Any, placement: Any) -> Any:
    """Return the DTensor of this shape whose part on this rank is y."""
    from torch.distributed.tensor import DTensor

    sizes: dict[str, Any] = {}
    if placement.is_shard() and shape[placement.dim] % mesh.size():  # torch would assume parts of equal size
        sizes = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(y, mesh, [placement], run_check=False, **sizes)


def _product_of_gathered(module: ShardedLayer, input: GatheredInput, weight: Any, bias: Any) -> Any:
    """Return the product of an input that was gathered in FP8 and a weight that is Shard(0), a DTensor."""
    from torch.distributed.tensor import Shard

    if input.casts != input_cast_arguments(module.recipe) or weight.placements != (Shard(0),):
        raise ValueError(
            f"an input that was gathered in FP8 by {input.casts} reached a layer of the recipe {module.recipe.name!r} "
            f"whose weight is sharded {weight.placements}: only layers under octavo.distributed.ColwiseParallel, of "
            "one recipe, share what PrepareModuleInput has gathered"
        )
    style = style_of(module)
    if not torch.compiler.is_compiling() and style is not None and not style.reads_gathered:
        module.__dict__[STYLE] = replace(style, reads_gathered=True)
    parts = Parts(input.wire.group, _COLUMNWISE_ROLES, rank=weight.device_mesh.get_local_rank())
    local_bias = None if bias is None else bias.to_local()
    y = module.local_product(input, (weight.to_local(), local_bias, weight), None, Rows(parts=parts))
    return as_dtensor(y, (*input.shape[:-1], weight.shape[0]), weight.device_mesh, Shard(input.ndim - 1))
