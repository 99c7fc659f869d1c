"""torch's styles of tensor and sequence parallelism, with gathers of inputs in FP8.

    ColwiseParallel       gathers an input that is sharded by tokens as codes and scales
    PrepareModuleInput    gathers it once for all layers of a module that read it (query, key and value)
    RowwiseParallel, SequenceParallel    as torch's

For ``torch.distributed.tensor.parallel.parallelize_module``, with torch's arguments. What a recipe sends is in
docs/tensor-parallel.md; where an input can't be sent as pairs it is gathered as by torch's styles.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

from octavo.nn.linear import Linear
from octavo.nn.parted_linear import part
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.tensor_parallel import gathered_for
from octavo.tensor.gathered_input import GatheredInput
from octavo.tensor.stored_weight import StoredWeight

SequenceParallel = torch_parallel.SequenceParallel
"""torch's, as it is: for norms and dropout, which read this rank's tokens alone."""

_READS = "_reads_gathered_input"  # on a layer under ColwiseParallel
_SHARDED = "_octavo_sharded"  # on a parameter: how it was sharded, and what it became, for modules that share it


def _in_fp8(readers: list[RecipeModule], input: Any) -> GatheredInput | None:
    """A DTensor gathered for these layers in FP8, if it is sharded by tokens and they can take it so."""
    (placement,), last = input.placements, input.ndim - 1
    if not readers or type(placement) is not Shard or placement.dim % input.ndim == last:
        return None
    return _gathered(readers, input, None if torch.compiler.is_compiling() else [])


# dynamo would trace its backward with gradients that are facades too, as no real ones are
@torch.compiler.disable
def _gathered(readers: list[RecipeModule], input: Any, memo: list[Any] | None) -> GatheredInput | None:
    return gathered_for(readers, input, memo)


def _shard_parameters(style: Any, module: nn.Module, mesh: Any, of_weight: Any, of_bias: Any) -> None:
    """Shard a module's own parameters; one that is tied to another module's stays tied.

    Raises:
        ValueError: for one that was sharded in another way through the other module, or that lives in FP8.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        if isinstance(param, StoredWeight):
            raise ValueError(
                "weights that live in FP8 are sharded by fully_shard, not over a tensor-parallel mesh: convert without "
                "weight_storage='fp8'"
            )
        placement = of_bias if name == "bias" else of_weight
        placed, sharded = param.__dict__.get(_SHARDED, (None, None))
        if sharded is None:
            local = distribute_tensor(param, mesh, [placement], src_data_rank=style.src_data_rank)
            sharded = nn.Parameter(local, requires_grad=param.requires_grad)
            param.__dict__[_SHARDED] = placement, sharded
        elif placed != placement:
            raise ValueError(
                f"a parameter of {type(module).__name__} is tied to another module's, which is sharded {placed}, and "
                f"{type(style).__name__} would shard it {placement}: an embedding by RowwiseParallel and a Linear by "
                "ColwiseParallel are sharded alike, by rows"
            )
        module.register_parameter(name, sharded)


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """torch's RowwiseParallel, under which parameters that modules share stay shared.

    Args:
        input_layouts: Shard(-1) by default.
        output_layouts: Replicate() by default; Shard(d) of a dimension of tokens scatters the sum.
        use_local_output: whether the output is a plain tensor.

    Raises:
        ValueError: in parallelize_module, for a tied parameter that is sharded in two ways, or weights in FP8.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> RowwiseParallel(output_layouts=Shard(1)).output_layouts
        (Shard(dim=1),)
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        _shard_parameters(self, module, device_mesh, Shard(1), Replicate())

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        _shard_parameters(self, module, device_mesh, Shard(0), None)


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """torch's ColwiseParallel, which gathers the input of octavo's layers in FP8 where it is sharded by tokens.

    Of an octavo.nn.Linear with named splits each split is sharded: its parameters become ``<split>.weight`` and
    ``<split>.bias``, and its output is a tuple as before.

    Args:
        input_layouts: Replicate() by default; Shard(d) of a dimension of tokens is gathered.
        output_layouts: Shard(-1) by default.
        use_local_output: whether the output is a plain tensor.

    Raises:
        ValueError: in parallelize_module, for splits that do not divide into the ranks, and as RowwiseParallel.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> ColwiseParallel(input_layouts=Shard(1)).input_layouts
        (Shard(dim=1),)
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> Any:
        input = inputs[0]
        if isinstance(input, GatheredInput):
            return input
        if isinstance(mod, RecipeModule):
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, device_mesh, input_layouts, run_check=False)
            if (found := _in_fp8([mod], input)) is not None:
                return found
        how = input_layouts, desired_input_layouts
        return torch_parallel.ColwiseParallel._prepare_input_fn(*how, mod, (input, *inputs[1:]), device_mesh)

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        how, theirs = (output_layouts, use_local_output, mod), torch_parallel.ColwiseParallel._prepare_output_fn
        if isinstance(outputs, tuple):  # of named splits
            return tuple(theirs(*how, output, device_mesh) for output in outputs)
        return theirs(*how, outputs, device_mesh)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        _shard_parameters(self, module, device_mesh, Shard(0), Shard(0))

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: Any) -> None:
        _shard_parameters(self, module, device_mesh, Shard(1), None)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        module.__dict__[_READS] = True
        if isinstance(module, Linear) and module.splits is not None:
            part(module, device_mesh.size())
        return super()._apply(module, device_mesh)


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """torch's PrepareModuleInput, which gathers in FP8 what the layers under octavo's ColwiseParallel in a module read.

    It is gathered once for all of them, and its gradient scattered once. Where it is not an input of theirs, or their
    recipes cast it differently, it is gathered as torch does. Nothing but such layers may read it.

    Args:
        input_layouts, desired_input_layouts: Shard(d) of a dimension of tokens, to Replicate(), is what is gathered so.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same of keyword arguments.
        use_local_output: whether other inputs become plain tensors.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).use_local_output
        False
    """

    _module: nn.Module | None = None  # that it was applied to

    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Any, desired_layout: Any) -> Any:
        if isinstance(input_layout, Shard) and desired_layout == Replicate() and self._module is not None:
            if not isinstance(input, DTensor):
                input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
            readers = [
                module
                for module in self._module.modules()
                if isinstance(module, RecipeModule) and _READS in module.__dict__
                if module.in_features == input.shape[-1]
            ]
            if (found := _in_fp8(readers, input)) is not None:
                return found
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        own = copy.copy(self)  # one style may be applied to many modules
        own._module = module
        return super(PrepareModuleInput, own)._apply(module, device_mesh)
