"""A layer's weight as products read it: who writes its codes, and when they are thrown away.

    a weight is     its codes are written                              and thrown away
    stored          once, by octavo.convert or a file; from then on    by octavo.restore
                    by its optimizer, by copy_ and torch.nn.init, by
                    an adapter merged into it, by DDP's first message
    gathered        at FSDP2's unshard (weights/gathered.py)           at its reshard
    kept            by KeptWeights.cast() (weights/kept.py)            at the next write, see KeptOperands
    freed           in every forward, and again in backward, where     after forward's product
                    FSDP1, ZeRO-3 or FSDP2 frees the wide weight
    none of these   in every forward; ranks that share it agree on     with what the forward saved for backward
                    its amax first (autograd/shared_scales.py)

``fp8_operands`` tries them in this order. ``fresh_state`` forgets the history of a weight that anything but its
optimizer wrote, and returns the state that a cast reads; a weight that is no parameter of its module has no history.
A write through .data changes no counter that octavo could read: call ``invalidate`` after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.rows import DENSE, Rows
from octavo.errors import UnsupportedOpError
from octavo.granularity import MX, Granularity
from octavo.kernels.capability import warn_once
from octavo.kernels.layouts import plain_scales
from octavo.private import is_dtensor, is_under_fsdp, parameter_registration_hooks, tracing_state
from octavo.scaling.delayed import State, empty_state
from octavo.scaling.recipe import WEIGHT, Recipe
from octavo.tensor.pair import Operands, WeightSource
from octavo.tensor.scaled_tensor import dequantized
from octavo.weights.files import load_stored, save_as_tensors, whole_pair
from octavo.weights.fsdp2 import GatheredWeight, gather_alone, mp_policies, on_this_rank
from octavo.weights.reader import WeightReader
from octavo.weights.storable import FROZEN_ONLY, stored_granularity
from octavo.weights.stored import StoredWeight, local_stored, stored_as

HOLDING_CODES = StoredWeight, GatheredWeight  # weights that live in FP8: their method ``operands`` gives their codes


class WeightOwner(nn.Module):
    """Base of modules whose weights may live in FP8: these move, are saved and loaded as a plain module's are."""

    @property
    def weight_readers(self) -> Mapping[str, WeightReader]:
        """Return {weight's name: the RecipeModule that multiplies by it}."""
        raise NotImplementedError

    @property
    def weight_scale_inv(self) -> Tensor:
        """Return this rank's scale_inv of a weight in FP8; torch.distributed.checkpoint reads keys as attributes."""
        if (stored := local_stored(weight_of(self))) is None:
            raise AttributeError(f"{type(self).__name__} has no weight that lives in FP8")
        return stored.scale_inv

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; let weights/gathered.py gather a weight that FSDP2 has sharded."""
        parameters = self.__dict__.get("_parameters")
        if parameters is not None and name in parameters and isinstance(value, nn.Parameter):
            if (reader := self.weight_readers.get(name)) is not None:
                reader.take_parameter(value, parameters[name])
            if not parameter_registration_hooks:
                parameters[name] = value  # as torch does after checks; FSDP2 sets weights four times a step
                return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, but refuse a weight in FP8, which parametrizations would replace by a computed one."""
        if name in self.weight_readers and local_stored(self._parameters.get(name)) is not None:
            raise UnsupportedOpError(
                f"{type(self).__name__}.{name} is stored in FP8 and can't be computed from other parameters "
                "(torch.nn.utils.parametrize, weight_norm) or be deleted: octavo.restore(layer) first, or "
                "octavo.convert with weight_storage=None"
            )
        super().__delattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move parameters as torch does, and weights in FP8 here: torch would lose their attributes and hooks.

        The delayed states of all that read the weights, parts without parameters too, move after them.
        """
        weights: dict[str, Any] = {key: self._parameters.get(key) for key in self.weight_readers}
        stored = {key: weight for key, weight in weights.items() if isinstance(weight, StoredWeight)}
        with torch.no_grad():
            for weight in stored.values():
                if (moved := fn(weight)) is not weight:
                    grad, weight.grad = weight.grad, None
                    weight.become(moved)  # type: ignore[arg-type]
                    weight.grad = None if grad is None else fn(grad).requires_grad_(grad.requires_grad)
        self._parameters.update(dict.fromkeys(stored))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(stored)  # type: ignore[arg-type]
        for key, reader in self.weight_readers.items():
            if (parameter := self._parameters.get(key)) is not None and reader.fp8.gather.parameter is not None:
                reader.fp8.gather.adopt(parameter, parameter, reader)
            is_part = getattr(self, "part_name", "")  # moved before the owner of its weight, which moves its state
            if not is_part and (state := reader.fp8.state) is not None:
                reader.fp8.state = state.on(reader.parameters_device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save plain tensors, so that files need no class of octavo: the local tensor of a sharded weight too."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in self.weight_readers:
            save_as_tensors(destination, f"{prefix}{key}", keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load values or FP8 codes, and forget what belongs to the weight that is replaced."""
        for key in self.weight_readers:
            load_stored(self._parameters.get(key), state_dict, f"{prefix}{key}")
        super()._load_from_state_dict(state_dict, prefix, *args)
        for key, reader in self.weight_readers.items():
            if f"{prefix}{key}" in state_dict:
                # torch's list of this load_state_dict's errors: one object for all modules
                reader.weight_was_loaded(args[-1])


