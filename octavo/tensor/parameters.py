"""Another tensor in a parameter that stays the same object: for its module, its optimizer, its hooks and its owner."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from octavo.private import hooks_of, set_hooks, set_local_tensor, swap_tensor_impl
from octavo.tensor.fsdp2 import on_this_rank


def put_into(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Make a parameter hold other values, of another class or dtype perhaps (a plain weight as a StoredWeight).

    The object stays, and so do its hooks, its gradient, ``requires_grad`` and whatever attributes a user gave it. Weak
    references to it hold too, which is why this isn't torch.utils.swap_tensors. A backward pass of a forward that read
    the old values raises RuntimeError: its gradient would reach nobody.

    ``parameter`` is a leaf; it takes the memory of ``tensor``, which is of its shape. Of a sharded one, which keeps all
    the rest, ``tensor`` is this rank's shard.
    """
    if on_this_rank(parameter) is not parameter:
        set_local_tensor(parameter, tensor)
        return
    other = nn.Parameter(tensor.detach(), parameter.requires_grad)
    grad, grad_dtype = parameter.grad, parameter.grad_dtype
    chosen = grad_dtype != parameter.dtype  # else it is what follows from the parameter's
    hooks = hooks_of(parameter)
    given = {name: value for name, value in vars(parameter).items() if name not in _own(parameter)}
    if parameter.requires_grad:
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse)
    parameter.__class__, other.__class__ = type(other), type(parameter)
    parameter.__dict__, other.__dict__ = vars(other) | given, dict(vars(parameter))
    swap_tensor_impl(parameter, other)
    set_hooks(parameter, hooks)
    if parameter.requires_grad and chosen:
        parameter.grad_dtype = grad_dtype
    parameter.grad = grad


def _own(parameter: nn.Parameter) -> set[str]:
    """The attributes that belong to its class, not to its user."""
    return {"_is_param"}.union(*(getattr(kind, "__annotations__", ()) for kind in type(parameter).__mro__))


def _refuse(gradients: Any) -> NoReturn:
    raise RuntimeError(
        "a backward pass reached a parameter that holds another tensor since the forward (its storage changed): run "
        "forward again. DistributedDataParallel has to be made after such a change"
    )
