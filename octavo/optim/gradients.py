"""Gradients between backward and update: rounded to FP8 as soon as they are complete, summed in float32 until then.

A hook after each parameter's gradient puts a StoredGradient in its place, and the high-precision one is freed. Within
``accumulate()`` the hook only sees to it that sums are float32: torch adds to them, and the first backward outside
rounds the whole sum, once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim import state as states
from octavo.optim.layout import is_apart, like_gradient, settle_gradient
from octavo.tensor.stored_gradient import StoredGradient


class GradientHooks:
    """Has a method called after parameters' gradients, for as long as somebody else holds the object whose it is.

    Attributes:
        handles: of the parameters that have the hook.
    """

    def __init__(self, method: Callable[[nn.Parameter], None]) -> None:
        self.handles: dict[nn.Parameter, Any] = {}
        own = weakref.WeakMethod(method)  # parameters hold their hooks, and would hold all that these hold
        self._hook = lambda param: None if (found := own()) is None else found(param)
        weakref.finalize(self, _remove, self.handles).atexit = False

    def attach(self, params: Iterable[nn.Parameter]) -> None:
        """Hook all of these, and no others, which clients may have replaced since; frozen ones only if they had it."""
        params = list(params)
        for param in params:
            if param.requires_grad and param not in self.handles:
                self.handles[param] = param.register_post_accumulate_grad_hook(self._hook)
        if len(self.handles) > sum(param in self.handles for param in params):
            for gone in self.handles.keys() - set(params):
                self.handles.pop(gone).remove()


class GradientStorage:
    """What keeps an optimizer's gradients in FP8; it ends with the optimizer.

    Attributes:
        hooks: of the parameters whose gradients it keeps.
    """

    def __init__(self) -> None:
        self.hooks = GradientHooks(self._take)
        self._dtypes: dict[nn.Parameter, tuple[Any, torch.dtype]] = {}  # of gradients whose sums are float32 meanwhile
        self._accumulating = self._looked = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within it gradients are summed in float32: for all micro-batches of a step but the last."""
        for param in self.hooks.handles:
            stored = None if param.grad is None else states.local(param.grad)
            if isinstance(stored, StoredGradient) and stored.is_zero:  # of zero_grad(set_to_none=False)
                param.grad = torch.zeros_like(param, dtype=param.grad.dtype)  # type: ignore[union-attr]
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @torch.no_grad()
    def _take(self, param: nn.Parameter) -> None:
        """A parameter's gradient is complete, or the part of a micro-batch."""
        if not self._looked:
            self._looked = True
            refuse_ddp(
                self.hooks.handles,
                "DistributedDataParallel exchanges a gradient after gradient_storage='fp8' would have rounded it; use "
                "fully_shard (FSDP2), whose gradients are exchanged before, or gradient_storage=None",
            )
        settle_gradient(param)
        whole = param.grad
        assert whole is not None
        gradient = states.local(whole)
        if isinstance(gradient, StoredGradient) or gradient.is_sparse:
            return
        if not self._accumulating:
            own, dtype = self._dtypes.pop(param, (param.grad_dtype, gradient.dtype))
            stored = StoredGradient.cast(gradient, dtype, is_apart(param))
            _set(param, like_gradient(whole, stored), own)
        elif gradient.dtype != torch.float32:
            self._dtypes[param] = param.grad_dtype, gradient.dtype
            _set(param, like_gradient(whole, gradient.float()), torch.float32)


def _set(param: nn.Parameter, gradient: Tensor, dtype: torch.dtype | None) -> None:
    """Put a gradient in place of another, where autograd will add gradients of ``dtype``."""
    param.grad = None
    if param.grad_dtype != dtype:
        param.grad_dtype = dtype
    param.grad = gradient


def _remove(hooks: dict[nn.Parameter, Any]) -> None:
    for hook in hooks.values():
        hook.remove()


def refuse_ddp(params: Iterable[nn.Parameter], reason: str) -> None:
    """Raise RuntimeError for this reason if DistributedDataParallel has any of the parameters."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    own = {id(param) for param in params}
    for found in living(nn.parallel.DistributedDataParallel):
        if any(id(param) in own for param in found.module.parameters()):
            raise RuntimeError(reason)


def living(kind: type) -> list[Any]:
    """All objects of a class that somebody still holds; to find them takes tens of milliseconds."""

    def look() -> list[Any]:
        return [found for found in gc.get_objects() if issubclass(type(found), kind)]  # type() asks nothing of proxies

    if look():
        gc.collect()
        return look()
    return []
