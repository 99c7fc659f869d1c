"""torch.nn.Linear whose three products follow a recipe; the same of experts, with a matrix for each group of rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.autograd.linear_cross_entropy import LossOfRows, linear_cross_entropy_of_rows
from octavo.autograd.products import Layer, requires_grad
from octavo.autograd.shared_casts import casts_to_share
from octavo.granularity import ALL
from octavo.nn.inputs import product_dtype, refuse_for_fp8
from octavo.nn.recipe_module import RecipeModule
from octavo.private import is_dtensor
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.tensor.pair import Operands
from octavo.weights.files import SCALE_INV
from octavo.weights.operands import widened
from octavo.weights.stored import StoredWeight

Model = TypeVar("Model", bound=nn.Module)


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
    is_split = False  # whether it is one of SeparateSplits

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
        return split_output(self._product(input), self.splits) if loss is None else self._loss(input, loss)

    def _loss(self, input: Tensor, loss: LossOfRows) -> Tensor:
        """Return the loss of logits input [T, K] . weight^T + bias, by this module's recipe and in chunks."""
        tensors = weight, bias, parameter = self.layer_tensors()
        if self.splits is not None:
            raise ValueError(f"a head with splits {self.splits} has several outputs: call it, and take each one's loss")
        refuse_sharded(weight)
        x = input.to(product_dtype(input, weight))
        if self.recipe.is_high_precision:
            return linear_cross_entropy_of_rows(x, widened(weight), bias, loss, Layer(Operands(), self.recipe))
        refuse_for_fp8(x, parameter, bias)
        layer = self.layer_of(x, tensors, x.requires_grad)
        return linear_cross_entropy_of_rows(x, weight, bias, loss, layer, casts_to_share(input, self))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load from this layer's or separate layers' keys; the last argument is torch's list of errors."""
        if self.splits is not None:
            args[-1].extend(merge_keys(state_dict, prefix, self.splits))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names that a RecipeMap's patterns may match: a split also has that of the layer it was part of."""
        return (name, name.rpartition(".")[0]) if self.is_split else (name,)

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
    if is_dtensor(weight):
        raise ValueError(
            f"the head's weight {tuple(weight.shape)} is a DTensor, {weight.placements}: under FSDP2 give "  # type: ignore[attr-defined]
            "octavo.nn.linear_cross_entropy the octavo.nn.Linear itself, and call it where its group is gathered, in "
            "the forward of the module that fully_shard was given; under tensor parallelism take the loss of the "
            "head's output, within torch.distributed.tensor.parallel.loss_parallel()"
        )


def recipe_for(recipe: Recipe | RecipeMap | None, name: str) -> Recipe:
    """Return the recipe of a module's part of this name, from the module's ``recipe`` argument; default() for None."""
    return recipes.as_recipe(recipes.default() if recipe is None else recipe).of(name)


Splits = Mapping[str, int]


def checked_splits(out_features: int | Splits) -> tuple[int, dict[str, int] | None]:
    """Return (out_features in all, the splits or None) from a module's argument."""
    if not isinstance(out_features, Mapping):
        return operator.index(out_features), None  # an int, or NumPy's
    splits = dict(out_features)
    wrong_names = [name for name in splits if not name.isidentifier() or name in ("weight", "bias")]
    if not splits or wrong_names:
        raise ValueError(f"out_features={splits!r}: splits need names like 'query', not {wrong_names or 'none'}")
    if min(splits.values()) < 0:
        raise ValueError(f"out_features={splits!r}: a split's size can't be negative")
    return sum(splits.values()), splits


def check_names(layer: Linear, splits: Splits) -> None:
    """Raise ValueError for splits that can't be modules of their own names, as separate splits are."""
    if taken := [name for name in splits if hasattr(layer, name) or hasattr(Linear, name)]:
        raise ValueError(f"out_features={dict(splits)!r}: a Linear has {taken} already; give these splits other names")


def split_output(output: Tensor, splits: dict[str, int] | None) -> Tensor | tuple[Tensor, ...]:
    """Return the output as it is, or a view of it for each split, in their order."""
    return output if splits is None else output.split(list(splits.values()), dim=-1)


def merge_keys(state_dict: dict[str, Tensor], prefix: str, splits: dict[str, int]) -> list[str]:
    """Join ``<prefix><split>.weight`` and ``.bias``, as separate layers save them, to one key each; in place.

    Keys are joined if all splits have theirs and the joined key is missing. Returns a line for each tensor of another
    size than its split, or for splits in FP8; if there is one, nothing is joined.
    """
    if in_fp8 := [key for name in splits if (key := f"{prefix}{name}.weight{SCALE_INV}") in state_dict]:
        return [f"{', '.join(in_fp8)}: splits in FP8 have scales of their own: octavo.nn.separate_splits(model) first"]
    errors: list[str] = []
    keys_to_join: dict[str, list[str]] = {}
    for parameter in ("weight", "bias"):
        keys = {f"{prefix}{name}.{parameter}": size for name, size in splits.items()}
        if f"{prefix}{parameter}" in state_dict or not all(key in state_dict for key in keys):
            continue
        shapes = {key: list(state_dict[key].shape) for key in keys}
        misfits = [key for key, size in keys.items() if shapes[key][:1] != [size]]
        errors += [f"{key} is {shapes[key]}, but its split has {keys[key]} rows" for key in misfits]
        keys_to_join[f"{prefix}{parameter}"] = list(keys)
    for joined_key, parts in keys_to_join.items() if not errors else ():
        state_dict[joined_key] = torch.cat([state_dict.pop(key) for key in parts])
    return errors


