"""Updates while backward runs: gradients are used and freed as they come, in batches of one launch.

A hook after each parameter's last gradient puts it on a list; when the list holds ``outstanding_weight_updates_bytes``
of gradients, one launch updates all of it, uneven sizes together. ``optimizer.step()`` stays where it was: it updates
what is left and makes later work wait for the updates.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedOpError
from octavo.kernels.backward_pass import is_running
from octavo.optim.base import CompactOptimizer, check_not_negative
from octavo.optim.gradients import NO_DDP, GradientHooks, refuse_ddp
from octavo.optim.layout import bytes_of_shard, settle_gradient
from octavo.private import execution_engine
from octavo.tensor.stored_gradient import TWICE, UsedGradient
from octavo.weights.fsdp2 import like_sharded, on_this_rank, sharded_dims

_TO_COME = -1.0  # in place of the square of a gradient that has not come yet; NaN can't be, as gradients may be NaN
_TINY = torch.finfo(torch.float32).tiny


_SCALER = (
    "a GradScaler decides by all gradients whether to skip a step, but update_in_backward uses them while they come; "
    "train in bf16 (a GradScaler(enabled=False) may stay), or remove() the handle"
)
_DDP = NO_DDP.format("update_in_backward", "used", "step() after backward")


def update_in_backward(
    optimizer: CompactOptimizer, outstanding_weight_updates_bytes: int = 64 * 2**20, clip: float | None = None
) -> UpdatesInBackward:
    """Update weights while backward runs: at most these bytes of gradients exist at a time, and one tensor's.

    The result is that of a step after backward, bit for bit. The training loop stays as it is: backward, then
    ``optimizer.step()``. On a GPU updates run beside backward on a stream of their own.

    What needs all gradients at once is refused: GradScaler, skip_nonfinite, clipping by the exact global norm (``clip``
    takes an estimate of it; the update is clipped already, to R_t, the largest that exact Adam can make). So is
    DistributedDataParallel, whose ranks have not exchanged a gradient yet when its hook runs; FSDP2's have. Until
    ``optimizer.step()`` a used gradient is a UsedGradient, which knows its norm: torch's clip_grad_norm_ returns the
    norm of all gradients, and raises if it would clip. A closure is evaluated once. A weight that a step does not reach
    is updated by a gradient of zeros after the optimizer's ``zero_grad(set_to_none=False)``, as torch does; the model's
    ``zero_grad`` finds no gradient to zero, and the weight is left out.

    Args:
        optimizer: octavo's AdamW, Adam, Muon or SGD.
        outstanding_weight_updates_bytes: of gradients that wait for a launch; with 0 none waits.
        clip: scale gradients by the factor that would bring the step's estimated global 2-norm to this; None: do not.
            Each launch has its estimate: the gradients that have come count as they are, those still to come as in the
            last step, scaled by how the others have changed since. In the last launch it is exact; in the first step,
            gradients still to come count as nothing.

    Returns:
        a handle: ``accumulate()`` for all micro-batches but the last, ``remove()`` to undo it.

    Raises:
        TypeError: for another optimizer.
        ValueError, RuntimeError: for what can't be exact, with the reason.

    Example:
        >>> import torch, octavo
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = octavo.optim.AdamW(layer.parameters())
        >>> handle = octavo.optim.update_in_backward(optimizer, outstanding_weight_updates_bytes=0)
        >>> layer(torch.ones(2, 64)).sum().backward()
        >>> layer.weight.grad, handle.launches
        (UsedGradient((64, 64), torch.float32), 2)
        >>> optimizer.step()
        >>> handle.remove()
    """
    if not isinstance(optimizer, CompactOptimizer):
        raise TypeError(f"update_in_backward is for octavo.optim's optimizers, not {type(optimizer).__name__}")
    if optimizer.in_backward is not None:
        raise RuntimeError("the optimizer updates in backward already; remove() that handle first")
    if optimizer.gradient_storage is not None:
        raise ValueError("gradient_storage keeps gradients until step(), update_in_backward keeps none: choose one")
    if optimizer.skip_nonfinite:
        raise ValueError("skip_nonfinite decides by all gradients of a step; those in backward are gone by then")
    check_not_negative(outstanding_weight_updates_bytes=outstanding_weight_updates_bytes)
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip={clip!r} must be a 2-norm above 0, or None")
    refuse_ddp(optimizer.all_params(), _DDP)
    return UpdatesInBackward(optimizer, outstanding_weight_updates_bytes, clip)


class GradientNorms:
    """Squared 2-norms of each parameter's gradient in this step and the last, from which a clip estimates the norm.

    They stay on the device, one number a parameter, so nothing waits for the host and a CUDA graph can replay it.
    """

    def __init__(self) -> None:
        self._numbers: dict[nn.Parameter, int] = {}
        self._now = self._last = torch.empty(0, dtype=torch.float32, device="cpu")
        self._cells: tuple[Tensor, ...] = ()  # of self._now

    def add(self, params: list[nn.Parameter]) -> None:
        """Record the norms of these parameters' gradients, which have come."""
        squares = squared_norms([param.grad for param in params if param.grad is not None])
        if new := [param for param in params if param not in self._numbers]:
            self._numbers |= {param: len(self._numbers) + number for number, param in enumerate(new)}
            self._now = torch.cat([self._now.to(squares), squares.new_full((len(new),), _TO_COME)])
            self._last = torch.cat([self._last.to(squares), squares.new_zeros(len(new))])
            self._cells = self._now.unbind()
        torch._foreach_copy_([self._cells[self._numbers[param]] for param in params], list(squares.unbind()))

    def state(self, params: list[nn.Parameter]) -> dict[str, Any]:
        """Return the last step's squares, and their parameters' places in ``params``: sums depend on the order."""
        places = {param: place for place, param in enumerate(params)}
        return {"order": [places[param] for param in self._numbers], "squares": self._last.cpu()}

    def load(self, state: dict[str, Any], params: list[nn.Parameter]) -> None:
        """Load a state that ``state`` returned, and go on from it."""
        device = on_this_rank(params[0].detach()).device
        self._numbers = {params[place]: number for number, place in enumerate(state["order"])}
        self._last = state["squares"].to(device, copy=True)
        self._now = torch.full_like(self._last, _TO_COME)
        self._cells = self._now.unbind()

    def last(self) -> Tensor:
        """Return the last step's global norm; 0 before there is one."""
        return self._last.sum().sqrt()

    def estimate(self) -> Tensor:
        """Return an estimate of this step's global norm: exact once all gradients have come.

        Gradients still to come count with their squares of the last step, times growth ** sqrt(share): growth is the
        ratio of the squares of those that have come to the same of the last step, share their part of that step's sum.
        """
        has_come = self._now != _TO_COME
        now = self._now * has_come
        last_of_come, last_to_come = (self._last * has_come).sum(), (self._last * ~has_come).sum()
        growth = (now * (self._last > 0)).sum() / last_of_come.clamp(min=_TINY)
        share = last_of_come / (last_of_come + last_to_come).clamp(min=_TINY)
        return (now.sum() + last_to_come * growth.pow(share.sqrt())).sqrt()

    def end_step(self) -> Tensor:
        """End the step: return its global norm, which ``last`` returns from now on."""
        self._last.copy_(self._now * (self._now != _TO_COME))
        self.drop()
        return self.last()

    def drop(self) -> None:
        """Forget the norms that have come since the last step."""
        self._now.fill_(_TO_COME)


