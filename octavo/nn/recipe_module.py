"""RecipeModule, the base of all FP8 modules: a recipe, and delayed state if the recipe is delayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from octavo.autograd.exchange import Exchange
from octavo.autograd.grouped import grouped_linear
from octavo.autograd.products import Layer, linear
from octavo.autograd.rows import DENSE, Parts, Rows
from octavo.autograd.shared_casts import ReadTensor, read_by
from octavo.errors import UnsupportedOpError
from octavo.kernels.capability import warn_once_if_emulated
from octavo.nn.gather import Gather, check_layers_agree
from octavo.nn.inputs import finds_shapes, grouped_dtype, is_parallel, product_dtype, refuse_for_fp8
from octavo.nn.tensor_parallel import LayerTensors, parallel_product
from octavo.nn.weight import (
    WeightOwner,
    WeightWrites,
    as_NK,
    check_recipe,
    fp8_operands,
    of_this_rank,
    state_for,
    weight_of,
    widened,
)
from octavo.nn.where import warn_once_if_slower
from octavo.private import parameter_registration_hooks, tracing_state
from octavo.recipes import as_recipe
from octavo.scaling.delayed import (
    ASIDE,
    LOADED,
    STATE,
    State,
    empty_state,
    loaded_state,
    may_be_empty,
    note_loaded,
    register_delayed_state,
    state_of,
)
from octavo.scaling.recipe import Recipe
from octavo.tensor.fsdp2 import GatheredWeight
from octavo.tensor.stored_weight import local_stored


class RecipeModule(WeightOwner):
    """Base of octavo's modules; mixed in before the torch class that has the parameters."""

    recipe: Recipe
    delayed_state: State  # where the recipe is delayed
    weight_writes: WeightWrites
    kept_operands: Any  # the KeptOperands of KeptWeights, or None
    observer: Any = None  # octavo.inspect's, which sees the casts and products of forward and backward
    exchange: Exchange | None = None  # between the ranks that hold the experts, whose parameters are then DTensors
    weight_key = "weight"  # the weight's name in the module that owns it
    part_name = ""  # this part's name in the module that owns the weight, if that is another
    stores_transposed = False  # whether a product reads the weight's parameter with its last two dimensions swapped

    def _set_recipe(self, setting: Recipe | str) -> None:
        """Set ``module.recipe`` from the next forward on; graphs already built keep the recipe they were built with."""
        recipe = as_recipe(setting)
        if not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe={recipe!r} is no octavo.Recipe; octavo.set_recipe(model, recipe) takes one by layer"
            )
        for weight in self.weights:
            check_recipe(recipe, weight)
        device = device_of(self)
        self.__dict__["recipe"] = recipe
        self.weight_writes, self.kept_operands = WeightWrites(), None
        self.gather.forget()
        register_delayed_state(self, recipe.delayed, device)
        if not recipe.is_high_precision:
            warn_once_if_emulated(device)
            warn_once_if_slower(recipe, device)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; check a recipe first, and let nn/gather.py gather a weight that FSDP2 has sharded."""
        parameters = self.__dict__.get("_parameters")
        if parameters is not None and name in parameters and isinstance(value, nn.Parameter):
            if name == "weight":
                self.take_parameter(value, parameters[name])
            if not parameter_registration_hooks:
                parameters[name] = value  # as torch does after checks; FSDP2 sets weights four times a step
                return
        elif name == "recipe":
            return self._set_recipe(value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, but refuse a weight that the recipe can't read."""
        if name == "weight" and "recipe" in self.__dict__:
            check_recipe(self.recipe, param)
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise UnsupportedOpError, as torch.jit.script calls this."""
        raise UnsupportedOpError(
            "torch.jit.script can't compile FP8 products: use torch.jit.trace(model, inputs), torch.export or "
            "torch.compile; or octavo.restore(model) first"
        )

    def take_parameter(self, weight: nn.Parameter, whole: nn.Parameter | None) -> None:
        """Note that the parameter ``weight`` replaces ``whole``, perhaps as FSDP2's shards of it."""
        if self.exchange is not None:  # FSDP2 gathers weights as they are stored
            if self.part_name and (stored := local_stored(weight)) is not None:
                stored.part = self.part_name
        elif type(weight) not in (nn.Parameter, GatheredWeight):
            if weight is not self.gather.parameter:
                self.gather.adopt(weight, whole, self)
                check_recipe(self.recipe, weight)
        elif weight is not whole and self.gather.parameter is None:
            self.weight_writes.replaced = True

    @property
    def delayed_scale(self) -> Tensor:
        """[3] float32, see scaling/delayed.py; AttributeError without a delayed recipe."""
        return self._state_off_meta().scale

    @property
    def delayed_amax_history(self) -> Tensor:
        """[3, H] float32, see scaling/delayed.py; AttributeError without a delayed recipe."""
        return self._state_off_meta().amax_history

    def _state_off_meta(self) -> State:
        if self.delayed_state.scale.is_meta:  # made on the meta device; the weights may be loaded by now
            self.state_on(device_of(self))
        return self.delayed_state

    @property
    def holder(self) -> nn.Module:
        """The module that owns the weight."""
        return self

    @property
    def weights(self) -> list[nn.Parameter | None]:
        """The module's weight, as ``weight_of`` returns it; the weight of each split if these are on several ranks."""
        return [weight_of(self)]

    @property
    def weight_readers(self) -> dict[str, Any]:
        return {"weight": self}

    @property
    def weight_parameter(self) -> nn.Parameter:
        """The parameter that holds the weight."""
        return self.holder.get_parameter(self.weight_key)

    def own_parameters(self) -> tuple[Any, Any]:
        """Return (weight, bias or None), as they are stored."""
        return self.weight, self.bias

    def operands(self) -> LayerTensors:
        """Return the tensors of the module's products; for experts [E, ...]."""
        parameter, bias = self.own_parameters()
        weight = parameter
        if self.exchange is not None:
            ranks = self.exchange.size if self.exchange.average else 1
            weight, bias = of_this_rank(weight, ranks), None if bias is None else of_this_rank(bias, ranks)
        return as_NK(self, weight), bias, parameter

    def weight_name(self, name: str) -> str:
        """Return the weight's name in a model where this module has the name ``name``."""
        return f"{name}.weight".removeprefix(".")

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names that a RecipeMap's patterns may match for a module of this name."""
        return (name,)

    @property
    def gather(self) -> Gather:
        """The state that the module keeps for gathers of its weight; created when first read."""
        gather: Gather | None = self.__dict__.get("_gather")
        if gather is None:
            gather = self.__dict__["_gather"] = Gather()
        return gather

    def before_gather(self, shard: Tensor, mesh: Any, outer_size: torch.Size, mp_policy: Any) -> Any:
        """Return what FSDP2's first hook returns for the weight; see nn/gather.py."""
        return self.gather.send(self, shard, mesh, outer_size, mp_policy)

    def reset_delayed_state(self) -> None:
        """Forget the history, also those that octavo.using has put aside: the next cast takes its own amax."""
        for state in (self.state_on(device_of(self)), *self.__dict__.get(ASIDE, ())):
            empty_state(state)

    def state_on(self, device: torch.device) -> State | None:
        """Return the delayed state, moved to this device: it is no parameter or buffer that torch would move."""
        state = state_of(self)
        if state is not None and state.scale.device != device and device.type != "meta":
            state = self.__dict__[STATE] = state.on(device)
        return state

    def reset_parameters(self) -> None:
        """Initialise as the torch class does, a weight stored in FP8 too, and empty the delayed state."""
        super().reset_parameters()  # type: ignore[misc]
        self.reset_delayed_state()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move parameters and buffers, and the delayed state after them."""
        super()._apply(fn, recurse)
        # the state of experts' parts moves in the next forward
        if self.holder is self and (state := state_of(self)) is not None:
            self.__dict__[STATE] = state.on(device_of(self))
        self.kept_operands = None
        if (weight := self._parameters.get("weight")) is not None:
            warn_once_if_slower(self.recipe, weight.device)
        return self

    def weight_was_loaded(self, load: object) -> None:
        """Forget state of the weight before this load; but not the delayed state, if this load has loaded it too.

        ``load``: an object that all calls of one ``load_state_dict`` share.
        """
        noted = loaded_state(self)
        if noted is None or (noted.load is not None and noted.load is not load):
            self.reset_delayed_state()
        else:
            self.weight_writes.were_loaded(self.weights)
        note_loaded(self, load)
        self.kept_operands = None
        self.gather.generation += 1

    def _product(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return input [..., K] . weight^T + bias [N] by the module's recipe; ``offsets``: where groups of rows end."""
        tensors = weight, bias, _ = self.operands()
        parallel = offsets is None and is_parallel(weight)
        if parallel:
            check_layers_agree([self], weight.device_mesh)  # type: ignore[attr-defined]
        dtype = product_dtype(input, weight) if offsets is None else grouped_dtype(input, weight, offsets)
        if self.recipe.is_high_precision:
            weight = widened(weight)
            if offsets is None:
                return nn.functional.linear(input, weight, bias)
            # torch's grouped product does not follow autocast by itself
            return grouped_linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), offsets)
        x = input if input.dtype == dtype else input.to(dtype)
        if parallel:
            return parallel_product(self, x, weight, bias)
        return self.local_product(x, tensors, read_by(input, self), DENSE if offsets is None else Rows(offsets))

    def state_of_input(self) -> State | None:
        """Return the delayed state that a cast of the next input reads."""
        return state_for(self, weight_of(self), self.training, device_of(self))

    def local_product(
        self, input: Tensor, tensors: LayerTensors, read: ReadTensor | None, rows: Rows = DENSE
    ) -> Tensor:
        """Return ``_product`` in FP8, of tensors of one dtype; of this rank's parts, if ranks share the parameter.

        ``read``: the tensor that ``input`` is or is rounded from, if layers share its casts.
        """
        weight_NK, bias, parameter = tensors
        refuse_for_fp8(input, parameter, bias)
        layer = self.layer_of(input, tensors, input.requires_grad, rows)
        return linear(input, weight_NK, bias, layer, read)

    def layer_of(self, input: Tensor, tensors: LayerTensors, needs_input_grad: bool, rows: Rows = DENSE) -> Layer:
        """Return the Layer of products with ``input``: the weight's operands, recipe, state and other settings."""
        weight_NK, _, parameter = tensors
        recipe, grad_enabled = self.recipe, torch.is_grad_enabled() and tracing_state() is None
        if self.exchange is not None:
            rows = Rows(rows.offsets, Parts(self.exchange.group, (False,) * 3))
        state = state_for(self, parameter, self.training, input.device)
        if rows.parts is not None:  # after state_for, which empties the history of a weight that was written
            begins = state is not None and may_be_empty(state.scale)
            rows = rows._replace(parts=rows.parts._replace(begins=begins))
        transposed = grad_enabled and needs_input_grad
        weight = fp8_operands(self, weight_NK, parameter, transposed, state, self.training, rows)
        training = self.training and grad_enabled
        if training and state is not None and finds_shapes():
            if torch.compiler.is_compiling():
                raise UnsupportedOpError(
                    "a compiled stage of a pipeline finds shapes by a forward over memory that nobody wrote, which "
                    "delayed scaling would take for amaxes; give PipelineStage input_args= and output_args="
                )
            training = False  # nothing enters the history
        return Layer(weight, recipe, state, training, self.observer if training else None, rows)

    @property
    def observing(self) -> Any:
        """The observer of a forward that runs now; None in evaluation."""
        return self.observer if self.training and torch.is_grad_enabled() else None

    def forget_recipe(self) -> None:
        """Delete the attributes that setting a recipe added."""
        for name in (STATE, LOADED, "recipe", "weight_writes", "kept_operands", "_gather"):
            self.__dict__.pop(name, None)


def device_of(module: RecipeModule) -> torch.device:
    """Return the device of a module's parameters; its weight need not be one of them (weight_norm)."""
    return next(module.holder.parameters()).device
