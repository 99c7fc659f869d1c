"""torch.nn.Linear whose three products follow a recipe; the same of experts, with a matrix for each group of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.autograd.linear_cross_entropy import LossOfRows, linear_cross_entropy_of_rows
from octavo.autograd.products import Layer, requires_grad
from octavo.autograd.shared_casts import read_by
from octavo.granularity import PerTensor
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.tensor_parallel import is_parallel
from octavo.nn.weight import WeightOwner, widened
from octavo.scaling.recipe import Recipe, RecipeMap, recipe_of
from octavo.tensor.fsdp2 import attach, gather_as_it_is
from octavo.tensor.pair import Operands
from octavo.tensor.stored_weight import BLOCK, StoredWeight, agree_on_scale, local_stored, with_agreed_scale


class Linear(RecipeModule, nn.Linear):
    """y = x . W^T + b with each of the three products cast as the recipe says.

    Parameters, their names, their initialisation and the state_dict are those of torch.nn.Linear. Saved for backward
    are the FP8 pairs of the input and the weight. Under torch.autocast the input is cast to autocast's dtype, the
    weight to FP8 from its own.

    Args:
        in_features: K, any size.
        out_features: N, any size; or {name: size} where several layers read one input (query, key and value; gate and
            up): they are one matrix, and the input is cast once. The result is then a tuple, a view for each in order;
            load_state_dict takes their separate ``<name>.weight`` and ``<name>.bias`` too.
        bias: whether there is a bias [N].
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the name ""); octavo.recipes.default() by default. ``layer.recipe`` is
            the Recipe in force; another one may be set, is checked at once, and holds from the next forward on.

    Shape:
        input [..., K], result [..., N] (or a tuple of such) of the same dtype; any leading dimensions, 0 tokens too.

    Raises:
        TypeError: input and weight of different dtypes without autocast, or float64.
        ValueError: a last dimension other than ``in_features``.
        HigherOrderGradientError: under create_graph=True or torch.func.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(256, 512, recipe=octavo.recipes.blockwise(), dtype=torch.bfloat16)
        >>> layer(torch.randn(4, 16, 256, dtype=torch.bfloat16)).shape
        torch.Size([4, 16, 512])
    """

    splits: dict[str, int] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int | Splits,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        size, splits = checked_splits(out_features)
        nn.Linear.__init__(self, in_features, size, bias, device, dtype)
        self.recipe = recipe_for(recipe, "")
        if splits is not None:  # else the attributes are those of torch's Linear
            check_names(self, splits)
            self.splits = splits

    def forward(self, input: Tensor, loss: LossOfRows | None = None) -> Any:
        """Return the output; or its loss, if octavo.nn.linear_cross_entropy calls the layer as a head."""
        return self.parted(self._product(input)) if loss is None else self._loss(input, loss)

    def _loss(self, input: Tensor, loss: LossOfRows) -> Tensor:
        """Return the loss of logits input [T, K] . weight^T + bias, by this module's recipe and in chunks."""
        tensors = weight, bias, parameter = self.operands()
        if self.splits is not None:
            raise ValueError(f"a head with splits {self.splits} has several outputs: call it, and take each one's loss")
        refuse_sharded(weight)
        x = input.to(product_dtype(input, weight))
        if self.recipe.is_high_precision:
            weight = widened(weight)
            return linear_cross_entropy_of_rows(x, weight, bias, loss, Layer(Operands(), self.recipe, None, False))
        refuse_for_fp8(x, parameter, bias)
        layer = self.layer_of(x, tensors, x.requires_grad)
        return linear_cross_entropy_of_rows(x, weight, bias, loss, layer, read_by(input, self))

    def parted(self, y: Tensor) -> Any:
        """Return the output of all splits as a tuple of each split's, if there are splits."""
        return split_output(y, self.splits)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load from this layer's or separate layers' keys; the last argument is torch's list of errors."""
        # under tensor parallelism each split is a module and loads its own keys
        if self.splits is not None and "weight" in self._parameters:
            args[-1].extend(merge_keys(state_dict, prefix, self.splits))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return torch's text, the splits, and the recipe's name."""
        splits = "" if self.splits is None else f", splits={self.splits}"
        return f"{super().extra_repr()}{splits}, recipe={self.recipe.name}"


class TransposedLinear(RecipeModule):
    """Mixed into transformers' Conv1D (GPT-2) by convert: y = x . W + b with W [K, N] and casts by a recipe."""

    stores_transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., N] of x [..., K]."""
        return self._product(x)


def refuse_sharded(weight: Tensor) -> None:
    """Raise ValueError for a head's weight that is a DTensor: its loss needs the logits of all columns."""
    if is_parallel(weight):
        raise ValueError(
            f"the head's weight {tuple(weight.shape)} is a DTensor, {weight.placements}: under FSDP2 give "  # type: ignore[attr-defined]
            "octavo.nn.linear_cross_entropy the octavo.nn.Linear itself, and call it where its group is gathered, in "
            "the forward of the module that fully_shard was given; under tensor parallelism take the loss of the "
            "head's output, within torch.distributed.tensor.parallel.loss_parallel()"
        )


