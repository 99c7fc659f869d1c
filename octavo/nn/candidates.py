"""The choice of modules that convert takes, the class that each gets, and the reasons to leave others alone.

| reasons why a module stays as it is | test | is asked by |
|---|---|---|
| it can't be converted | ``why_left_alone`` | ``why_not_selected``; convert with a ``select`` |
| the same, and it is no linear layer, or too small | ``why_not_selected`` | convert without a ``select``; summary |
| its weight is read without a call of it | ``reads_of_weights`` | convert, summary |
| all of these, or its ``select`` leaves it out | ``_why_not_chosen`` of convert.py | convert |
| it is not fused | ``refusal`` of known_forwards.py | convert with ``fuse``; summary |
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from octavo.formats import HIGH_PRECISION
from octavo.nn.bytecode import uses_in
from octavo.nn.experts import TITAN, ConvertedExperts, TorchtitanExperts, TransformersExperts, keys_of
from octavo.nn.linear import Grouped, Linear, TransposedLinear
from octavo.nn.recipe_module import RecipeModule
from octavo.private import is_under_fsdp
from octavo.weights.operands import weight_of, why_unreadable

Select = Callable[[nn.Module, str], bool]

# Below this a layer's casts cost more than its products gain. From the roofline, not measured: a cast moves about 3
# bytes an element and an FP8 product saves half of a bf16 one, so at 4.3 TB/s and 790 TFLOP/s (H200) a layer needs
# about 500 features.
MIN_FEATURES = 512

ROUTER = ("Router",)  # words in the names of libraries' classes: for what chooses the experts of a token
MIXTURE = ("Moe", "MoE", "Experts")  # and for the modules of a mixture of experts around it

SHARDED = "it is sharded already: call octavo.convert before fully_shard"
REPLACED = (
    "its forward was replaced on the instance, so converting would change nothing (transformers' tp_plan does that: "
    "take torch's parallelize_module)"
)

REPLACED_SINCE = "its forward was replaced on the instance after octavo.convert"


def large_enough(module: nn.Module, name: str, least: int = MIN_FEATURES) -> bool:
    """Whether an nn.Linear, a Conv1D or experts have at least ``least`` features in and out; the default ``select``.

    A ``select`` that leaves more layers out calls it: ``lambda module, name: name != "head" and large_enough(module,
    name)``.

    Example:
        >>> large_enough(nn.Linear(512, 1024), ""), large_enough(nn.Linear(512, 8), "")
        (True, False)
    """
    return min(features(module)) >= least


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear or a Conv1D; (hidden, intermediate) of experts."""
    if keys := keys_of(module):
        down: Any = getattr(module, keys["down"])
        _, intermediate, hidden = (down if getattr(module, "is_transposed", False) else down.mT).shape
        return hidden, intermediate
    rows, cols = shape_of(module)
    return (cols, rows) if isinstance(module, nn.Linear) else (rows, cols)


def sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Return (how many matrices of experts, or 0; in_features; out_features) of a linear layer or grouped products.

    Zeros for all other modules.
    """
    if isinstance(module, Grouped):
        experts, *sizes = module.weight_parameter.shape
        columns, rows = sizes if module.stores_transposed else sizes[::-1]
        return experts, columns, rows
    is_layer = isinstance(module, nn.Linear | RecipeModule) or fp8_class(module) is not None
    return (0, *features(module)) if is_layer else (0, 0, 0)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return the shape of the weight of an nn.Linear or a Conv1D, even if it is computed from other parameters.

    Also if FSDP1 or ZeRO-3 has freed it, or left a rank's part of a vector.
    """
    if (weight := weight_of(module)) is not None and weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.nx, module.nf  # type: ignore[return-value]


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, without the subclasses that fully_shard and torch's parametrize put in its place."""
    kind = type(module)
    while True:
        if is_fsdp_class(kind):
            kind = kind.__mro__[2]
        elif kind.__name__.startswith("Parametrized") and parametrize.is_parametrized(module):
            kind = kind.__bases__[0]
        else:
            return kind


def is_called_like(kind: type[nn.Module], words: Iterable[str]) -> bool:
    """Whether a class's name has one of these words in it: of another library's module nothing else says what it is."""
    return any(word in kind.__name__ for word in words)


def is_fsdp_class(kind: type[nn.Module]) -> bool:
    """Whether fully_shard has made this class for a module that it was applied to."""
    return kind.__mro__[1].__name__ == "FSDPModule"


def fp8_class(module: nn.Module) -> type[RecipeModule] | None:
    """Return the FP8 class for nn.Linear, subclasses of it that compute alike, and Conv1D; None for other modules."""
    kind = class_of(module)
    if kind is nn.Linear:
        return Linear
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and kind is transformers.Conv1D:
        return of_subclass(TransposedLinear, kind)
    plain = issubclass(kind, nn.Linear) and not issubclass(kind, RecipeModule)
    # a MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear and never calls it
    if plain and kind.forward is nn.Linear.forward and not issubclass(kind, NonDynamicallyQuantizableLinear):
        return of_subclass(Linear, kind)  # type: ignore[arg-type]
    return None


def experts_class(module: nn.Module) -> type[ConvertedExperts] | None:
    """Return the FP8 class for plain experts of a known kind; or None."""
    if isinstance(module, ConvertedExperts) or not (keys := keys_of(module)):
        return None
    return of_subclass(TorchtitanExperts if keys in TITAN else TransformersExperts, class_of(module))  # type: ignore[arg-type]


