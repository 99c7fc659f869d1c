"""torch's styles of tensor and sequence parallelism, with gathers of inputs in FP8.

    ColwiseParallel       gathers an input that is sharded by tokens, as codes and scales
    PrepareModuleInput    gathers it once for all layers of a module that read it (query, key and value)
    RowwiseParallel       gathers the gradient of an output that is scattered by tokens, as codes and scales
    SequenceParallel      is torch's

A fused module whose parts they shard stays fused.

``torch.distributed.tensor.parallel.parallelize_module`` takes them, with torch's arguments. What a recipe sends is in
docs/tensor-parallel.md; an input that can't be sent as pairs is gathered as torch's styles do.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

from octavo.autograd.gather_input import GatheredInput
from octavo.distributed.fp8_reduce import Fp8Reduction
from octavo.nn.linear import Linear, SeparateSplits, separate
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.tensor_parallel import STYLE, Sending, Style, gathered_for, hooks_on, sending_of
from octavo.private import resolve_process_group
from octavo.weights.gathered import check_layers_agree
from octavo.weights.storable import why_not_shardable
from octavo.weights.stored import StoredWeight

_SHARDED = "_octavo_sharded"  # attribute of a parameter: its placement and the sharded one, for modules that share it


def _sum_in_fp8(reduction: Fp8Reduction, terms: Tensor, group: str) -> Tensor:
    """Return this rank's shard, by dimension 0, of the sum of ``terms`` over the ranks of a process group."""
    process_group: Any = resolve_process_group(group)
    shard = terms.new_empty(terms.shape[0] // dist.get_world_size(process_group), *terms.shape[1:])
    reduction(shard.view(-1), terms.view(-1), process_group, dist.ReduceOp.SUM)
    return shard


def _sending_by(exact: bool, reduction: Fp8Reduction | None, layouts: Any, name: str, output: Any = None) -> Sending:
    """Return a style's Sending; ``layouts``: the placements in its argument ``name``; ``output``: see Sending."""
    if reduction is None:
        return Sending(exact, None, output)
    if reduction.stochastic and output is not None:
        raise ValueError("activation checkpointing computes outputs again: give a reduction that rounds to nearest")
    if not any(isinstance(layout, Shard) for layout in layouts or ()):
        raise ValueError(f"a reduction makes sums that are scattered by tokens, but {name}={layouts}: give Shard(d)")
    return Sending(exact, functools.partial(_sum_in_fp8, reduction), output)


def _gather_in_fp8(readers: list[RecipeModule], x: Any, mesh: Any, sending: Sending) -> GatheredInput | None:
    """Gather a DTensor for these layers in FP8; None if it is not sharded by tokens, or they can't take it so."""
    if not readers:
        return None
    if x.device_mesh != mesh:
        raise ValueError(f"the layers lie on {mesh} and their input on {x.device_mesh}: give a DTensor on the former")
    check_layers_agree(readers, mesh, exact=sending.exact)
    (placement,), last = x.placements, x.ndim - 1
    if not isinstance(placement, Shard) or placement.dim % x.ndim == last:
        return None
    gather = _gather_outside_graphs if torch.compiler.is_compiling() and sending.reduce is not None else gathered_for
    return gather(readers, x, sending)


# compiled graphs leave out sums in FP8
_gather_outside_graphs = torch.compiler.disable(gathered_for)


def _place_output(layouts: Any, use_local_output: bool, module: nn.Module, output: Any, mesh: Any) -> Any:
    """Place a module's output, a DTensor, as torch's styles do."""
    if output.placements != layouts:
        # it waits, unlike torch's styles: a compiled graph of torch 2.13 gives no gradient to an input that is still on
        # its way (pytorch#191113), such as an embedding's output, and is compiled for that tensor class alone
        output = output.redistribute(placements=layouts)
    return output.to_local() if use_local_output else output


class _NotedStyle:
    """A style that notes its work before and after a module on the module, so that a fused module can do it instead."""

    _sending: Sending | None = None

    def _style(self: Any, hooks: int) -> Style:
        """Return the Style to note on a module on which this style has put so many hooks."""
        finish = functools.partial(self._prepare_output_fn, self.output_layouts, self.use_local_output)
        return Style(hooks, self.input_layouts[0], self.output_layouts[0], finish, self._sending)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        hooks_before = hooks_on(module)
        super()._apply(module, device_mesh)  # type: ignore[misc]
        module.__dict__[STYLE] = self._style(hooks_on(module) - hooks_before)
        return module


class _ShardingStyle(_NotedStyle):
    """A style that shards a Linear's (weight, bias) as ``_linear`` says, an Embedding's weight as ``_embedding``."""

    _linear: tuple[Shard, Shard | Replicate]
    _embedding: Shard
    _prepare_output_fn = staticmethod(_place_output)

    def _shard_parameters(self: Any, name: str, module: nn.Module, device_mesh: Any) -> None:
        """Shard a module's own parameters; one that is tied to another module's stays tied."""
        placements: tuple[Any, Any] = (self._embedding, None) if isinstance(module, nn.Embedding) else self._linear
        for name, param in list(module.named_parameters(recurse=False)):
            placement = placements[name == "bias"]
            if isinstance(param, StoredWeight):
                if why := why_not_shardable(param.shape, param.granularity, device_mesh.size(), placement.dim):
                    raise ValueError(why)
            earlier_placement, sharded = param.__dict__.get(_SHARDED, (None, None))
            if sharded is None:
                local = distribute_tensor(param, device_mesh, [placement], src_data_rank=self.src_data_rank)
                sharded = nn.Parameter(local, requires_grad=param.requires_grad)
                param.__dict__[_SHARDED] = placement, sharded
            elif earlier_placement != placement:
                raise ValueError(
                    f"a parameter of {type(module).__name__} is tied to another module's, which is sharded "
                    f"{earlier_placement}, and {type(self).__name__} would shard it {placement}: an embedding by "
                    "RowwiseParallel and a Linear by ColwiseParallel are sharded alike, by rows"
                )
            module.register_parameter(name, sharded)

    _partition_linear_fn = _partition_embedding_fn = _shard_parameters


class SequenceParallel(_NotedStyle, torch_parallel.SequenceParallel):
    """torch's SequenceParallel, for norms and dropout, which read only this rank's tokens.

    In a fused module whose layers are under octavo's styles, the norm is still fused with the cast.

    Args:
        sequence_dim: the dimension of tokens.
        use_local_output: whether the output is a plain tensor.

    Example:
        >>> SequenceParallel(sequence_dim=0).sequence_sharding
        (Shard(dim=0),)
    """

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        trains_by_name = {key: param.requires_grad for key, param in module.named_parameters(recurse=False)}
        super()._replicate_module_fn(name, module, device_mesh)
        for key, trains in trains_by_name.items():  # torch's style would train frozen parameters
            module.get_parameter(key).requires_grad_(trains)

    def _style(self, hooks: int) -> Style:
        finish = functools.partial(self._prepare_output_fn, self.use_local_output)
        return Style(hooks, self.sequence_sharding[0], None, finish)


class RowwiseParallel(_ShardingStyle, torch_parallel.RowwiseParallel):
    """torch's RowwiseParallel, but where the output is scattered, the gradient of octavo's layers is gathered in FP8.

    Parameters that modules share stay shared.

    Args:
        exact: gather a gradient in its own dtype where the recipe scales it in two ways ("rowwise", "blockwise", "mx"),
            so that grad_weight reads what it would on one rank, and not what was rounded before.
        reduction: an octavo.distributed.Fp8Reduction: sums of outputs are sent in FP8 too, and rounded once.
        layouts: torch's input_layouts, Shard(-1) by default; output_layouts, Replicate() by default, or Shard(d), with
            d a dimension of tokens, which scatters the sum; use_local_output, whether the output is a plain tensor.

    Raises:
        ValueError: for a reduction if outputs are not scattered, or if it rounds stochastically. In
            parallelize_module, for a tied parameter that would be sharded in two ways, or a weight in FP8 whose blocks
            of 128 x 128 would be cut.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> RowwiseParallel(output_layouts=Shard(1)).output_layouts
        (Shard(dim=1),)
    """

    _linear = Shard(1), Replicate()
    _embedding = Shard(0)

    def __init__(self, *, exact: bool = False, reduction: Fp8Reduction | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self._sending = _sending_by(exact, reduction, self.output_layouts, "output_layouts", self.output_layouts[0])


class ColwiseParallel(_ShardingStyle, torch_parallel.ColwiseParallel):
    """torch's ColwiseParallel, but an input of octavo's layers that is sharded by tokens is gathered in FP8.

    If an octavo.nn.Linear has named splits, each split becomes a Linear of its own (octavo.nn.separate_splits), with
    ``<split>.weight`` and ``<split>.bias``. They share the gather and the cast of their input; their outputs are a
    tuple as before.

    Args:
        exact: gather an input in its own dtype where the recipe scales it in two ways ("rowwise", "blockwise", "mx"),
            so that grad_weight reads what it would on one rank, and not what was rounded before.
        reduction: an octavo.distributed.Fp8Reduction: if an input is gathered in FP8, the sum of its gradients is sent
            in FP8 too, and rounded once.
        layouts: torch's input_layouts, Replicate() by default, or Shard(d), with d a dimension of tokens, which is
            gathered; output_layouts, Shard(-1) by default; use_local_output, whether the output is a plain tensor.

    Raises:
        ValueError: for a reduction if input_layouts is no Shard. In parallelize_module, for splits that do not
            divide into the ranks, and as RowwiseParallel.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> ColwiseParallel(input_layouts=Shard(1)).input_layouts
        (Shard(dim=1),)
    """

    _linear = Shard(0), Shard(0)
    _embedding = Shard(1)

    def __init__(self, *, exact: bool = False, reduction: Fp8Reduction | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self._sending = _sending_by(exact, reduction, self.input_layouts, "input_layouts")

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
        input = inputs[0]
        if isinstance(input, GatheredInput):
            return input
        if isinstance(mod, RecipeModule | SeparateSplits):
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, input_layouts, run_check=False)
            sending, readers = sending_of(mod), [one for one in mod.modules() if isinstance(one, RecipeModule)]
            if sending is not None and (gathered := _gather_in_fp8(readers, input, mesh, sending)) is not None:
                return gathered
        layouts = input_layouts, desired_input_layouts
        return torch_parallel.ColwiseParallel._prepare_input_fn(*layouts, mod, (input, *inputs[1:]), mesh)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if isinstance(module, Linear) and module.splits is not None:
            separate(module, device_mesh.size())
        if not isinstance(module, SeparateSplits):
            return super()._apply(module, device_mesh)
        for split in module.children():
            super()._apply(split, device_mesh)
        module.__dict__[STYLE] = self._style(hooks=1)
        layouts = self.input_layouts, self.desired_input_layouts
        prepare = functools.partial(self._prepare_input_fn, *layouts, mesh=device_mesh)
        module.register_forward_pre_hook(prepare)  # the input is gathered once, for all splits
        return module


class _PreparedModule(NamedTuple):
    """A module whose input is prepared, and its mesh; torch's functions pass it on in the place of a mesh."""

    module: nn.Module
    mesh: Any


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """torch's PrepareModuleInput, but the input of layers under octavo's ColwiseParallel is gathered in FP8.

    It is gathered once for all these layers, and its gradient is scattered once. If it is not their input, or their
    recipes cast it differently, it is gathered as torch does. No other layer may read it.

    Args:
        exact, reduction: as ColwiseParallel's, whose own are not used then.
        layouts: torch's input_layouts and desired_input_layouts: an input whose Shard(d), with d a dimension of tokens,
            becomes Replicate() is gathered in FP8; input_kwarg_layouts and desired_input_kwarg_layouts, the same for
            keyword arguments; use_local_output, whether other inputs become plain tensors.

    Raises:
        ValueError: for a reduction if no input is sharded.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).use_local_output
        False
    """

    def __init__(self, *, exact: bool = False, reduction: Fp8Reduction | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        input_layouts = (*(self.input_layouts or ()), *self.input_kwarg_layouts.values())
        self._sending = _sending_by(exact, reduction, input_layouts, "input_layouts")

    def _prepare_input_arg(self, input: Any, prepared: Any, input_layout: Any, desired_layout: Any) -> Any:
        module, mesh = prepared  # a _PreparedModule, from the hook in _apply
        if isinstance(input_layout, Shard) and desired_layout == Replicate():
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
            readers = [
                layer
                for layer in module.modules()
                if isinstance(layer, RecipeModule) and (sending := sending_of(layer)) is not None
                if sending.output is None and layer.in_features == input.shape[-1]
            ]
            if (gathered := _gather_in_fp8(readers, input, mesh, self._sending)) is not None:
                return gathered
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def prepare(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._prepare_input_kwarg_fn(args, kwargs, _PreparedModule(module, device_mesh))

        module.register_forward_pre_hook(prepare, with_kwargs=True)  # a copy's hook asks the copy's layers
        return module