def squared_norms(gradients: list[Tensor]) -> Tensor:
    """Return each whole gradient's squared 2-norm in float32; those sharded alike take one collective together."""
    norms = torch._foreach_norm([on_this_rank(gradient) for gradient in gradients], 2.0, torch.float32)
    squares = torch.stack([norm.to(norms[0].device) for norm in norms]).square()
    alike: dict[Any, list[Tensor]] = {}
    for square, gradient in zip(squares.unbind(), gradients, strict=True):
        if dims := tuple(mesh_dim for _, mesh_dim in sharded_dims(gradient)):
            alike.setdefault((gradient.device_mesh, dims), []).append(square)  # type: ignore[attr-defined]
    for (mesh, dims), shards in alike.items():
        whole = torch.stack(shards).to(mesh.device_type)
        for dim in dims:
            torch.distributed.all_reduce(whole, group=mesh.get_group(dim))
        torch._foreach_copy_(shards, list(whole.unbind()))
    return squares


class UpdatesInBackward:
    """The handle of ``update_in_backward``.

    Within a step a weight goes through three states:

        state                  in the set      its ``grad``
        awaits its gradient    none            None
        awaits its launch      ``_pending``    the gradient
        is updated             ``_updated``    a UsedGradient

    ``step()`` launches the second state's updates, which the third state then has too, and ends the step: all weights
    await their gradients again, and ``_updated_last_step`` has those that were updated. Of these, weights that the next
    step does not reach are updated by zeros if the optimizer's ``zero_grad(set_to_none=False)`` came in between, which
    sets ``leaves_zeros``. After a backward pass that failed all weights await their gradients, too.

    Attributes:
        launches: how many launches there were, that of step() included.
        most_bytes: the most bytes of gradients that waited at a time.
        last_norm: the 2-norm of all gradients of the last step, where ``clip`` computes it; else None.
    """

    def __init__(self, optimizer: CompactOptimizer, threshold: int, clip: float | None) -> None:
        self.optimizer, self.threshold, self.clip = optimizer, threshold, clip
        self.launches = self.most_bytes = 0
        self._pending: dict[nn.Parameter, None] = {}  # in the order of their gradients
        self._pending_bytes = 0
        self._updated: set[nn.Parameter] = set()
        self._updated_last_step: set[nn.Parameter] = set()
        self.leaves_zeros = False  # whether the optimizer's zero_grad has left zeros in place of their gradients
        self._running_pass: Any = None  # a weak reference to the callback at the end of the running backward pass
        self._streams: dict[torch.device, Any] = {}
        self.last_norm: Tensor | None = None
        self._loaded: dict[str, Any] | None = None
        self._norms = GradientNorms()
        self._hooks = GradientHooks(self._take, _DDP)
        self._hooks.attach(optimizer.all_params())
        optimizer.in_backward = self

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of this step that the next step's clip needs; save them with the optimizer's state."""
        return self._norms.state(self.optimizer.all_params())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of an optimizer of the same parameters.

        Raises:
            ValueError: if the state is of more parameters.
        """
        params = self.optimizer.all_params()
        if any(place >= len(params) for place in state_dict["order"]):
            raise ValueError(f"the state is of more parameters than the optimizer's {len(params)}")
        self._loaded = state_dict
        self._norms.load(state_dict, params)
        self.last_norm = self._norms.last() if state_dict["order"] else None

    def restart(self) -> None:
        """Load the last loaded state again: loading an optimizer's state may run an empty step (torch does so)."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
            self._loaded = None

    def remove(self) -> None:
        """Undo update_in_backward: gradients stay until ``optimizer.step()``, those that wait included."""
        self._hooks.attach([])
        self._forget_used()
        self._wait()
        self.optimizer.in_backward = None

    def accumulate(self) -> AbstractContextManager[None]:
        """Have backward only accumulate gradients within this context: for all micro-batches of a step but the last."""
        return self._hooks.accumulate()

    def finish(self) -> None:
        """End a step: update weights whose gradients still wait, and wait for them. ``optimizer.step()`` calls it."""
        if getattr(self.optimizer, "found_inf", None) is not None:
            raise RuntimeError(_SCALER)
        self._forget_used()
        params = self.optimizer.all_params()
        self._pending |= {param: None for param in params if param.grad is not None}
        self._flush(in_backward=False)
        self._wait()
        if self._updated and self.clip is not None:
            self.last_norm = self._norms.end_step()
        self._updated_last_step, self._updated = self._updated, set()
        self.leaves_zeros = False
        self._running_pass = None
        self._hooks.attach(params)  # parameters may have been replaced since: by sharding, say

    def _watch_pass(self) -> None:
        """Note that a pass runs; begin the step anew if the one before failed, whose updates of weights stay.

        A pass that ends calls its callback and drops it; one that fails drops it uncalled, and the weak reference is
        dead. A reentrant checkpoint's own backward pass is within the other's.
        """
        if (callback := self._running_pass) is not None:
            if callback() is not None:
                return
            self._updated.clear()
            self._pending, self._pending_bytes = {}, 0
            self._norms.drop()
            self.optimizer.end_step()

        def end() -> None:
            self._running_pass = None

        if is_running():
            self._running_pass = weakref.ref(end)
            execution_engine.queue_callback(end)

    def _take(self, param: nn.Parameter) -> None:
        """Take a parameter's gradient, which is complete."""
        if self._hooks.accumulating:
            return
        self._watch_pass()
        if param in self._pending:
            return
        self.optimizer.begin_step()  # with the first gradient, which is the same weight's on all ranks
        if param in self._updated:  # and the UsedGradient was taken away
            raise UnsupportedOpError(TWICE)
        settle_gradient(param)
        self._pending[param] = None
        # all ranks flush at the same gradient: so collectives (a norm's, say) come in the same order among FSDP2's
        self._pending_bytes += bytes_of_shard(param.grad)  # type: ignore[arg-type]
        self.most_bytes = max(self.most_bytes, self._pending_bytes)
        if self._pending_bytes >= self.threshold:
            self._flush()

    def _flush(self, in_backward: bool = True) -> None:
        """Update all weights whose gradients wait, in one launch a device, and free these gradients."""
        params = [param for param in self._pending if param.grad is not None]  # the user may have dropped some
        self._pending, self._pending_bytes = {}, 0
        if not params:
            return
        self.launches += 1
        self._updated.update(params)
        norms = torch._foreach_norm([on_this_rank(param.grad) for param in params]) if in_backward else []  # type: ignore[arg-type]
        with self._streams_of_updates(params):
            divisor = None  # of gradients, so that they are clipped
            if self.clip is not None:
                self._norms.add(params)
                divisor = (self._norms.estimate() / self.clip).clamp(min=1.0)
            self.optimizer.step_some(params, divisor)
        for param, norm in itertools.zip_longest(params, norms):
            gradient, param.grad = param.grad, None
            if norm is not None and gradient is not None:
                param.grad = like_sharded(UsedGradient(on_this_rank(gradient), norm), gradient, gradient.shape)

    def _forget_used(self) -> None:
        """Drop the UsedGradients; of weights without gradients put back the zeros that zero_grad has left."""
        for param in self._updated:
            if param.grad is not None and isinstance(on_this_rank(param.grad), UsedGradient):
                param.grad = None
        for param in self._updated_last_step - self._updated if self.leaves_zeros else ():
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)

    def _streams_of_updates(self, params: list[nn.Parameter]) -> ExitStack:
        """Return a context of the updates' streams: each GPU's waits for gradients there, not for all of backward."""
        context = ExitStack()
        for device in {param.device for param in params}:
            if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            for param in params:
                if param.device == device:
                    on_this_rank(param.grad).record_stream(stream)  # type: ignore[arg-type]
            context.enter_context(torch.cuda.stream(stream))
        return context

    def _wait(self) -> None:
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