class Grouped(RecipeModule):
    """Base of the modules that multiply rows in groups, by matrices of their own or another module's."""

    feed_forward_on_ranks: Callable[..., Tensor] | None = None  # computes these experts on the ranks that hold them

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

    def reset_parameters(self) -> None:
        """Initialise as torch.nn.Linear does, uniformly within 1 / sqrt(in_features); empty the delayed state."""
        bound = self.in_features**-0.5
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)
        self.reset_delayed_state()

    def extra_repr(self) -> str:
        """Return the sizes and the recipe's name."""
        sizes = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, recipe={self.recipe.name}"


class SeparateSplits(nn.Module):
    """Named splits of one input, each a Linear under its name; they share the input's cast (autograd/shared_casts.py).

    ``separate_splits`` turns a Linear with splits into it; the output is a tuple as before.
    """

    splits: dict[str, int]

    def forward(self, input: Any) -> tuple[Any, ...]:
        """Return the output of each split, in their order."""
        return tuple(split(input) for split in self._modules.values())  # type: ignore[misc]

    def reset_parameters(self) -> None:
        """Initialise each split as a Linear of its own."""
        for split in self._modules.values():
            split.reset_parameters()  # type: ignore[union-attr, operator]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load each split's keys, or those of the Linear that they were, whose rows they are."""
        for name in ("weight", "bias", f"weight{SCALE_INV}"):
            if (tensor := state_dict.get(f"{prefix}{name}")) is not None:
                try:
                    rows = rows_of_splits(tensor, self.splits)
                except ValueError as error:
                    args[-1].append(f"{prefix}{name}: {error}")
                    continue
                state_dict |= {f"{prefix}{split}.{name}": part for split, part in zip(self.splits, rows, strict=True)}
                del state_dict[f"{prefix}{name}"]
        super()._load_from_state_dict(state_dict, prefix, *args)


def rows_of_splits(tensor: Tensor, splits: Splits) -> Sequence[Tensor]:
    """Return each split's rows of a tensor of all splits: of a matrix, of the scales of its rows, or one scale for all.

    Raises:
        ValueError: for blocks of rows that belong to two splits.
    """
    size = sum(splits.values())
    if tensor.ndim == 0 or tensor.shape[0] == 1 < size:
        return [tensor] * len(splits)
    rows = [tensor.shape[0] * split for split in splits.values()]
    if any(count % size for count in rows):
        raise ValueError(f"{list(tensor.shape)} does not divide into the splits {dict(splits)}")
    return tensor.split([count // size for count in rows])


def separate(layer: Linear, ranks: int = 1) -> None:
    """Turn a Linear with splits into SeparateSplits in place, for sharding over so many ranks, or raise ValueError."""
    assert layer.splits is not None
    if uneven := {name: size for name, size in layer.splits.items() if size % ranks}:
        raise ValueError(f"splits {uneven} do not divide into {ranks} ranks: each rank has as many rows of every split")
    weight, bias = layer.weight, layer.bias
    if type(weight) not in (nn.Parameter, StoredWeight):
        raise ValueError(
            f"a Linear with splits whose weight is a {type(weight).__name__} can't be separated into its splits: apply "
            "ColwiseParallel, or octavo.nn.separate_splits, before it is sharded"
        )
    check_names(layer, layer.splits)  # before anything changes
    step = weight.granularity.tile[0] if isinstance(weight, StoredWeight) else ALL
    if step != ALL and any(size % (step * ranks) for size in layer.splits.values()):
        raise ValueError(
            f"splits {layer.splits} of a weight {tuple(weight.shape)} in blocks of {step} rows: on {ranks} ranks each "
            f"split needs a multiple of {step} rows a rank; or use a recipe with one scale a weight (dynamic, delayed)"
        )
    options: dict[str, Any] = {"bias": bias is not None, "device": "meta", "dtype": weight.dtype}
    for (name, size), end in zip(layer.splits.items(), itertools.accumulate(layer.splits.values()), strict=True):
        start = end - size
        split = Linear(layer.in_features, size, recipe=layer.recipe, **options)
        part = weight.rows(start, end) if isinstance(weight, StoredWeight) else weight.detach()[start:end].clone()
        split._parameters["weight"] = nn.Parameter(part, weight.requires_grad)
        if bias is not None:
            split._parameters["bias"] = nn.Parameter(bias.detach()[start:end].clone(), bias.requires_grad)
        split.is_split, split.training = True, layer.training
        if layer.fp8.state is not None:
            split.fp8.state = layer.fp8.state.clone()
        if (gather := layer.fp8.gather).group is not None:
            split.fp8.gather.join(gather.group, split, f"{gather.name}.{name}".lstrip("."))
        layer.add_module(name, split)
    del layer.fp8
    layer._parameters.clear()
    layer.__class__ = SeparateSplits  # type: ignore[assignment]


def separate_splits(model: Model) -> Model:
    """Make each named split of the model's Linears a Linear of its own, in place, as ColwiseParallel does.

    The splits' parameters are ``<split>.weight`` and ``<split>.bias``, so that the model has the parameters and keys of
    one under ColwiseParallel, and loads its checkpoints. Outputs are tuples as before. What the splits did together is
    lost: one product, a scale per tensor that is that of all of them, and a norm in front that is fused with the cast.

    Args:
        model: any module; call it before ``fully_shard`` and before the optimizer is made.

    Returns:
        The model.

    Raises:
        ValueError: for a weight that is sharded already, or stored in blocks of 128 x 128 that belong to two splits.

    Example:
        >>> import octavo
        >>> layer = octavo.nn.separate_splits(octavo.nn.Linear(64, {"gate": 32, "up": 32}, bias=False))
        >>> [name for name, _ in layer.named_parameters()]
        ['gate.weight', 'up.weight']
    """
    for layer in list(model.modules()):
        if isinstance(layer, Linear) and layer.splits is not None:
            separate(layer)
    return model
