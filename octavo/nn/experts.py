"""Mixtures of experts: tokens sorted by expert, two grouped products with an activation between them, and back.

Legend: T tokens, k experts a token, S = T * k rows, E experts, H hidden size, I intermediate size. Nothing reads on the
host which expert got how many rows: all sizes depend on T, k and E alone, so that a compiled step is one graph for any
routing.

Octavo's own module, and those of other libraries in place: their parameters and names stay, parts compute their
products. Known by structure are

    transformers   (integrations/moe.py) the experts of every model that has the decorator use_experts_implementation:
                   3-D parameters gate_up_proj (or up_proj, without a gate) and down_proj, with _bias or without,
                   [E, out, in] or [E, in, out], flags that say which, and the decorator's forward
    torchtitan     (models/common/moe.py) GroupedExperts: w1 (gate) and w3 (up) [E, I, H], w2 (down) [E, H, I], in 0.3
                   w1_EFD and so on, and a forward of tokens sorted by expert and each expert's number of them, which
                   names silu
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.autograd.casts import as_rows
from octavo.autograd.grouped import Routing
from octavo.autograd.rows import Rows
from octavo.kernels.activations import ACTIVATIONS, FUNCTIONS_OF_CLASSES, activation_of
from octavo.kernels.reference.activation import activate
from octavo.nn.bytecode import code_within
from octavo.nn.fused import can_fuse, run_as_one
from octavo.nn.inputs import grouped_dtype, not_a_tensor_error
from octavo.nn.linear import Grouped, GroupedLinear, recipe_for
from octavo.nn.tensor_parallel import FusedParts
from octavo.private import assert_async, tracing_state
from octavo.scaling.recipe import Recipe, RecipeMap
from octavo.weights.files import SCALE_INV
from octavo.weights.operands import WeightOwner


class _GatheredRows(torch.autograd.Function):
    """Returns rows[i] = x[index[i] // k]; the gradient is a gather by ``index``'s inverse, where torch scatters."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x[index // k]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, inverse, ctx.k = inputs
        ctx.save_for_backward(index, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, inverse = ctx.saved_tensors
        dx = grads[0][inverse]
        return dx if ctx.k == 1 else dx.unflatten(0, (len(inverse) // ctx.k, ctx.k)).sum(1), None, None, None


def _gather_rows(x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
    records = torch.is_grad_enabled() and tracing_state() is None
    return _GatheredRows.apply(x, index, inverse, k) if records else x[index // k]


ExpertsFunction = Callable[[Tensor, Tensor], Tensor]  # what experts compute of (rows [S, H], offsets)
Activate = Callable[[Tensor], Tensor]  # an activation without a product


def mix(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: int, limit: int, compute: ExpertsFunction
) -> Tensor:
    """Return each token's sum over its experts of weight times ``compute(rows [S, H], offsets)``, in ``x``'s dtype.

    Numbers of experts are below ``limit``; those of ``experts`` or more add nothing. Raises as Experts does.
    """
    if not isinstance(x, Tensor):
        raise not_a_tensor_error(x)
    x_TH = as_rows(x)
    if top_k_index.shape != top_k_weights.shape or top_k_index.ndim != 2 or top_k_index.shape[0] != x_TH.shape[0]:
        raise ValueError(
            f"top_k_index {list(top_k_index.shape)} and top_k_weights {list(top_k_weights.shape)} must both be "
            f"[{x_TH.shape[0]} tokens, k]"
        )
    if top_k_index.is_floating_point() or not top_k_weights.is_floating_point():
        raise TypeError(
            f"top_k_index is {top_k_index.dtype}, experts' numbers are integers; top_k_weights is {top_k_weights.dtype}"
        )
    if top_k_index.device.type == "cpu":  # a GPU would have to be waited for
        in_range = (top_k_index >= 0).logical_and(top_k_index < limit).all()
        assert_async(in_range, f"top_k_index holds numbers of experts that are not below {limit}")
    routing = Routing.by_expert(top_k_index.reshape(-1), experts)
    k = top_k_index.shape[1]
    rows = _gather_rows(x_TH, routing.order, routing.inverse, k)
    y = _gather_rows(compute(rows, routing.offsets), routing.inverse, routing.order, 1)
    by_token = *x.shape[:-1], k
    weighted_sum = (y.view(*by_token, y.shape[1]) * top_k_weights.reshape(*by_token, 1)).sum(-2)
    return weighted_sum.to(x.dtype)  # no view, of which FSDP2 warns


def feed_forward(
    rows: Tensor, offsets: Tensor, gate_up: Grouped, down: Grouped, activation: str | None, activate_alone: Activate
) -> Tensor:
    """Return down's product of an activation of gate_up's; known activations and their gradients are fused into casts.

    ``rows`` [S, H] are sorted by expert and end at ``offsets``. ``activation``: a name of kernels/activations.py, or
    None if ``activate_alone``, which computes it without a product, is none of them.
    """

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        linears = gate_up, down
        if activation is None or not can_fuse(linears):
            return down(activate_alone(gate_up(rows, offsets)), offsets)
        tensors = [linear.layer_tensors() for linear in linears]
        dtype = grouped_dtype(rows, tensors[0][0], offsets)
        parts = FusedParts(rows.to(dtype), tensors, rows=(Rows(offsets),) * 2)
        return run_as_one(parts, None, linears, activation, dtype)

    if gate_up.feed_forward_on_ranks is not None:
        return gate_up.feed_forward_on_ranks(rows, offsets, gate_up, down, compute)
    return compute(rows, offsets)


class Experts(nn.Module):
    """A mixture's experts: of each token's k experts, the weighted sum of ``down(activation(gate_up(x)))``.

    What a loop over experts computes, in two grouped products forward and four backward. With a recipe in FP8 the
    activation and its gradient write the pairs that products read, as octavo.nn.LayerNormMLP. The router, which says
    what ``top_k_index`` and ``top_k_weights`` are, is the model's own, in high precision.

    Args:
        experts: E, how many.
        hidden_size: H, features in and out.
        intermediate_size: I, features of the activation's output.
        activation: a name as of octavo.nn.LayerNormMLP; of a gated one ``gate_up.weight`` is (gate | up) [E, 2I, H].
        bias: of the two linear layers.
        device: where the parameters are created.
        dtype: bfloat16, float16 or float32.
        recipe: an octavo.Recipe or RecipeMap (of the names "gate_up" and "down"); octavo.recipes.default() by default.
            The ``saved`` of the recipe of "down" says how backward's copy of the activation's input is kept.

    Shape:
        hidden_states [..., H] of T tokens; top_k_index [T, k], integers below E; top_k_weights [T, k], to which
        gradients flow. Result as hidden_states, of their dtype.

    Raises:
        ValueError: for another activation, or shapes that do not fit.
        TypeError: for float64, indices that are no integers, or input and weights of different dtypes.
        RuntimeError: on a CPU, for numbers of experts that there are not; a GPU does not look at them.
        HigherOrderGradientError: as octavo.nn.Linear.

    Source:
        transformers' experts modules, whose forward has these arguments.

    Example:
        >>> import torch, octavo
        >>> experts = octavo.nn.Experts(8, 64, 128, recipe=octavo.recipes.blockwise())
        >>> x, router = torch.randn(2, 5, 64), torch.nn.Linear(64, 8)
        >>> weights, index = router(x.flatten(0, 1)).softmax(-1).topk(2)
        >>> experts(x, index, weights).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | RecipeMap | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        rows = intermediate_size * (2 if activation_of(activation).gated else 1)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_up = GroupedLinear(experts, hidden_size, rows, **options, recipe=recipe_for(recipe, "gate_up"))
        self.down = GroupedLinear(experts, intermediate_size, hidden_size, **options, recipe=recipe_for(recipe, "down"))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:

        def compute(rows: Tensor, offsets: Tensor) -> Tensor:
            name = self.activation
            return feed_forward(rows, offsets, self.gate_up, self.down, name, lambda h: activate(h, name))

        experts = self.gate_up.experts
        return mix(hidden_states, top_k_index, top_k_weights, experts, experts, compute)

    def extra_repr(self) -> str:
        """Return the activation's name."""
        return f"activation={self.activation}"


# --- experts modules of other libraries -------------------------------------------------------------------------------

TITAN = {"gate": "w1", "up": "w3", "down": "w2"}, {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def keys_of(module: nn.Module) -> dict[str, str]:
    """Return {part's name: matrix's name} of a module; {} if it holds no experts of a known kind."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if keys := next((titan for titan in TITAN if parameters.keys() == set(titan.values())), {}):
        _, *others = inspect.signature(module.forward).parameters
        takes_counts = others in (["num_tokens_per_expert"], ["num_tokens_per_expert_E"])
        keys = keys if takes_counts and _names_silu(type(module)) else {}
    elif all(isinstance(vars(module).get(flag), bool) for flag in _FLAGS) and _has_library_forward(type(module)):
        keys = {"gate_up": "gate_up_proj" if module.has_gate else "up_proj", "down": "down_proj"}
        biases = {f"{key}_bias" for key in keys.values() if module.has_bias}
        keys = keys if parameters.keys() == {*keys.values(), *biases} else {}
    return keys if all(parameters[key].ndim == 3 for key in keys.values()) else {}


def _has_library_forward(kind: type[nn.Module]) -> bool:
    """Whether a class's forward is transformers', as its decorator leaves it, or octavo's, or missing (torch's).

    One that a subclass defines over it may compute something else.
    """
    scope: dict[str, Any] = getattr(kind.forward, "__globals__", {})
    return str(scope.get("__name__")).partition(".")[0] in ("octavo", "torch", "transformers")


def _names_silu(kind: type[nn.Module]) -> bool:
    """Whether a class's forward names silu, or a function does that it calls, of its class or its file.

    Experts with another activation may have the same parameters.
    """
    waiting: list[Any] = [kind.forward]
    seen: set[Any] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not inspect.isfunction(function) or function in seen or function.__module__.startswith("torch."):
            continue
        seen.add(function)
        names = {name for code in code_within(function.__code__) for name in (*code.co_names, *code.co_freevars)}
        if "silu" in names:
            return True
        scopes = function.__globals__, *map(vars, kind.__mro__), inspect.getclosurevars(function).nonlocals
        waiting += [scope.get(name) for scope in scopes for name in names]
    return False


def recipe_names(module_name: str, part: str, key: str) -> tuple[str, ...]:
    """Return the names of an experts' part that a RecipeMap's patterns may match."""
    return module_name, *(f"{module_name}.{suffix}".lstrip(".") for suffix in (part, key))


class ExpertsPart(Grouped):
    """One matrix of every expert of a module: the recipe and state of its product; the module owns the parameter."""

    def __init__(self, owner: nn.Module, name: str, key: str) -> None:
        super().__init__()
        self.part_name, self.weight_key = name, key
        self.__dict__["_weight_owner"] = owner  # no attribute, so that it is no child of its part

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names that a RecipeMap's patterns may match: the module's, its part's and the parameter's."""
        return recipe_names(name.rpartition(".")[0], self.part_name, self.weight_key)

    @property
    def stores_transposed(self) -> bool:  # type: ignore[override]
        """Whether the parameter is [E, in, out]."""
        return getattr(self.weight_owner, "is_transposed", False)

    def own_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return getattr(self.weight_owner, self.weight_key), getattr(self.weight_owner, f"{self.weight_key}_bias", None)

    def reset_parameters(self) -> None:
        """Empty the delayed state; the module that owns the parameters resets them."""
        self.reset_delayed_state()

    def extra_repr(self) -> str:
        """Return the parameter's and the recipe's names."""
        return f"{self.weight_key}, recipe={self.recipe.name}"


class ConvertedExperts(WeightOwner):
    """Mixed into experts modules of other libraries by convert: adds parts, and a forward by their recipes."""

    @property
    def parts(self) -> list[ExpertsPart]:
        """The parts, which have no parameters."""
        return [part for part in self._modules.values() if isinstance(part, ExpertsPart)]

    @property
    def weight_readers(self) -> dict[str, ExpertsPart]:
        return {part.weight_key: part for part in self.parts}

    @property
    def is_parallel(self) -> bool:
        """Whether the experts are on several ranks."""
        return any(part.exchange is not None for part in self.parts)

    def add_parts(self) -> None:
        """Add a new part for each matrix."""
        for name, key in keys_of(self).items():
            self.add_module(name, ExpertsPart(self, name, key))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, such as a matrix's ``<name>_scale_inv``, which is as RecipeModule.weight_scale_inv."""
        if name.endswith(SCALE_INV) and (part := self.weight_readers.get(name.removesuffix(SCALE_INV))) is not None:
            return part.weight_scale_inv
        return super().__getattr__(name)


class TransformersExperts(ConvertedExperts):
    """transformers' experts modules, converted."""

    gate_up: ExpertsPart
    down: ExpertsPart
    num_experts: int
    post_expert_norm: nn.Module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum over experts, as octavo.nn.Experts does."""

        def compute(rows: Tensor, offsets: Tensor) -> Tensor:
            activate_alone: Any = self._apply_gate if self.has_gate else self.act_fn
            y = feed_forward(rows, offsets, self.gate_up, self.down, _activation_of(self), activate_alone)
            return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y

        # under transformers' expert parallelism the number E stands for every expert of other ranks
        limit = self.num_experts + 1 if getattr(self, "_is_expert_parallel", False) else self.num_experts
        return mix(hidden_states, top_k_index, top_k_weights, self.num_experts, limit, compute)


class TorchtitanExperts(ConvertedExperts):
    """torchtitan's GroupedExperts, converted; gate and up are two matrices, and each casts the tokens itself."""

    gate: ExpertsPart
    up: ExpertsPart
    down: ExpertsPart

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Return the experts' outputs [T, H] of x [T, H]; ``num_tokens_per_expert`` [E], of any dtype, counts rows."""
        offsets = num_tokens_per_expert.cumsum(0).to(torch.int32)
        h = nn.functional.silu(self.gate(x, offsets)) * self.up(x, offsets)
        return self.down(h, offsets).to(x.dtype)


def function_of(act: nn.Module | None) -> str | None:
    """Return the name in kernels/activations.py of an activation module's function (torch, transformers); or None."""
    if type(act) is nn.GELU:
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    kind = type(act)
    library = kind.__module__.partition(".")[0]  # a class of the model's own may have the name of another function
    return FUNCTIONS_OF_CLASSES.get(kind.__name__) if library in ("torch", "transformers") else None


def name_of(function: str | None, gated: bool) -> str | None:
    """Return the name in kernels/activations.py of a function, or of a gate by it; or None."""
    # not `known == (function, gated)`, which is False where torch 2.11 compiles it
    return next((name for name, it in ACTIVATIONS.items() if it.function == function and it.gated == gated), None)


def _activation_of(module: nn.Module) -> str | None:
    """Return the name of a module's activation, or None if casts don't compute it."""
    gate: Any = getattr(type(module), "_apply_gate", None)
    has_special_gate = not module.is_concatenated or getattr(gate, "__name__", "") != "_default_apply_gate"
    gated = bool(module.has_gate)
    return None if gated and has_special_gate else name_of(function_of(getattr(module, "act_fn", None)), gated)
