"""The bytes that a model's forward saves for backward, by kind, counted by storage.

A tensor that several operations save counts once, for the first of them: attention's output, which the next layer
reads, counts as attention's. The kind depends on the module that runs, and on the cast that wrote the tensor:

    inputs of layers          inputs of linear layers, experts and routers, as they are or as pairs
    attention                 tensors saved by attention, or by a convolution or scan in its place
    norms, activations        tensors saved by these; activations: all others of a feed-forward half and of experts
    logits and loss           tensors that the model itself saves around its parts
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

from octavo.nn.candidates import MIXTURE, ROUTER, class_of, expert_weights, fp8_class, is_called_like
from octavo.nn.counting import OperationCounter
from octavo.nn.experts import ConvertedExperts, function_of
from octavo.nn.recipe_module import RecipeModule
from octavo.private import FakeTensor, FakeTensorMode, is_dtensor, pytree, to_copy
from octavo.scaling.recipe import WEIGHT

MIB = 1 << 20
SAVED_KINDS = ("inputs of layers", "attention", "norms", "activations", "logits and loss", "other", "weights")
_INPUTS, _ATTENTION, _NORMS, _ACTIVATIONS, _LOGITS, _OTHER, _WEIGHTS = SAVED_KINDS

# kind: words in classes' names, where a class itself does not say what it is; the first kind that fits counts
_WORDS = {
    _OTHER: ("Dropout", "Embedding", "Rotary"),
    _NORMS: ("Norm", "DecoderLayer"),  # a DecoderLayer that known_forwards.py fuses computes its norms itself
    _ATTENTION: ("Attention", "Attn", "Mixer", "Conv1d"),
    _ACTIVATIONS: ("MLP", "FeedForward", "LayerFF", "Dense", *MIXTURE),
    _LOGITS: ("Loss",),
}


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of the tensors that a module itself saves; None: the kind of the module around it."""
    kind = class_of(module)
    if isinstance(module, ConvertedExperts) or expert_weights(module) or function_of(module):
        return _ACTIVATIONS
    if isinstance(module, RecipeModule | nn.Linear) or fp8_class(module) is not None or is_called_like(kind, ROUTER):
        return _INPUTS
    if kind.__module__.startswith("torch.nn.modules.activation"):
        return _ATTENTION if isinstance(module, nn.MultiheadAttention) else _ACTIVATIONS
    return next((matching for matching, words in _WORDS.items() if is_called_like(kind, words)), None)


class _KindsByCast(OperationCounter):
    """Records the kinds of storages that casts to FP8 and copies to another dtype write."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.kinds = {self.storage_of(part): _WEIGHTS for parameter in parameters for part in inner(parameter)}

    def count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        kind = None
        if func is torch.ops.octavo.cast.default:
            arguments = dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)) | kwargs
            if arguments["role"] == WEIGHT:
                kind = _WEIGHTS
            elif arguments.get("activation") or arguments.get("gamma") is not None:
                kind = _INPUTS
        elif func._overloadpacket is to_copy:
            kind = self.kinds.get(self.storage_of(args[0]))
        if kind is not None:
            parts = result[:4] if isinstance(result, list) else [result]
            self.kinds |= dict.fromkeys(map(self.storage_of, parts), kind)
            self.held.append(parts)


def saved_by_kind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return, by SAVED_KINDS, the bytes that a forward saves for backward besides parameters, buffers and arguments.

    The model runs as it is, in the mode (training or evaluation) that it is in.
    """
    kwargs = dict(kwargs or {})
    argument_tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    not_counted = (*model.parameters(), *model.buffers(), *argument_tensors)
    excluded = {OperationCounter.storage_of(part) for tensor in not_counted for part in inner(tensor)}
    saved_parts: dict[int, tuple[str, Tensor]] = {}
    casts = _KindsByCast(list(model.parameters()))
    kinds: dict[nn.Module, str | None] = {}
    stack = [_OTHER]

    def note(tensor: Tensor) -> Tensor:
        for part in inner(tensor):
            saved_parts.setdefault(OperationCounter.storage_of(part), (stack[-1], part))
        return tensor

    def enter(module: nn.Module, _: Any) -> None:
        kind = kinds.setdefault(module, kind_of(module))  # forward may create modules, such as a loss
        if kind is None:  # outside of its parts the model itself computes its loss
            kind = _LOGITS if module is model else _OTHER if stack[-1] == _LOGITS else stack[-1]
        stack.append(kind)

    def leave(module: nn.Module, *_: Any) -> None:
        stack.pop()

    entering, leaving = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    saving = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with entering, leaving, saving, casts, torch.enable_grad():
        output = model(*args, **kwargs)
    saved = dict.fromkeys(SAVED_KINDS, 0)
    for key, (kind, part) in saved_parts.items():
        if key not in excluded:
            saved[casts.kinds.get(key, kind)] += part.untyped_storage().nbytes()
    del output
    return saved


def predicted_by_kind(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    change: Callable[[nn.Module], Any] | None = None,
    watching: AbstractContextManager[Any] | None = None,
) -> dict[str, int]:
    """Return ``saved_by_kind`` in training of a copy without data, to which ``change`` is applied before.

    ``watching``: a dispatch mode that sees the copy's operations.
    """
    mode, twin, fakes = fakes_of(model, (tuple(args), dict(kwargs or {})))
    with mode:
        if change is not None:
            change(twin)
        with watching or nullcontext():
            return saved_by_kind(twin.train(), *fakes)


def fakes_of(model: nn.Module, inputs: Any) -> tuple[FakeTensorMode, nn.Module, Any]:
    """Return (a mode, a copy of a model, a tree of inputs) in which tensors have no data; under the mode it runs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # unlike the meta device, it lets models ask for values
    return mode, twin_of(model, mode), pytree.tree_map_only(Tensor, lambda x: without_data(x, mode), inputs)


def without_data(tensor: Tensor, mode: Any) -> Tensor:
    """Return a fake of a tensor; a meta tensor becomes a CPU's: on meta, attention would keep its probabilities."""
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
    """Return a copy of a model with fakes in place of parameters and buffers, whose data isn't copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_dtensor(tensor):
            raise ValueError(
                "example_inputs: make the plan before fully_shard; a sharded model can't be run without data"
            )
        memo[id(tensor)] = without_data(tensor, mode)
    return copy.deepcopy(model, memo)


def inner(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a wrapper subclass holds, or [the tensor] itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in inner(getattr(tensor, name))]
    return [tensor]
