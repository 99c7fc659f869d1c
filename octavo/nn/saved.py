"""The bytes that a model's forward saves for backward, by kind, counted by storage.

A tensor that several operations save counts once, where the first of them saved it: attention's output, which the layer
behind it reads, is attention's. Kinds follow the module that runs, and what casts write:

    inputs of layers          what linear layers read, as it is or as pairs; experts' and routers' too
    attention                 what attention saves, or what mixes tokens in its place (a convolution, a scan)
    norms, activations        theirs; activations: all else of a feed-forward half, and of experts
    logits and loss           what the model itself saves around its parts
    other                     embeddings, tables of positions, dropout's masks
    weights                   weights' codes, and copies of parameters in another dtype
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from octavo.autograd.casts import WEIGHT
from octavo.nn.candidates import class_of, expert_weights, fp8_class
from octavo.nn.experts import ConvertedExperts, function_of
from octavo.nn.recipe_module import RecipeModule
from octavo.private import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree, to_copy

KINDS = ("inputs of layers", "attention", "norms", "activations", "logits and loss", "other", "weights")
_INPUTS, _ATTENTION, _NORMS, _ACTIVATIONS, _LOGITS, _OTHER, _WEIGHTS = KINDS

# by parts of classes' names, the first that fits
_NAMES = {
    _OTHER: ("Dropout", "Embedding", "Rotary"),
    _NORMS: ("Norm", "DecoderLayer"),  # which computes its norms itself, where known_forwards.py fuses it
    _ATTENTION: ("Attention", "Attn", "Mixer", "Conv1d"),
    _ACTIVATIONS: ("MLP", "FeedForward", "LayerFF", "Dense", "Moe", "MoE", "Experts"),
    _LOGITS: ("Loss",),
}


def kind_of(module: nn.Module) -> str | None:
    """The kind of what a module saves itself; None: of what the module around it does."""
    kind = class_of(module)
    if isinstance(module, ConvertedExperts) or expert_weights(module) or function_of(module):
        return _ACTIVATIONS
    if isinstance(module, RecipeModule | nn.Linear) or fp8_class(module) is not None or "Router" in kind.__name__:
        return _INPUTS
    if isinstance(module, nn.Module) and kind.__module__.startswith("torch.nn.modules.activation"):
        return _ATTENTION if isinstance(module, nn.MultiheadAttention) else _ACTIVATIONS
    return next((found for found, names in _NAMES.items() if any(name in kind.__name__ for name in names)), None)


class _Origins(TorchDispatchMode):
    """Learns what storages hold whose tensors say so: codes by their cast, and copies in another dtype."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.kinds = {storage_of(part): _WEIGHTS for parameter in parameters for part in inner(parameter)}
        self.held: list[Any] = []  # so that no other storage gets its number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = None
        if func is torch.ops.octavo.cast.default:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            if given["role"] == WEIGHT:
                kind = _WEIGHTS
            elif given.get("activation") or given.get("gamma") is not None:
                kind = _INPUTS
        elif func._overloadpacket is to_copy:
            kind = self.kinds.get(storage_of(args[0]))
        if kind is not None:
            parts = result[:4] if isinstance(result, list) else [result]
            self.kinds |= dict.fromkeys(map(storage_of, parts), kind)
            self.held.append(parts)
        return result


def saved_by_kind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Bytes that one forward saves for backward besides parameters, buffers and its arguments, by KINDS.

    The model runs as it is, in the mode (training or evaluation) that it is in.
    """
    kwargs = dict(kwargs or {})
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known = {storage_of(part) for tensor in (*_tensors(model), *given) for part in inner(tensor)}
    found: dict[int, tuple[str, Tensor]] = {}
    origins = _Origins(list(model.parameters()))
    kinds: dict[nn.Module, str | None] = {}
    stack = [_OTHER]

    def pack(tensor: Tensor) -> Tensor:
        for part in inner(tensor):
            found.setdefault(storage_of(part), (stack[-1], part))
        return tensor

    def enter(module: nn.Module, _: Any) -> None:
        kind = kinds.setdefault(module, kind_of(module))  # a loss may be made on the way
        if kind is None:  # only what the model itself computes is about its loss
            kind = _LOGITS if module is model else _OTHER if stack[-1] == _LOGITS else stack[-1]
        stack.append(kind)

    def leave(module: nn.Module, *_: Any) -> None:
        stack.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), origins, torch.enable_grad():
            output = model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    saved = dict.fromkeys(KINDS, 0)
    for key, (kind, part) in found.items():
        if key not in known:
            saved[origins.kinds.get(key, kind)] += part.untyped_storage().nbytes()
    del output
    return saved


def predicted_by_kind(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    change: Callable[[nn.Module], Any] | None = None,
    watching: AbstractContextManager[Any] | None = None,
) -> dict[str, int]:
    """The same of a copy of the model whose tensors have no data, in training; ``change`` is done to it before.

    ``watching``: a dispatch mode that sees the copy's operations.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin = twin_of(model, mode)
    with mode:
        if change is not None:
            change(twin)
        given = pytree.tree_map_only(Tensor, lambda x: without_data(x, mode), (tuple(args), dict(kwargs or {})))
        with watching or nullcontext():
            return saved_by_kind(twin.train(), *given)


def without_data(tensor: Tensor, mode: Any) -> Tensor:
    """A fake of a tensor. One on the meta device becomes a CPU's: on meta, attention would keep its probabilities."""
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: without_data(getattr(tensor, name), mode) for name in names}
        fake = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    else:
        fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def twin_of(model: nn.Module, mode: Any) -> nn.Module:
    """A copy whose parameters and buffers are fake; nothing of them is copied."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if getattr(tensor, "placements", None) is not None:
            raise ValueError(
                "example_inputs: make the plan before fully_shard; a sharded model can't be run without data"
            )
        memo[id(tensor)] = without_data(tensor, mode)
    return copy.deepcopy(model, memo)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def inner(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper holds, or itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in inner(getattr(tensor, name))]
    return [tensor]


def storage_of(tensor: Any) -> int:
    """Tells a tensor's storage from others; 0 of what is no tensor."""
    return tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0
