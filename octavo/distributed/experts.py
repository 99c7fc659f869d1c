"""Expert parallelism: each rank of a mesh has some of the experts, and computes all ranks' tokens for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.casts import cast_to_send
from octavo.autograd.exchange import Exchange, RowsToSend, combine, dispatch
from octavo.autograd.gather_input import GatherReader
from octavo.nn.experts import ConvertedExperts, Experts, TransformersExperts
from octavo.nn.inputs import product_dtype
from octavo.nn.linear import Grouped
from octavo.private import is_dtensor
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT
from octavo.weights.gathered import check_layers_agree
from octavo.weights.stored import StoredWeight


def expert_parallel(model: nn.Module, mesh: Any, exact: bool = False, average: bool = True) -> nn.Module:
    """Shard the experts of every octavo.nn.Experts, and converted experts, over the ranks of a mesh, in place.

    Each rank has tokens of its own. A forward sends rows to the ranks that have their experts, as the pairs that the
    recipe's products read (about half of bf16's bytes), and brings the results back; backward does the reverse. What
    each recipe sends is in docs/mixture-of-experts.md. All ranks run the same forwards and backwards, and each forward
    reads the sizes of messages on the host.

    Parameters become DTensors, Shard(0) over the mesh; each rank keeps its shard of its own values (or codes, if they
    live in FP8), so that all ranks must begin with the same ones. Make optimizers, and apply fully_shard over another
    dimension of the mesh, afterwards. Gradients are averaged over the mesh, as fully_shard and DistributedDataParallel
    average those of other parameters.

    Args:
        model: octavo.nn.Experts, experts that octavo.convert has converted, or a module with such experts.
        mesh: a DeviceMesh of one dimension, over whose ranks the experts are sharded.
        exact: send rows in high precision where the recipe scales them in two ways ("rowwise", "blockwise", "mx"), so
            that grad_weight reads what it would on one rank, and not rows that were rounded before.
        average: False if the mesh is one of tensor parallelism, whose ranks share each sequence and its loss: gradients
            are then summed over it, as those of norms are.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``model`` is no module, or ``mesh`` no DeviceMesh.
        ValueError: if it has no such experts, or they can't be divided so, with the reason; nothing is changed then.

    Example:
        >>> import os, torch, octavo
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> experts = octavo.nn.Experts(4, 64, 96)
        >>> _ = octavo.distributed.expert_parallel(experts, dist.init_device_mesh("cpu", (1,)))
        >>> experts.gate_up.weight.placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh):
        raise TypeError(f"a torch.nn.Module and a DeviceMesh, not {type(model).__name__} and {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{mesh} has {mesh.ndim} dimensions: give the one of experts, such as mesh['ep']")
    named_layers = [(name, layer) for name, m in model.named_modules() for layer in _exchanging_layers(m, name)]
    if not named_layers:
        raise ValueError("the model holds no octavo.nn.Experts; octavo.convert(model, recipe) converts those it knows")
    for name, layer in named_layers:
        if reason := _why_not_shardable(layer, mesh):
            raise ValueError(f"{name or 'the model'}: {reason}")
    exchange = Exchange(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), exact, average)
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # modules may share a parameter
    for _, layer in named_layers:
        owner = layer.weight_owner
        for key, parameter in list(owner._parameters.items()):
            if parameter is not None and not is_dtensor(parameter):
                if parameter not in sharded:
                    shard = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                    sharded[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                owner._parameters[key] = sharded[parameter]
        layer.exchange, layer.feed_forward_on_ranks = exchange, _feed_forward_on_ranks
        layer.fp8.kept_operands = None
    return model


@torch.compiler.disable  # the sizes of messages are read on the host
def _feed_forward_on_ranks(
    rows: Tensor, offsets: Tensor, gate_up: Grouped, down: Grouped, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Compute octavo.nn.experts.feed_forward, each row on the rank that has its expert."""
    assert gate_up.exchange is not None
    check_layers_agree([gate_up, down], gate_up.own_parameters()[0].device_mesh)
    rows = rows.to(product_dtype(rows, gate_up.layer_tensors()[0]))
    up_trains, up_bias_trains = gate_up.trains
    down_trains, down_bias_trains = down.trains
    exact = gate_up.exchange.exact
    cast = cast_to_send(gate_up.recipe.input_casts, True, up_trains, exact)
    needs_dx = rows.requires_grad or up_trains or up_bias_trains
    dy_cast = None if down_bias_trains else cast_to_send(down.recipe.grad_output_casts, needs_dx, down_trains, exact)
    rows_to_send = RowsToSend(cast, INPUT, _reader(gate_up, rows.device, up_trains))
    x, journey = dispatch(rows, offsets, gate_up.exchange, rows_to_send)
    y = compute(x, journey.routing.offsets)
    return combine(y, journey, RowsToSend(dy_cast, GRAD_OUTPUT, _reader(down, rows.device, down_trains)))


def _reader(layer: Grouped, device: torch.device, needs_dw: bool) -> GatherReader:
    observers = () if layer.observing is None else ((layer.recipe, layer.observing),)
    return GatherReader(layer.recipe, layer.fp8.state_on(device), needs_dw, observers)


def _exchanging_layers(module: nn.Module, name: str) -> list[Grouped]:
    """Return the linear layers of a module of experts that can exchange rows; none for another module."""
    if isinstance(module, ConvertedExperts) and not isinstance(module, TransformersExperts):
        raise ValueError(f"{name or 'the model'}: torchtitan exchanges the rows of its experts itself")
    if isinstance(module, TransformersExperts) and getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"{name or 'the model'}: transformers' own expert parallelism is on; leave one of the two out")
    return [module.gate_up, module.down] if isinstance(module, Experts | TransformersExperts) else []


def _why_not_shardable(layer: Grouped, mesh: Any) -> str:
    """Return why the experts can't be sharded over the mesh; "" if they can."""
    weight, _ = layer.own_parameters()
    if layer.exchange is not None:
        return "its experts are on several ranks already"
    if type(weight) is not nn.Parameter and not isinstance(weight, StoredWeight):
        return f"its weight is a {type(weight).__name__}: call expert_parallel before fully_shard"
    if weight.shape[0] % mesh.size():
        return f"{weight.shape[0]} experts on {mesh.size()} ranks: each rank needs as many"
    return ""
