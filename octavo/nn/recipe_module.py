"""RecipeModule, the base of all FP8 modules; LayerFP8, which holds all that such a module keeps beside parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from octavo.autograd.exchange import Exchange
from octavo.autograd.grouped import grouped_linear
from octavo.autograd.observer import Observer
from octavo.autograd.products import Layer, linear
from octavo.autograd.rows import DENSE, Parts, Rows
from octavo.autograd.shared_casts import InputCasts, casts_to_share
from octavo.errors import UnsupportedOpError
from octavo.kernels.capability import warn_once_if_emulated
from octavo.nn.inputs import finds_shapes, grouped_dtype, product_dtype, refuse_for_fp8
from octavo.nn.tensor_parallel import LayerTensors, parallel_product, sending_of
from octavo.nn.where import warn_once_if_slower
from octavo.private import is_dtensor, tracing_state
from octavo.recipes import as_recipe
from octavo.scaling.delayed import State, empty_state, facts_of, may_be_empty, state_under
from octavo.scaling.recipe import WEIGHT, Recipe
from octavo.weights.fsdp2 import FirstHookResult, GatheredWeight, Unshard
from octavo.weights.gathered import Gather, check_layers_agree
from octavo.weights.operands import (
    WeightOwner,
    check_readable,
    fp8_operands,
    fresh_state,
    local_experts,
    weight_of,
    widened,
)
from octavo.weights.stored import local_stored
from octavo.weights.writes import KeptOperands, WeightWrites


class LayerFP8:
    """The state of a RecipeModule for FP8 beside its parameters: its attribute ``fp8``, the only one added to it.

    field          who writes it                          how long it holds
    recipe         ``module.recipe = ...``                until it is written again
    state          backward commits; loads, resets        while recipes are delayed; what is known of it without reading
                                                          it, and for how long: StateFacts in scaling/delayed.py
    weight_writes  each cast in training; loads           until another recipe; a copy of the module begins anew
    kept_operands  KeptWeights.cast()                     until a move, a load, another recipe or ``invalidate``, and
                                                          while its ``operands`` finds the weight unwritten
    gather         FSDP2's hooks, weights/gathered.py     as long as the module; its codes: GatherGroup
    observer       octavo.inspect                         until it is removed; it sees casts and products
    outer          octavo.using: a copy of this object    until the block's end, when recipe, state, weight_writes and
                   from outside its block                 kept_operands are taken back
    """

    recipe: Recipe
    weight_writes: WeightWrites

    def __init__(self) -> None:
        self.state: State | None = None
        self.kept_operands: KeptOperands | None = None
        self.gather = Gather()
        self.observer: Observer | None = None
        self.outer: LayerFP8 | None = None

    def set_recipe(self, recipe: Recipe, device: torch.device) -> None:
        """Cast by this recipe from the next forward on; a delayed state stays if the recipe can go on with it."""
        self.recipe, self.state = recipe, state_under(recipe.delayed, self.state, device)
        self.weight_writes, self.kept_operands = WeightWrites(), None
        self.gather.forget()

    def state_on(self, device: torch.device) -> State | None:
        """Return the delayed state, moved to this device: it is no parameter or buffer that torch would move."""
        state = self.state
        if state is not None and state.scale.device != device and device.type != "meta":
            state = self.state = state.on(device)
        return state

    def observe(self, **fields: Any) -> None:
        """Set fields of the observer; an observer with no field set is removed."""
        observer = (self.observer or Observer())._replace(**fields)
        self.observer = None if observer == (None, None) else observer

    def forget_weight(self) -> None:
        """Forget codes of the weight and the weight's history, as after a write that no counter shows."""
        self.kept_operands = None
        empty_state(self.state, WEIGHT)
        self.gather.was_written()