# --- what products read --------------------------------------------------------------------------------------


def fp8_operands(
    module: WeightReader,
    weight_NK: Tensor,
    parameter: Tensor,
    transposed: bool,
    state: State | None,
    training: bool,
    rows: Rows = DENSE,
) -> Operands:
    """Return a weight's operands for a forward's products: by the first of the file's ways that is the weight's.

    ``weight_NK``: this rank's part, a view of the leaf ``parameter``; ``transposed``: whether backward multiplies by
    the weight; ``state``: what ``fresh_state`` returned; ``rows``: how the rows that it is multiplied by lie.
    """
    # stored or gathered
    if module.exchange is not None and (stored := local_stored(parameter)) is not None:
        weight: Tensor = stored  # this rank's experts, of which ``weight_NK`` is a view
    else:
        weight = parameter if rows.parts is None else weight_NK  # under tensor parallelism the part has its codes
    if isinstance(weight, HOLDING_CODES):
        _refuse_tracing()
        # by the class: torch.compile would make an op of a call of the tensor's own method
        return type(weight).operands(weight, module, transposed)  # type: ignore[arg-type]
    # the history is that of the module's parameter in training: not of a merged, averaged or swapped weight, and not
    # of one that is computed; but FSDP1 replaces its parameters by views of a gathered tensor
    is_parameter = isinstance(parameter, nn.Parameter) or is_under_fsdp(module)
    state = state if training and is_parameter else None
    # kept
    if training and rows.parts is None and module.fp8.kept_operands is not None:
        if (kept_operands := module.fp8.kept_operands.operands(parameter, state)) is not None:
            return kept_operands
    # cast in each forward; if the weight is freed after it, as it lies alone
    recipe, is_freed = module.fp8.recipe, transposed and is_freed_after_forward(module, parameter)
    request = CastRequest(recipe, WEIGHT, as_is=True, transposed=transposed and not is_freed, only_products=True)
    operands = cast_role(weight_NK.detach(), request, state, rows)
    if not is_parameter:  # backward commits what amax the operands have to the module's history, which isn't this one's
        operands = operands._replace(amax=None)
    return operands._replace(source=_source_of(module, weight_NK, parameter, state)) if is_freed else operands


def is_freed_after_forward(module: WeightReader, parameter: Tensor) -> bool:
    """Whether a weight is gathered by hooks other than octavo's, which free it between forward and backward.

    FSDP1 and FSDP2 resize the storage; ZeRO-3 gives the parameter other ``.data``.
    """
    return is_under_fsdp(module) or hasattr(parameter, "ds_id")


