"""Which modules convert takes, what each becomes, and why the others are left alone."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from octavo.formats import HIGH_PRECISION
from octavo.nn.experts import TITAN, ConvertedExperts, OfTorchtitan, OfTransformers, keys_of
from octavo.nn.linear import Linear, TransposedLinear
from octavo.nn.recipe_module import RecipeModule
from octavo.nn.weight import weight_of, why_unreadable

Select = Callable[[nn.Module, str], bool]

# Below this a layer's casts cost more than its products gain. From the roofline, not measured: a cast moves about 3
# bytes an element and an FP8 product saves half of a bf16 one, so at 4.3 TB/s and 790 TFLOP/s (H200) a layer needs
# about 500 features.
MIN_FEATURES = 512

SHARDED = "it is sharded already: call octavo.convert before fully_shard"
REPLACED = (
    "its forward was replaced on the instance, so converting would change nothing (transformers' tp_plan does that: "
    "take torch's parallelize_module)"
)

REPLACED_SINCE = "its forward was replaced on the instance after octavo.convert"


def large_enough(module: nn.Module, name: str) -> bool:
    """The default ``select``, of an nn.Linear, a Conv1D or experts: both feature counts are at least 512."""
    return min(features(module)) >= MIN_FEATURES


def features(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of an nn.Linear or a Conv1D; (hidden, intermediate) of experts."""
    if keys := keys_of(module):
        down: Any = getattr(module, keys["down"])
        _, intermediate, hidden = (down if getattr(module, "is_transposed", False) else down.mT).shape
        return hidden, intermediate
    rows, cols = shape_of(module)
    return (cols, rows) if isinstance(module, nn.Linear) else (rows, cols)


def shape_of(module: nn.Module) -> tuple[int, int]:
    """The shape of the weight of an nn.Linear or a Conv1D, also where it is computed from other parameters.

    And where FSDP1 or ZeRO-3 has freed it, or left a rank's part of a vector.
    """
    weight = weight_of(module)
    if weight is not None and weight.ndim == 2:
        rows, cols = weight.shape
        return rows, cols
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.nx, module.nf  # type: ignore[return-value]


def class_of(module: nn.Module) -> type[nn.Module]:
    """A module's class; of one that fully_shard or torch's parametrize was applied to the class that it had before."""
    found = type(module)
    while True:
        if is_sharded(found):
            found = found.__mro__[2]
        elif found.__name__.startswith("Parametrized") and parametrize.is_parametrized(module):
            found = found.__bases__[0]
        else:
            return found


def is_sharded(kind: type[nn.Module]) -> bool:
    """Whether it is the class that fully_shard gives to a module that it is applied to."""
    return kind.__mro__[1].__name__ == "FSDPModule"


def fp8_class(module: nn.Module) -> type[RecipeModule] | None:
    """What a plain linear layer becomes: of nn.Linear, of subclasses that compute as it does, of Conv1D; or None."""
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
    """What plain experts of a known kind become; or None."""
    if isinstance(module, ConvertedExperts) or not (keys := keys_of(module)):
        return None
    return of_subclass(OfTorchtitan if keys in TITAN else OfTransformers, class_of(module))  # type: ignore[arg-type]