class RecipeModule(WeightOwner):
    """Base of octavo's modules; mixed in before the torch class that has the parameters."""

    fp8: LayerFP8
    exchange: Exchange | None = None  # between the ranks that hold the experts, whose parameters are then DTensors
    weight_key = "weight"  # the weight's name in the module that owns it
    part_name = ""  # this part's name in the module that owns the weight, if that is another
    stores_transposed = False  # whether a product reads the weight's parameter with its last two dimensions swapped

    @staticmethod
    def named_in(model: nn.Module) -> list[tuple[str, RecipeModule]]:
        """Return (name, module) of a model's RecipeModules, in the order of ``named_modules``."""
        return [(name, module) for name, module in model.named_modules() if isinstance(module, RecipeModule)]

    @property
    def parameters_device(self) -> torch.device:
        """The device of the parameters, of which the weight need not be one (weight_norm)."""
        return next(self.weight_owner.parameters()).device

    @property
    def recipe(self) -> Recipe:
        """The recipe of the next forward; graphs already built keep the recipe they were built with."""
        return self.fp8.recipe

    @recipe.setter
    def recipe(self, recipe_or_name: Recipe | str) -> None:
        if not isinstance(recipe := as_recipe(recipe_or_name), Recipe):
            raise TypeError(
                f"recipe={recipe!r} is no octavo.Recipe; octavo.set_recipe(model, recipe) takes one by layer"
            )
        check_readable(recipe, weight_of(self))
        device = self.parameters_device
        if not isinstance(self.__dict__.get("fp8"), LayerFP8):
            self.__dict__["fp8"] = LayerFP8()
        self.fp8.set_recipe(recipe, device)
        if not recipe.is_high_precision:
            warn_once_if_emulated(device)
            warn_once_if_slower(recipe, device)

    @contextlib.contextmanager
    def put_aside(self) -> Iterator[None]:
        """Put recipe and states aside for a block, which goes on with a copy of the delayed state; then take them back.

        Taken back are the very objects, which graphs built before the block may write.
        """
        fp8 = self.fp8
        outer = fp8.outer = copy.copy(fp8)
        fp8.state = None if fp8.state is None else fp8.state.clone()
        try:
            yield
        finally:
            if isinstance(self, RecipeModule):  # else octavo.restore has made it torch's meanwhile
                fp8 = self.fp8
                outer.weight_writes.replaced |= fp8.weight_writes.replaced
                fp8.outer, self.recipe = outer.outer, outer.recipe
                # they know the weight from before the block, and so notice writes in it
                fp8.weight_writes, fp8.kept_operands = outer.weight_writes, outer.kept_operands
                fp8.state = None if outer.state is None else outer.state.on(self.parameters_device)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, but refuse a weight that the recipe can't read."""
        if name == "weight" and "fp8" in self.__dict__:
            check_readable(self.recipe, param)
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
            if weight is not self.fp8.gather.parameter:
                self.fp8.gather.adopt(weight, whole, self)
                check_readable(self.recipe, weight)
        elif weight is not whole and self.fp8.gather.parameter is None:
            self.fp8.weight_writes.replaced = True

    @property
    def delayed_scale(self) -> Tensor:
        """[3] float32, see scaling/delayed.py; AttributeError without a delayed recipe."""
        return self._state_off_meta().scale

    @property
    def delayed_amax_history(self) -> Tensor:
        """[3, H] float32, see scaling/delayed.py; AttributeError without a delayed recipe."""
        return self._state_off_meta().amax_history

    def _state_off_meta(self) -> State:
        state = self.fp8.state
        if state is not None and state.scale.is_meta:  # made on the meta device; the weights may be loaded by now
            state = self.fp8.state_on(self.parameters_device)
        if state is None:
            raise AttributeError(f"the recipe {self.recipe.name!r} has no delayed state")
        return state

    @property
    def weight_owner(self) -> nn.Module:
        """The module that owns the weight: this one, or that of which this one is a part."""
        return self.__dict__.get("_weight_owner", self)

    @property
    def weight_readers(self) -> dict[str, RecipeModule]:
        return {"weight": self}

    @property
    def weight_parameter(self) -> nn.Parameter:
        """The parameter that holds the weight."""
        return self.weight_owner.get_parameter(self.weight_key)

    def own_parameters(self) -> tuple[Any, Any]:
        """Return (weight, bias or None), as they are stored."""
        return self.weight, self.bias

    def layer_tensors(self) -> LayerTensors:
        """Return the tensors of the module's products; for experts [E, ...]."""
        parameter, bias = self.own_parameters()
        weight = parameter
        if self.exchange is not None:
            ranks = self.exchange.size if self.exchange.average else 1
            weight, bias = local_experts(weight, ranks), None if bias is None else local_experts(bias, ranks)
        return weight.mT if self.stores_transposed else weight, bias, parameter

    def weight_name(self, name: str) -> str:
        """Return the weight's name in a model where this module has the name ``name``."""
        owner = name.rpartition(".")[0] if self.part_name else name
        return f"{owner}.{self.weight_key}".removeprefix(".")

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names that a RecipeMap's patterns may match for a module of this name."""
        return (name,)

    def settings(self) -> dict[str, object]:
        """Return the settings by which the module's tokens are sent, which must be equal on all ranks."""
        settings: dict[str, object] = {}
        if (sending := sending_of(self)) is not None:
            settings |= {"exact": sending.exact, "reduction in FP8": sending.reduce is not None}
        if (exchange := self.exchange) is not None:
            settings |= {"exact": exchange.exact, "average": exchange.average}
        return settings

    def before_gather(self, unshard: Unshard) -> FirstHookResult:
        """Return what FSDP2's first hook returns for the weight; see weights/gathered.py."""
        return self.fp8.gather.send(self, unshard)

    def reset_delayed_state(self) -> None:
        """Forget the history, also those that octavo.using has put aside: the next cast takes its own amax."""
        fp8: LayerFP8 | None = self.__dict__.get("fp8")  # torch's constructor initialises before there is a recipe
        if fp8 is not None:
            fp8.state_on(self.parameters_device)
        while fp8 is not None:
            empty_state(fp8.state)
            fp8 = fp8.outer

    def reset_parameters(self) -> None:
        """Initialise as the torch class does, a weight stored in FP8 too, and empty the delayed state."""
        super().reset_parameters()  # type: ignore[misc]
        self.reset_delayed_state()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move as any WeightOwner, and forget the weight's kept codes."""
        super()._apply(fn, recurse)
        fp8 = self.fp8
        fp8.kept_operands = None
        if (weight := self._parameters.get("weight")) is not None:
            warn_once_if_slower(fp8.recipe, weight.device)
        return self

    def weight_was_loaded(self, load: object) -> None:
        """Forget what belonged to the replaced weight; keep the delayed state if this load_state_dict loaded it too.

        ``load``: an object that all calls of one ``load_state_dict`` share.
        """
        fp8 = self.fp8
        facts = None if fp8.state is None else facts_of(fp8.state.scale)
        # of all layers that share the state; read before a reset, which clears what is known of the state
        loads_by_layer = {} if facts is None else facts.loads
        if facts is None or not facts.is_of(self, load):
            self.reset_delayed_state()
        else:
            self.state_was_loaded()
        if fp8.state is not None:
            facts_of(fp8.state.scale).loads = {**loads_by_layer, id(self): load}
        fp8.kept_operands = None
        fp8.gather.was_written()

    def state_was_loaded(self) -> None:
        """Note that the weight and its delayed state were loaded together."""
        self.fp8.weight_writes.were_loaded(weight_of(self))

    def _product(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return input [..., K] . weight^T + bias [N] by the module's recipe; ``offsets``: where groups of rows end."""
        tensors = weight, bias, _ = self.layer_tensors()
        parallel = offsets is None and is_dtensor(weight)
        if parallel:
            check_layers_agree([self], weight.device_mesh)  # type: ignore[attr-defined]
        dtype = product_dtype(input, weight) if offsets is None else grouped_dtype(input, weight, offsets)
        if self.fp8.recipe.is_high_precision:
            weight = widened(weight)
            if offsets is None:
                return nn.functional.linear(input, weight, bias)
            # torch's grouped product does not follow autocast by itself
            return grouped_linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), offsets)
        x = input if input.dtype == dtype else input.to(dtype)
        if parallel:
            return parallel_product(self, x, weight, bias)
        return self.local_product(x, tensors, casts_to_share(input, self), DENSE if offsets is None else Rows(offsets))

    def state_of_input(self) -> State | None:
        """Return the delayed state that a cast of the next input reads."""
        return fresh_state(self, weight_of(self), self.training, self.parameters_device)

    def local_product(self, input: Tensor, tensors: LayerTensors, x_casts: InputCasts | None, rows: Rows) -> Tensor:
        """Return ``_product`` in FP8, of tensors of one dtype; of this rank's parts, if ranks share the parameter.

        ``x_casts``: those of the tensor that ``input`` is or is rounded from, if layers share them.
        """
        weight_NK, bias, parameter = tensors
        refuse_for_fp8(input, parameter, bias)
        return linear(input, weight_NK, bias, self.layer_of(input, tensors, input.requires_grad, rows), x_casts)

    def layer_of(self, input: Tensor, tensors: LayerTensors, needs_input_grad: bool, rows: Rows = DENSE) -> Layer:
        """Return the Layer of products with ``input``: the weight's operands, recipe, state and other settings."""
        weight_NK, _, parameter = tensors
        fp8 = self.fp8
        grad_enabled = torch.is_grad_enabled() and tracing_state() is None
        state = fresh_state(self, parameter, self.training, input.device)
        # experts are whole on each rank; only amaxes for the history are shared
        parts = rows.parts if self.exchange is None else Parts(self.exchange.group, (False,) * 3)
        if parts is not None:  # after fresh_state, which empties the history of a weight that was written
            scale_may_be_empty = state is not None and may_be_empty(state.scale)  # ranks then take the tensor's amax
            rows = rows._replace(parts=parts._replace(scale_may_be_empty=scale_may_be_empty))
        weight = fp8_operands(self, weight_NK, parameter, grad_enabled and needs_input_grad, state, self.training, rows)
        commits = self.training and grad_enabled  # whether the forward counts, for the history and for observers
        if commits and (state is not None or fp8.observer is not None) and finds_shapes():
            if torch.compiler.is_compiling() and state is not None:
                raise UnsupportedOpError(
                    "a compiled stage of a pipeline finds shapes by a forward over memory that nobody wrote, which "
                    "delayed scaling would take for amaxes; give PipelineStage input_args= and output_args="
                )
            # nothing enters the history, and no observer counts; a graph that is compiled now runs again later
            commits = torch.compiler.is_compiling()
        observers = (fp8.observer,) if commits and fp8.observer is not None else ()
        return Layer(weight, fp8.recipe, state, commits, observers, rows)

    @property
    def observing(self) -> Observer | None:
        """The observer of a forward that runs now; None in evaluation."""
        return self.fp8.observer if self.training and torch.is_grad_enabled() else None


def readers_of(owner: WeightOwner) -> list[RecipeModule]:
    """Return the modules that multiply by the owner's weights."""
    return [reader for reader in owner.weight_readers.values() if isinstance(reader, RecipeModule)]


def invalidate(model: nn.Module) -> None:
    """Forget scales and codes of weights that your code wrote through ``.data`` outside any torch.optim.Optimizer.

    These are a weight's history under a delayed recipe, by whose scale much larger values would saturate, and the codes
    of KeptWeights, until their next ``cast()``. Octavo keeps nothing else of a weight from one forward to the next.
    Under FSDP2 call it on all ranks.

    Args:
        model: any module.

    Example:
        >>> import torch, octavo
        >>> layer = octavo.nn.Linear(64, 64, recipe=octavo.recipes.delayed())
        >>> _ = layer.weight.data.mul_(20)
        >>> octavo.nn.invalidate(layer)
    """
    for _, module in RecipeModule.named_in(model):
        module.fp8.forget_weight()