def _source_of(module: WeightReader, weight_NK: Tensor, parameter: Tensor, state: State | None) -> WeightSource:
    """Return the source from which backward casts a freed weight again; warn once of FSDP1 and ZeRO-3."""
    if module.fp8.gather.parameter is None and not torch.compiler.is_compiling():
        warn_once(
            "weights that others shard",
            "FSDP1 and DeepSpeed ZeRO-3 gather weights in high precision, and each rank casts whole weights in forward "
            "and again in backward; FSDP2 (torch.distributed.fsdp.fully_shard) gathers octavo's weights in FP8",
        )
    weight_cast, scale = module.fp8.recipe.weight_casts.transposed, None
    if state is not None and weight_cast is not None and weight_cast.is_delayed:
        scale = state.in_force(WEIGHT).clone()
    # for ZeRO-3 it is the parameter itself: a view would keep the gathered storage alive
    swaps = module.stores_transposed and hasattr(parameter, "ds_id")
    return WeightSource(parameter if swaps else weight_NK, swaps, scale)


@torch.no_grad()
def fp8_pair(module: WeightReader, training: bool, mp_policy: Any = None) -> tuple[Tensor, Tensor]:
    """Return (codes [N, K], scale_inv) that a forward's output product would read now, unpadded; for experts [E, ...].

    Of a weight that is in FP8 already (stored, kept) these are its own tensors, which the next step may write. A weight
    that FSDP2 has sharded is gathered alone, by the module's mode, under its group's ``mp_policy``; then collective.

    ``training``: True for a forward in training (by the delayed scale), False for evaluation (by the weight's amax).
    """
    parameter = module.weight_parameter
    weight: Tensor = parameter
    if is_dtensor(parameter):
        if (stored := local_stored(parameter)) is not None:
            codes, scale_inv = whole_pair(parameter, stored)
            return (codes.mT, scale_inv.mT) if module.stores_transposed else (codes, scale_inv)
        weight = gather_alone(parameter, cast(nn.Module, module), mp_policy)
    state = None if isinstance(weight, HOLDING_CODES) else fresh_state(module, parameter, training, weight.device)
    weight_NK = weight.mT if module.stores_transposed else weight
    operands = fp8_operands(module, weight_NK, weight, transposed=False, state=state, training=training)
    qdata, scale_inv = operands.as_is  # type: ignore[misc]
    scale_inv = plain_scales(scale_inv, qdata.shape, MX)
    return qdata[..., : parameter.shape[-2 if module.stores_transposed else -1]], scale_inv


def local_experts(parameter: Any, ranks: int) -> Tensor:
    """Return this rank's experts of a parameter [E, ...]; their gradients are divided by ``ranks``."""
    experts: Tensor = parameter.to_local()
    if experts.requires_grad:  # a view of the parameter, new in each forward; its gradient sums all ranks' tokens
        experts.register_hook(lambda grad: grad / ranks)
    return experts


def fresh_state(module: WeightReader, parameter: Tensor | None, training: bool, device: torch.device) -> State | None:
    """Forget the history of a weight that was written, and return the delayed state that a forward reads, or None.

    ``parameter``: the weight; None or a plain tensor if it is computed from other parameters.
    """
    if module.fp8.state is None:
        return None
    if training and not torch.compiler.is_compiling():
        weight = parameter if isinstance(parameter, nn.Parameter) else weight_of(module)
        if isinstance(weight, nn.Parameter):  # functional_call may have put another tensor in its place
            if type(on_this_rank(weight)) in (Tensor, nn.Parameter):  # its optimizer alone writes one in FP8
                forget_if_written(module, weight)
    return module.fp8.state_on(device)


def forget_if_written(module: WeightReader, weight: Tensor) -> None:
    """Forget the weight's history if anything but its optimizer wrote it; each cast in training calls it before.

    An EMA's or a merged LoRA's weight may be many times larger than the history says, and would saturate.
    """
    if module.fp8.weight_writes.since_last(weight):
        empty_state(module.fp8.state, WEIGHT)


def _refuse_tracing() -> None:
    """Raise UnsupportedOpError under torch.jit.trace: torch.jit.save would read memory that a weight in FP8 hasn't."""
    if tracing_state() is not None:
        raise UnsupportedOpError(
            "torch.jit.trace can't hold a weight that lives in FP8: use torch.export, or octavo.restore(model) first"
        )


