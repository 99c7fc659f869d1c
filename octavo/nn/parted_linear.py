"""A Linear whose named splits are parameters of their own, each sharded over a tensor-parallel mesh.

One matrix of several products can't be sharded by rows as it lies: a rank would have all of one split and none of
another. So each split becomes a parameter ``<split>.weight``, as separate layers have it, of which each rank has some
rows; they are joined for the product, which stays one cast and one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import Linear


class Part(nn.Module):
    """One split's rows of the weight, and of the bias if there is one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


class PartedLinear(Linear):
    """See the file; made by ``part``, and its parts then sharded by rows."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """This rank's rows of all splits, one after the other: a DTensor for products, and for nothing else."""
        return self._joined("weight")

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """The same of the biases, or None."""
        return self._joined("bias")

    def _parts(self) -> list[nn.Module]:
        assert self.splits is not None
        return [self.get_submodule(name) for name in self.splits]

    def _joined(self, name: str) -> Any:
        from torch.distributed.tensor import DTensor

        found: list[Any] = [getattr(part, name) for part in self._parts()]
        if found[0] is None:
            return None
        first = found[0]
        return DTensor.from_local(
            torch.cat([tensor.to_local() for tensor in found]), first.device_mesh, first.placements, run_check=False
        )

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Leave the splits' keys to the parts."""
        super(Linear, self)._load_from_state_dict(state_dict, prefix, *args)
        assert self.splits is not None
        if any(f"{prefix}{name}.weight" in state_dict for name in self.splits):
            self.weight_was_loaded()

    def forward(self, input: Tensor) -> Any:
        """A DTensor for each split, sharded by its features."""
        from torch.distributed.tensor import DTensor

        weight = self.weight
        y: Any = self._product(input, weight, self.bias, weight)
        assert self.splits is not None
        sizes = [size // weight.device_mesh.size() for size in self.splits.values()]
        return tuple(
            DTensor.from_local(own, y.device_mesh, y.placements, run_check=False)
            for own in y.to_local().split(sizes, dim=-1)
        )


def part(layer: Linear, ranks: int) -> None:
    """Turn a Linear with splits into a PartedLinear, in place, to be sharded over so many ranks.

    Raises:
        ValueError: for a split that does not divide into them, or a weight that lives in FP8.
    """
    assert layer.splits is not None
    if wrong := {name: size for name, size in layer.splits.items() if size % ranks}:
        raise ValueError(f"splits {wrong} do not divide into {ranks} ranks: each rank has as many rows of every split")
    weight, bias = layer.weight, layer.bias
    if type(weight) is not nn.Parameter:
        raise ValueError(
            f"a Linear with splits whose weight is a {type(weight).__name__} can't be sharded by its splits: apply "
            "ColwiseParallel before weights are stored in FP8 or sharded"
        )
    sizes = list(layer.splits.values())
    biases = [None] * len(sizes) if bias is None else bias.detach().split(sizes)
    del layer._parameters["weight"], layer._parameters["bias"]
    for name, own, own_bias in zip(layer.splits, weight.detach().split(sizes), biases, strict=True):
        made = [None if one is None else nn.Parameter(one.clone(), weight.requires_grad) for one in (own, own_bias)]
        layer.add_module(name, Part(*made))  # type: ignore[arg-type]
    layer.__class__ = PartedLinear