@functools.cache
def of_subclass(base: type[Any], kind: type[nn.Module]) -> type[Any]:
    """Return a class that inherits from one of octavo's, then from a plain class."""
    namespace: dict[str, Any] = {"__module__": kind.__module__}
    namespace["__reduce_ex__"] = lambda self, protocol: (_new, (base, kind), self.__getstate__())
    return type(kind.__name__, (base, kind), namespace)


def _new(base: type[Any], kind: type[nn.Module]) -> nn.Module:
    """Return an empty instance of a class of ``of_subclass``, for unpickling."""
    merged: Any = of_subclass(base, kind)  # type: ignore[arg-type]
    return merged.__new__(merged)


def restore_class(module: nn.Module, base: type[nn.Module]) -> None:
    """Give a module its original class back, the next after octavo's ``base``. A parametrization stays."""
    kind = type(module)
    plain = kind.__mro__[kind.__mro__.index(base) + 1]
    if class_of(module) is not kind:
        attributes = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        plain = type(f"Parametrized{plain.__name__}", (plain,), attributes)
    module.__class__ = plain


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the 3-D parameters of another library's module of unknown kind: experts' weights perhaps."""
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, RecipeModule) or keys_of(module):
        return {}  # weights of convolutions and bilinear forms; or experts that convert takes
    parameters = module.named_parameters(recurse=False)
    # with a dimension of 1 it is an embedding that is added to a whole batch
    return {name: p for name, p in parameters if p.ndim == 3 and p.is_floating_point() and 1 not in p.shape}


def why_left_alone(module: nn.Module) -> str | None:
    """Return why a module of a convertible class must not be converted, or None."""
    if is_fsdp_class(type(module)) or is_under_fsdp(module):
        return SHARDED
    if "forward" in module.__dict__:
        return REPLACED
    for weight in map(module._parameters.get, keys_of(module).values() or ("weight",)):
        if weight is None or parametrize.is_parametrized(module):
            return "its weight is computed from other parameters (weight_norm or the like)"
        if is_lazy(weight):
            return "its weight has no size before its first forward"
        if weight.dtype not in HIGH_PRECISION:
            return f"its weight is {weight.dtype}"
        if what := why_unreadable(weight):
            return f"octavo can't read weights that are {what}"
    return None


def why_not_selected(module: nn.Module, converted: Sequence[nn.Module] = ()) -> str | None:
    """Return why convert with its default select leaves a module alone; None if it doesn't.

    ``converted``: the model's converted layers. If a small one is among them, the caller's select has decided.
    """
    if fp8_class(module) is not None or keys_of(module):
        if (why := why_left_alone(module)) is not None and not (converted and why == SHARDED):
            return why
        if large_enough(module, "") or not all(large_enough(layer, "") for layer in converted):
            return None if why is None else "not selected, or sharded before octavo.convert"
        shape = " x ".join(map(str, features(module) if keys_of(module) else shape_of(module)))
        return f"{shape} features; the default select converts from {MIN_FEATURES} on"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "a MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.Linear):
        return f"a subclass of Linear ({type(module).__qualname__}) with a forward of its own may mean something else"
    return f"{type(module).__name__} is not a linear layer"


class ReadsOfWeight(NamedTuple):
    """The class whose methods read the values of a layer's weight; whether they also call the layer or pass it on."""

    reader: str
    is_called: bool

    def __str__(self) -> str:
        return f"a {self.reader} reads its weight without calling it"


def reads_of_weights(model: nn.Module) -> dict[int, ReadsOfWeight]:
    """Return, by ``id``, the linear layers whose weight's values are read by the module that holds them."""
    reads_by_layer: dict[int, ReadsOfWeight] = {}
    for parent in model.modules():
        kind = class_of(parent)
        if kind.__module__.startswith(("torch.", "octavo.")):
            continue
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) or fp8_class(layer) is not None:
                uses = uses_in(_methods(parent)).get(name, set())
                if "read" in uses:
                    reads_by_layer[id(layer)] = ReadsOfWeight(kind.__name__, "called" in uses)
        head = getattr(parent, "get_output_embeddings", lambda: None)()  # of a model of transformers
        if head is not None and (library := library_of_forward(parent)):
            reads_by_layer.setdefault(id(head), ReadsOfWeight(f"forward of {library}", True))
    return reads_by_layer


def library_of_forward(module: nn.Module) -> str:
    """Return the library whose function replaces a module's forward, on the instance or its class; "" if none does."""
    defining_class = next(base for base in type(module).__mro__ if "forward" in vars(base))
    library: str = inspect.unwrap(module.forward).__module__
    return "" if library == defining_class.__module__ else library.partition(".")[0]


def _methods(module: nn.Module) -> tuple[types.CodeType, ...]:
    """Return the code of a module's methods, but those that initialise, which no forward calls.

    These are its class's, and the forward that the instance has in place of its class's.
    """
    kind = class_of(module)
    functions: list[Any] = [getattr(module.__dict__.get("forward"), "__func__", None)]
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        functions += [value for name, value in vars(base).items() if "init" not in name]
    return tuple(function.__code__ for value in functions if inspect.isfunction(function := inspect.unwrap(value)))