def widened(weight: Any) -> Tensor:
    """Return a weight for a product in high precision, dequantised if it is stored in FP8; gradients flow to it."""
    if not isinstance(on_this_rank(weight), HOLDING_CODES):
        return weight
    _refuse_tracing()
    if not is_dtensor(weight):
        return dequantized(weight)
    from torch.distributed.tensor import DTensor

    options = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(dequantized(weight.to_local()), weight.device_mesh, weight.placements, **options)


def why_unreadable(weight: Tensor) -> str | None:
    """Return the class of a weight that FP8 products can't read, to end "weights that are ..."; or None."""
    kind = type(on_this_rank(weight))  # for a DTensor the class of each rank's shard
    if not hasattr(kind, "__tensor_flatten__") or issubclass(kind, HOLDING_CODES):
        return None
    return f"{kind.__module__}.{kind.__qualname__} (another library's, quantised perhaps)"


def check_readable(recipe: Recipe, weight: Tensor | None) -> None:
    """Raise ValueError if a recipe can't read a weight as it is stored."""
    if weight is None or recipe.is_high_precision:
        return
    if what := why_unreadable(weight):
        raise ValueError(
            f"the recipe {recipe.name!r} can't read weights that are {what}. Take this layer out of FP8 first: "
            "octavo.restore(layer), or octavo.set_recipe(layer, octavo.recipes.high_precision())"
        )
    if recipe.has_e2m1 and weight.ndim == 3:
        raise ValueError(
            f"the recipe {recipe.name!r} casts to E2M1, which rows in groups are not cast to yet: give experts another "
            'recipe, e.g. octavo.RecipeMap(recipe, {"*.experts*": octavo.recipes.mx()})'
        )
    if (granularity := stored_as(weight)) is not None:
        check_stored_granularity(recipe, weight.shape, granularity)


def check_stored_granularity(recipe: Recipe, shape: torch.Size, stored: Granularity) -> None:
    """Raise ValueError if a recipe can't read a weight of this shape that is stored by this granularity."""
    shape = shape[-2:]
    if recipe.is_high_precision:
        return
    if reason := StoredWeight.why_not_storable(recipe, stored not in FROZEN_ONLY):
        raise ValueError(f"the recipe {recipe.name!r} can't read weights that are stored in FP8: {reason}")
    wanted = stored_granularity(recipe.weight_casts.as_is.granularity, shape)  # type: ignore[union-attr]
    if wanted.scale_shape(shape) != stored.scale_shape(shape):
        raise ValueError(
            f"the recipe {recipe.name!r} reads weights scaled {wanted}, but they are stored {stored}; "
            "octavo.convert(model, recipe, weight_storage='fp8') stores them anew"
        )


def weight_of(module: Any) -> nn.Parameter | None:
    """Return a module's weight, perhaps another module's parameter; None if others compute it (weight_norm)."""
    return getattr(module, "weight_owner", module)._parameters.get(getattr(module, "weight_key", "weight"))


def pair_reader(model: nn.Module) -> Callable[[WeightReader, bool], tuple[Tensor, Tensor]]:
    """Return ``fp8_pair`` of (the model's module, whether it is for training), by FSDP2's policy for the module."""
    policies = mp_policies(model)
    return lambda module, training: fp8_pair(module, training, policies.get(id(module.weight_parameter)))


@contextlib.contextmanager
def plain_within(module: nn.Module) -> Iterator[None]:
    """Give a module plain parameters in place of its weights in FP8 within a block, at whose end they are cast.

    All ranks that share a weight call it.
    """
    parameters: dict[str, Any] = module._parameters
    stored = {name: weight for name, weight in parameters.items() if local_stored(weight) is not None}
    parameters.update({name: nn.Parameter(widened(weight)) for name, weight in stored.items()})
    try:
        yield
    finally:
        values = {name: parameters[name].detach() for name in stored}
        parameters.update(stored)
    for name, weight in stored.items():
        load_stored(weight, values, name)
        weight.copy_(values[name])
