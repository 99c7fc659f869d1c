"""A product whose weight is sharded over a tensor-parallel mesh: each rank multiplies what it has, by the same casts.

    weight        input         output     gradients
    Shard(0)      Replicate     Shard(-1)  of the input Partial
    Shard(1)      Shard(-1)     Partial    of the bias whole on every rank
    Replicate     any but       as input   of weight and bias Partial where the input is sharded
                  Shard(-1)

An input that lies otherwise is redistributed, as torch's own Linear does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.autograd.gather_input import arguments_of, gather_input, why_not_gathered
from octavo.autograd.shared_scales import Parts
from octavo.nn.inputs import product_dtype
from octavo.tensor.gathered_input import GatheredInput, Wire


def is_parallel(weight: Tensor) -> bool:
    """Whether a layer's weight, as forward reads it, is a DTensor."""
    return hasattr(type(weight), "redistribute")


class _Elsewhere(torch.autograd.Function):
    """A bias that another rank of the group adds: zeros, through which the gradient passes."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def gathered_for(readers: Sequence[Any], input: Any, memo: list[Any] | None) -> GatheredInput | None:
    """The whole of an input [..., K] that is sharded by tokens, in FP8; or None where its readers can't take it so.

    ``input`` is a DTensor on the mesh of the readers' weights, Shard(d) of another dimension than the last. Their
    recipes must cast it alike; the first one's delayed state gives the scale. ``memo``: see Wire.
    """
    first, dim, mesh = readers[0], input.placements[0].dim % input.ndim, input.device_mesh
    recipe, ranks = first.recipe, mesh.size()
    x = input.to_local()
    if any(arguments_of(reader.recipe) != arguments_of(recipe) for reader in readers) or input.shape[dim] % ranks:
        return None
    if why_not_gathered(recipe, math.prod(x.shape[dim:-1])) is not None:
        return None
    x = x.to(product_dtype(input, first.weight))
    return gather_input(x, recipe, first.state_of_input(), Wire(mesh.get_group().group_name, ranks, dim, memo))


def parallel_product(module: Any, input: Any, weight: Any, bias: Any) -> Any:
    """input [..., K] . weight^T + bias [N] of DTensors, by the module's recipe: a DTensor, see the table above.

    Raises:
        ValueError: for an input that is no DTensor, or another mesh, or a weight sharded in another way.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
    (of_weight,), (of_input,), last = weight.placements, input.placements, input.ndim - 1
    whole = isinstance(of_weight, Replicate)
    if not whole and type(of_weight) is not Shard:
        raise ValueError(f"a weight with placement {of_weight}: FP8 products want Shard(0), Shard(1) or Replicate()")
    wanted: Any = of_input
    if not whole:
        wanted = Replicate() if of_weight.dim % 2 == 0 else Shard(last)
    elif isinstance(of_input, Partial) or of_input == Shard(last):
        wanted = Replicate()
    if wanted != of_input:
        input = input.redistribute(placements=[wanted])
    rowwise = not whole and wanted == Shard(last)
    tokens = whole and isinstance(wanted, Shard)
    of_output = wanted if whole else Partial() if rowwise else Shard(last)
    x = input.to_local(grad_placements=[Partial() if wanted == Replicate() and not whole else wanted])
    local = weight.to_local(grad_placements=[Partial() if tokens else of_weight])
    b = None
    if bias is not None:
        b = bias.to_local(grad_placements=[Partial() if tokens else bias.placements[0]])
        if rowwise and mesh.get_local_rank() != 0:
            b = _Elsewhere.apply(b)
    # input, weight, grad_output
    parts = Parts(mesh.get_group().group_name, (rowwise or tokens, not whole, tokens or not (whole or rowwise)))
    y = module.local_product(x, local, b, weight, parts)
    return _spread(y, (*input.shape[:-1], weight.shape[0]), mesh, of_output)


def _spread(y: Tensor, shape: Sequence[int], mesh: Any, placement: Any) -> Any:
    """The DTensor of this shape whose part is y."""
    from torch.distributed.tensor import DTensor

    whole: dict[str, Any] = {}
    if placement.is_shard() and shape[placement.dim] % mesh.size():  # else torch takes all parts to be as large
        whole = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(y, mesh, [placement], run_check=False, **whole)


def _product_of_gathered(module: Any, input: GatheredInput, weight: Any, bias: Any) -> Any:
    from torch.distributed.tensor import Shard

    if input.casts != arguments_of(module.recipe) or weight.placements != (Shard(0),):
        raise ValueError(
            f"an input that was gathered in FP8 by {input.casts} reached a layer of the recipe {module.recipe.name!r} "
            f"whose weight is sharded {weight.placements}: only layers under octavo.distributed.ColwiseParallel, of "
            "one recipe, share what PrepareModuleInput has gathered"
        )
    parts = Parts(input.wire.group, (False, True, True))
    local = None if bias is None else bias.to_local()
    y = module.local_product(input, weight.to_local(), local, weight, parts)
    return _spread(y, (*input.shape[:-1], weight.shape[0]), weight.device_mesh, Shard(input.ndim - 1))