def recipe_for(recipe: Recipe | RecipeMap | None, name: str) -> Recipe:
    """Return the recipe of a module's part of this name, from the module's ``recipe`` argument; default() for None."""
    return recipes.default() if recipe is None else recipe_of(recipe, name)


Splits = Mapping[str, int]


def checked_splits(out_features: int | Splits) -> tuple[int, dict[str, int] | None]:
    """Return (out_features in all, the splits or None) from a module's argument."""
    if isinstance(out_features, int):
        return out_features, None
    splits = dict(out_features)
    wrong = [name for name in splits if not name.isidentifier() or name in ("weight", "bias")]
    if not splits or wrong:
        raise ValueError(f"out_features={splits!r}: splits need names like 'query', not {wrong or 'none'}")
    return sum(splits.values()), splits


def check_names(layer: Linear, splits: Splits) -> None:
    """Raise ValueError for splits that can't be modules of their own names under tensor parallelism."""
    if taken := [name for name in splits if hasattr(layer, name) or hasattr(PartedLinear, name)]:
        raise ValueError(f"out_features={dict(splits)!r}: a Linear has {taken} already; give these splits other names")


def split_output(output: Tensor, splits: dict[str, int] | None) -> Tensor | tuple[Tensor, ...]:
    """Return the output as it is, or a view of it for each split, in their order."""
    return output if splits is None else output.split(list(splits.values()), dim=-1)


def merge_keys(state_dict: dict[str, Tensor], prefix: str, splits: dict[str, int]) -> list[str]:
    """Join ``<prefix><split>.weight`` and ``.bias``, as separate layers save them, to one key each; in place.

    Keys are joined if all splits have theirs and the joined key is missing. Returns a line for each tensor of another
    size than its split; if there is one, nothing is joined.
    """
    wrong = []
    for parameter in ("weight", "bias"):
        keys = {f"{prefix}{name}.{parameter}": size for name, size in splits.items()}
        if f"{prefix}{parameter}" in state_dict or not all(key in state_dict for key in keys):
            continue
        other = {key: list(state_dict[key].shape) for key, size in keys.items() if state_dict[key].shape[:1] != (size,)}
        wrong += [f"{key} is {shape}, but its split has {keys[key]} rows" for key, shape in other.items()]
        if not other:
            state_dict[f"{prefix}{parameter}"] = torch.cat([state_dict.pop(key) for key in keys])
    return wrong


def _reset_uniformly(layer: Any) -> None:
    """Initialise matrices as torch.nn.Linear does, uniformly within 1 / sqrt(in_features); empty the delayed state."""
    bound = layer.in_features**-0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound)
    layer.reset_delayed_state()


class Grouped(RecipeModule):
    """Base of the modules that multiply rows in groups, by matrices of their own or another module's."""

    elsewhere: Callable[..., Tensor] | None = None  # computes these experts on the ranks that hold them

    @property
    def trains(self) -> tuple[bool, bool]:
        """Whether a backward would compute the gradients of (weight, bias)."""
        weight, bias = self.own_parameters()
        enabled = torch.is_grad_enabled()
        return enabled and weight.requires_grad, enabled and requires_grad(bias)

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        return self._product(input, offsets)


class GroupedLinear(Grouped):
    """y = x . W_e^T + b_e for each group e of rows, with each of the three products cast as the recipe says.

    As a loop over experts of octavo.nn.Linear computes, but each product is one for all groups, and nothing reads their
    sizes on the host. Every group has scales of its own; under Delayed all share one history a role, of the largest
    amax. An expert without rows gets a gradient of exact zeros.

    Args:
        experts: E, how many groups there are.
        in_features: K, at least 1.
        out_features: N, at least 1.
        bias: whether there is a bias [E, N].
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the name ""); octavo.recipes.default() by default.

    Shape:
        input [T, K], its rows sorted by expert; offsets [E] int32 on the same device: where each expert's rows end,
        ``counts.cumsum(0).to(torch.int32)``. Result [T, N], of the input's dtype or autocast's; rows behind the last
        end are zero. ``weight`` is [E, N, K], each expert's initialised as torch.nn.Linear's.

    Raises:
        TypeError: for float64, offsets of another dtype than int32, input and weight of different dtypes.
        ValueError: for shapes that do not fit, offsets of another number of experts or on another device; on a CPU for
            offsets that descend or exceed T, which a GPU does not look at.
        HigherOrderGradientError: under create_graph=True or torch.func.

    Source:
        torch.nn.functional.grouped_mm, whose ``offs`` the offsets are.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.GroupedLinear(4, 64, 32, bias=False)
        >>> counts = torch.tensor([3, 0, 5, 2])
        >>> layer(torch.randn(10, 64), counts.cumsum(0).to(torch.int32)).shape
        torch.Size([10, 32])
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        super().__init__()
        if min(experts, in_features, out_features) < 1:
            raise ValueError(f"experts={experts}, in_features={in_features}, out_features={out_features}: at least 1")
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.recipe = recipe_for(recipe, "")
        self.reset_parameters()

    reset_parameters = _reset_uniformly

    def extra_repr(self) -> str:
        """Return the sizes and the recipe's name."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"


