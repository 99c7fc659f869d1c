"""A Linear whose named splits are parameters of their own, each sharded over a tensor-parallel mesh.

One matrix of several products can't be sharded by rows as it lies: a rank would have all of one split and none of
another. So each split becomes a parameter ``<split>.weight``, as separate layers have it, of which each rank has some
rows; they are joined for the product, which stays one cast and one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.granularity import PerTensor
from octavo.nn.linear import Linear
from octavo.nn.weight import WeightOwner
from octavo.tensor.fsdp2 import attach, gather_as_it_is
from octavo.tensor.stored_weight import BLOCK, StoredWeight, agree_on_scale, agreed, local_stored


class Split(WeightOwner):
    """One split's rows of the weight, and of the bias if there is one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, layer: Linear) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.__dict__["layer"] = layer  # whose rows it has; no module of its own

    def __setattr__(self, name: str, value: Any) -> None:
        """As any module's, but a weight that FSDP2 has just sharded gets hooks, so that its storage may change."""
        old, new = (getattr(one, "device_mesh", None) for one in (self._parameters.get("weight"), value))
        if name == "weight" and old is not None and new is not None:
            attach(value, new.ndim - 1 - old.ndim)
            agree_on_scale(value, just_cut=True)
        super().__setattr__(name, value)

    @property
    def weight_readers(self) -> dict[str, Any]:
        return {"weight": self.__dict__["layer"]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.__dict__["layer"].agree()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def before_gather(self, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any) -> Any:
        """What FSDP2's hook is to send of the weight, which only one in FP8 has: see nn/gather.py."""
        if not isinstance(shard, StoredWeight):
            return gather_as_it_is(shard, mesh, outer_size, mp_policy)
        layer = self.__dict__["layer"]
        shard.known.alone |= layer.agree()  # what came here may be a copy elsewhere, of before
        return layer.gather.before(layer, agreed(shard, self.weight), mesh, outer_size, mp_policy)


class PartedLinear(Linear):
    """See the file; made by ``divide``, and its splits then sharded by rows."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """This rank's rows of all splits, one after the other: a DTensor for products, and for nothing else."""
        return self._joined("weight")

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """The same of the biases, or None."""
        return self._joined("bias")

    @property
    def weights(self) -> list[Any]:
        """The splits'."""
        return [split.weight for split in self._split_modules()]

    def _split_modules(self) -> list[Split]:
        assert self.splits is not None
        return [self.get_submodule(name) for name in self.splits]  # type: ignore[misc]

    def _joined(self, name: str) -> Any:
        from torch.distributed.tensor import DTensor

        if not torch.compiler.is_compiling():
            self.agree()
        found: list[Any] = [getattr(split, name) for split in self._split_modules()]
        if found[0] is None:
            return None
        first = found[0]
        if not isinstance(first, DTensor):  # not sharded yet
            return torch.cat(found)
        return DTensor.from_local(
            torch.cat([tensor.to_local() for tensor in found]), first.device_mesh, first.placements, run_check=False
        )

    def agree(self) -> bool:
        """Give splits that have one scale in common such a one, if any was written, which it returns; for all ranks."""
        stored = local_stored(self.weights[0])
        if stored is None or stored.common is None or not stored.common.written:
            return False
        agree_on_scale(*self.weights)
        stored.common.written = False  # which is of all splits
        return True

    def reset_parameters(self) -> None:
        """Initialise each split as torch.nn.Linear does, and empty the delayed state."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-(self.in_features**-0.5), self.in_features**-0.5)
        self.reset_delayed_state()

    def parted(self, y: Any) -> Any:
        """The output of all splits, a DTensor, as one for each, sharded by its features."""
        from torch.distributed.tensor import DTensor

        assert self.splits is not None
        sizes = [size // y.device_mesh.size() for size in self.splits.values()]
        return tuple(
            DTensor.from_local(y_split, y.device_mesh, y.placements, run_check=False)
            for y_split in y.to_local().split(sizes, dim=-1)
        )


def divide(layer: Linear, ranks: int) -> None:
    """Make a Linear with splits a PartedLinear, in place, to be sharded over so many ranks, or raise ValueError."""
    assert layer.splits is not None
    if wrong := {name: size for name, size in layer.splits.items() if size % ranks}:
        raise ValueError(f"splits {wrong} do not divide into {ranks} ranks: each rank has as many rows of every split")
    weight, bias = layer.weight, layer.bias
    if type(weight) not in (nn.Parameter, StoredWeight):
        raise ValueError(
            f"a Linear with splits whose weight is a {type(weight).__name__} can't be sharded by its splits: apply "
            "ColwiseParallel before it is sharded"
        )
    sizes = list(layer.splits.values())
    if isinstance(weight, StoredWeight):
        shape = weight.shape
        if weight.granularity != PerTensor() and (any(size % (BLOCK * ranks) for size in sizes) or shape[1] <= BLOCK):
            raise ValueError(
                f"splits {layer.splits} of a weight {tuple(shape)} in blocks of 128 x 128: on {ranks} ranks each "
                "split needs a multiple of 128 rows a rank, and more than 128 columns; or use a recipe with one scale "
                "a weight (dynamic, delayed)"
            )
        weights: list[Any] = [*weight.alias().splits_of_one_scale(sizes)]
    else:
        weights = list(weight.detach().split(sizes))
    biases = [None] * len(sizes) if bias is None else bias.detach().split(sizes)
    del layer._parameters["weight"], layer._parameters["bias"]
    for name, rows, some in zip(layer.splits, weights, biases, strict=True):
        made = nn.Parameter(rows.clone(), weight.requires_grad)
        made_bias = None if bias is None else nn.Parameter(some.clone(), bias.requires_grad)
        layer.add_module(name, Split(made, made_bias, layer))
    layer.__class__ = PartedLinear
