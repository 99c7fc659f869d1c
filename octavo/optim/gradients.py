"""Gradients between backward and update: rounded to FP8 as soon as they are complete, summed in float32 until then.

A hook after each parameter's gradient puts a StoredGradient in its place, and the high-precision one is freed. Within
``accumulate()`` the hook only sees to it that sums are float32: torch adds to them, and the first backward outside
rounds the whole sum, once. Frozen: ``gradient_storage`` gets no new features until a GPU shows what it gains.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.optim.layout import is_fp8_experts, settle_gradient
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.fsdp2 import like_sharded, on_this_rank

NO_DDP = (
    "DistributedDataParallel exchanges a gradient after {} would have {} it; use fully_shard (FSDP2), whose gradients "
    "are exchanged before, or {}"
)


class GradientHooks:
    """Hooks that call a method after parameters' gradients; they hold the method's object weakly and go with it.

    Before the first call they look for DistributedDataParallel: RuntimeError with ``why_no_ddp``, if it is there.
    """

    def __init__(self, method: Callable[[nn.Parameter], None], why_no_ddp: str) -> None:
        handles: dict[nn.Parameter, Any] = {}  # of the parameters that have the hook
        weak = weakref.WeakMethod(method)  # parameters hold their hooks, which would hold the method's object
        look_once = functools.cache(lambda: refuse_ddp(handles, why_no_ddp))

        def hook(param: nn.Parameter) -> None:
            if (bound_method := weak()) is not None:
                look_once()
                bound_method(param)

        self.handles, self._hook = handles, hook
        self.accumulating = False
        weakref.finalize(self, lambda hooks: [hook.remove() for hook in hooks.values()], handles).atexit = False

    def attach(self, params: Sequence[nn.Parameter]) -> None:
        """Hook these parameters and no others, as callers replace parameters; a frozen one keeps its hook."""
        for param in params:
            if param.requires_grad and param not in self.handles:
                self.handles[param] = param.register_post_accumulate_grad_hook(self._hook)
        for param in self.handles.keys() - set(params):
            self.handles.pop(param).remove()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Note in ``accumulating`` that gradients are not a step's last within this context."""
        was_accumulating, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = was_accumulating


class GradientStorage:
    """The storage of an optimizer's gradients in FP8, for as long as the optimizer lives."""

    def __init__(self) -> None:
        self.hooks = GradientHooks(self._store, NO_DDP.format("gradient_storage", "rounded", "gradient_storage=None"))
        self._dtypes: dict[nn.Parameter, tuple[Any, torch.dtype]] = {}  # grad_dtype and dtype before sums were float32

    def accumulate(self) -> AbstractContextManager[None]:
        """Sum gradients in float32 within this context: for all micro-batches of a step but the last."""
        for param in self.hooks.handles:
            stored = None if param.grad is None else on_this_rank(param.grad)
            if isinstance(stored, StoredGradient) and stored.is_zero:  # by zero_grad(set_to_none=False)
                param.grad = torch.zeros_like(param, dtype=param.grad.dtype)  # type: ignore[union-attr]
        return self.hooks.accumulate()

    @torch.no_grad()
    def _store(self, param: nn.Parameter) -> None:
        """Round a parameter's complete gradient to FP8, or, within ``accumulate``, have its sum be float32."""
        whole = settle_gradient(param)
        assert whole is not None
        gradient = on_this_rank(whole)
        if isinstance(gradient, StoredGradient) or gradient.is_sparse:
            return
        if not self.hooks.accumulating:
            grad_dtype, dtype = self._dtypes.pop(param, (param.grad_dtype, gradient.dtype))
            stored = StoredGradient.cast(gradient, dtype, is_fp8_experts(param))
            _set(param, like_sharded(stored, whole, whole.shape), grad_dtype)
        elif gradient.dtype != torch.float32:
            self._dtypes[param] = param.grad_dtype, gradient.dtype
            _set(param, like_sharded(gradient.float(), whole, whole.shape), torch.float32)


def _set(param: nn.Parameter, gradient: Tensor, dtype: torch.dtype | None) -> None:
    """Replace a gradient, and have autograd add gradients of ``dtype`` to it."""
    param.grad = None
    if param.grad_dtype != dtype:
        param.grad_dtype = dtype
    param.grad = gradient


def refuse_ddp(params: Iterable[nn.Parameter], reason: str) -> None:
    """Raise RuntimeError, with this reason, if DistributedDataParallel has any of the parameters.

    To look for it among all objects takes tens of milliseconds.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return

    def ddp_models() -> list[Any]:
        kind = nn.parallel.DistributedDataParallel  # issubclass, as isinstance would run proxies
        return [model for model in gc.get_objects() if issubclass(type(model), kind)]

    param_set = set(params)
    if ddp_models():
        gc.collect()
    if any(param in param_set for model in ddp_models() for param in model.module.parameters()):
        raise RuntimeError(reason)