class Split(WeightOwner):
    """One split's rows of the weight, and of the bias if there is one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, layer: Linear) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.__dict__["layer"] = layer  # the Linear whose rows these are; in __dict__, so that it is no child

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight that FSDP2 has just sharded also gets hooks, by which its storage may change."""
        old, new = (getattr(one, "device_mesh", None) for one in (self._parameters.get("weight"), value))
        if name == "weight" and old is not None and new is not None:
            attach(value, new.ndim - 1 - old.ndim)
            agree_on_scale(value, just_cut=True)
        super().__setattr__(name, value)

    @property
    def weight_readers(self) -> dict[str, Any]:
        return {"weight": self.__dict__["layer"]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.__dict__["layer"].agree_on_scale()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def before_gather(self, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any) -> Any:
        """Return what FSDP2's first hook returns for the weight, if it is in FP8: see nn/gather.py."""
        if not isinstance(shard, StoredWeight):
            return gather_as_it_is(shard, mesh, outer_size, mp_policy)
        layer = self.__dict__["layer"]
        # FSDP2 may pass a copy, on another device, made before the splits agreed on a scale
        shard.known.alone |= layer.agree_on_scale()
        return layer.fp8.gather.send(layer, with_agreed_scale(shard, self.weight), mesh, outer_size, mp_policy)


class PartedLinear(Linear):
    """A Linear whose named splits are parameters of their own, each sharded over a tensor-parallel mesh by its rows.

    One matrix of several products can't be sharded by rows as it lies: a rank would have all of one split and none of
    another. So ``divide`` makes each split a parameter ``<split>.weight``, as separate layers have it, of which each
    rank has some rows; they are joined for the product, which stays one cast and one product.

    They are no single DTensor whose rows are permuted: no placement of torch says so, and full_tensor(), full state
    dicts and torch.distributed.checkpoint would give that order to weights and to states of optimizers, silently.
    """

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """Return this rank's rows of all splits, one after the other: a DTensor for products, and for nothing else."""
        return self._joined("weight")

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """Return this rank's biases of all splits, one after the other, or None."""
        return self._joined("bias")

    @property
    def weights(self) -> list[Any]:
        """Return the weight of each split."""
        return self._of_splits("weight")

    def _of_splits(self, name: str) -> list[Any]:
        return [getattr(self.get_submodule(split), name) for split in self.splits or ()]

    def _joined(self, name: str) -> Any:
        from torch.distributed.tensor import DTensor

        if not torch.compiler.is_compiling():
            self.agree_on_scale()
        first, *_ = parameters = self._of_splits(name)
        if first is None:
            return None
        if not isinstance(first, DTensor):  # not sharded yet
            return torch.cat(parameters)
        return DTensor.from_local(
            torch.cat([tensor.to_local() for tensor in parameters]),
            first.device_mesh,
            first.placements,
            run_check=False,
        )

    def agree_on_scale(self) -> bool:
        """Cast all splits again with one scale if any was written; return whether one was. Collective."""
        stored = local_stored(self.weights[0])
        if stored is None or stored.common is None or not stored.common.written:
            return False
        agree_on_scale(*self.weights)
        stored.common.written = False  # the flag is shared by all splits
        return True

    reset_parameters = _reset_uniformly

    def parted(self, y: Any) -> Any:
        """Return the output of all splits, a DTensor, as a tuple of each split's, sharded by its features."""
        from torch.distributed.tensor import DTensor

        sizes = {name: size // y.device_mesh.size() for name, size in (self.splits or {}).items()}
        outputs, layout = split_output(y.to_local(), sizes), (y.device_mesh, y.placements)
        return tuple(DTensor.from_local(y_split, *layout, run_check=False) for y_split in outputs)


def divide(layer: Linear, ranks: int) -> None:
    """Turn a Linear with splits into a PartedLinear in place, for sharding over so many ranks, or raise ValueError."""
    assert layer.splits is not None
    if wrong := {name: size for name, size in layer.splits.items() if size % ranks}:
        raise ValueError(f"splits {wrong} do not divide into {ranks} ranks: each rank has as many rows of every split")
    weight, bias = layer.weight, layer.bias
    if type(weight) not in (nn.Parameter, StoredWeight):
        raise ValueError(
            f"a Linear with splits whose weight is a {type(weight).__name__} can't be sharded by its splits: apply "
            "ColwiseParallel before it is sharded"
        )
    check_names(layer, layer.splits)  # before anything changes
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
    for name, rows, bias_rows in zip(layer.splits, weights, biases, strict=True):
        split_weight = nn.Parameter(rows.clone(), weight.requires_grad)
        split_bias = None if bias is None else nn.Parameter(bias_rows.clone(), bias.requires_grad)
        layer.add_module(name, Split(split_weight, split_bias, layer))
    layer.__class__ = PartedLinear