@functools.cache
def of_subclass(base: type[Any], kind: type[nn.Module]) -> type[Any]:
    """A class of octavo's with all else that a plain class has."""

    def content(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = kind.__module__
        namespace["__reduce_ex__"] = lambda self, protocol: (_new, (base, kind), self.__getstate__())

    return types.new_class(kind.__name__, (base, kind), exec_body=content)


def _new(base: type[Any], kind: type[nn.Module]) -> nn.Module:
    """Unpickle one of ``of_subclass``."""
    found: Any = of_subclass(base, kind)  # type: ignore[arg-type]
    return found.__new__(found)


def restore_class(module: nn.Module, base: type[nn.Module]) -> None:
    """Give a module the class that it was made from: that after octavo's, of this base. A parametrization stays."""
    kind = type(module)
    plain = kind.__mro__[kind.__mro__.index(base) + 1]
    if class_of(module) is not kind:
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        plain = type(f"Parametrized{plain.__name__}", (plain,), own)
    module.__class__ = plain


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The 3-D parameters of another library's module of no known kind, experts' weights perhaps, by name."""
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, RecipeModule) or keys_of(module):
        return {}  # a convolution's, a bilinear form's; or experts that convert takes
    found = module.named_parameters(recurse=False)
    # one of size 1 is an embedding that is added to all of a batch
    return {name: p for name, p in found if p.ndim == 3 and p.is_floating_point() and 1 not in p.shape}


def why_left_alone(module: nn.Module) -> str | None:
    """Why a module of a convertible class must not be converted, or None."""
    if is_sharded(type(module)) or getattr(module, "_is_fsdp_managed_module", False):
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


def why_not(module: nn.Module, taken: Sequence[nn.Module] = ()) -> str | None:
    """Why convert with its default select leaves a module alone; None where it doesn't.

    ``taken``: the model's converted layers. Where a small one is among them, the caller's select has decided.
    """
    if fp8_class(module) is not None or keys_of(module):
        if (why := why_left_alone(module)) is not None and not (taken and why == SHARDED):
            return why
        if large_enough(module, "") or not all(large_enough(layer, "") for layer in taken):
            return why and "not selected, or sharded before octavo.convert"
        shape = " x ".join(map(str, features(module) if keys_of(module) else shape_of(module)))
        return f"{shape} features; the default select converts from {MIN_FEATURES} on"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "a MultiheadAttention reads its weight without calling it"
    if isinstance(module, nn.Linear):
        return f"a subclass of Linear ({type(module).__qualname__}) with a forward of its own may mean something else"
    return f"{type(module).__name__} is not a linear layer"


_LAYERS = {"weight", "bias", "in_features", "out_features"}  # attributes of a layer: who reads one doesn't call it
_APART = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "data", "requires_grad", "is_meta", "is_cuda"}


class PastReads(NamedTuple):
    """Of a layer: the class whose methods read its weight's values; whether they also call it, or hand it on."""

    reader: str
    called: bool

    def __str__(self) -> str:
        return f"a {self.reader} reads its weight without calling it"


def past_reads(model: nn.Module) -> dict[int, PastReads]:
    """The linear layers whose weight's values the module that holds them reads, by ``id``."""
    found: dict[int, PastReads] = {}
    for parent in model.modules():
        kind = class_of(parent)
        if kind.__module__.startswith(("torch.", "octavo.")):
            continue
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) or fp8_class(layer) is not None:
                uses = _uses(kind).get(name, set())  # type: ignore[arg-type]  # torch annotates no hash of classes
                uses = uses | _uses_in(_replaced_forward(parent)).get(name, set())
                if "read" in uses:
                    found[id(layer)] = PastReads(kind.__name__, "called" in uses)
    return found


@functools.cache
def _uses(kind: type[nn.Module]) -> dict[str, set[str]]:
    return _uses_in(_methods(kind))


def _uses_in(codes: Sequence[types.CodeType]) -> dict[str, set[str]]:
    """Of each ``self.<name>`` in methods: "read" where its weight's values are, "called" where itself is."""
    found: dict[str, set[str]] = {}
    nothing = [("", "")]
    for code in _with_inner(codes):
        steps = [*nothing, *((step.opname, step.argval) for step in dis.get_instructions(code)), *nothing, *nothing]
        for (_, before), (_, own), (op, name), then, after in zip(*(steps[start:] for start in range(5)), strict=False):
            if op not in ("LOAD_ATTR", "LOAD_METHOD") or (own[-1] if isinstance(own, tuple) else own) != "self":
                continue
            if op == "LOAD_METHOD" or then[0] not in ("LOAD_ATTR", "STORE_ATTR") or then[1] not in _LAYERS:
                found.setdefault(name, set()).add("called")
            elif then == ("LOAD_ATTR", "weight") and after[0] != "STORE_ATTR" and after[1] not in _APART:
                if before != "isinstance":
                    found.setdefault(name, set()).add("read")
    return found


def _methods(kind: type[nn.Module]) -> list[types.CodeType]:
    """The code of a class's methods; those that initialise are none's forward."""
    codes = []
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items():
            if inspect.isfunction(function := inspect.unwrap(value)) and "init" not in name:
                codes.append(function.__code__)
    return codes


def _replaced_forward(module: nn.Module) -> list[types.CodeType]:
    """The code of the forward that an instance has in place of its class's; [] where it has none that can be read."""
    method: Any = getattr(module.__dict__.get("forward"), "__func__", None)
    function = inspect.unwrap(method)
    return [function.__code__] if inspect.isfunction(function) else []


def _with_inner(codes: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """Codes, and those of the functions in them."""
    for code in codes:
        yield code
        yield from _with_inner([inner for inner in code.co_consts if isinstance(inner, types.CodeType)])
