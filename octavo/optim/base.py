"""What the optimizers share: weights and state found, sharded, saved, loaded; how a step computes is each one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.kernels.optimizer_step import optimizer_step
from octavo.kernels.reference.optimizer_step import AdamGroup, SgdGroup, WeightUpdate
from octavo.kernels.reference.random_bits import key_of
from octavo.optim import state as states
from octavo.optim.gradients import GradientStorage, check_storage
from octavo.optim.masters import master_of
from octavo.optim.moment import Moment
from octavo.tensor.stored_gradient import StoredGradient
from octavo.tensor.stored_weight import StoredWeight


class _Kept(NamedTuple):
    """A weight's update, all but its gradient, and what it was made of: while that stays, so does the update."""

    update: WeightUpdate
    address: int
    version: int  # of the weight after the last step
    state: tuple[int, ...]


class CompactOptimizer(Optimizer):
    """Base of octavo's optimizers: moments in few bytes, weights of any master.

    Args:
        params: parameters or groups.
        defaults: of the groups.
        moments: how each of ``names`` is stored.
        master: see AdamW.
        seed: of stochastic rounding.
        skip_nonfinite: do nothing in a step of which a gradient is not finite.
        gradient_storage: see AdamW.
    """

    names: tuple[str, ...]
    _untraced: Callable[..., Any]  # _step, which torch.compile must not trace
    bounds_update = False  # whether it knows how far a step can move a weight before it computes it
    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf, and does not wait for them

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        moments: tuple[Moment, ...],
        master: str | None,
        seed: int,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
    ) -> None:
        check_storage(gradient_storage)
        self.gradient_storage = gradient_storage
        self._gradients = None if gradient_storage is None else GradientStorage()
        self.moments, self.master, self.seed, self.skip_nonfinite = moments, master, seed, skip_nonfinite
        self._kept: dict[nn.Parameter, _Kept] = {}
        self._plans: dict[Any, Any] = {}
        self._placed: tuple[Any, dict[nn.Parameter, tuple[int, int]]] = ((), {})
        self.in_backward: Any = None  # of update_in_backward
        super().__init__(params, defaults)
        # not with the module: torch.compiler.disable brings in the whole compiler, as torch's __init__ has by now
        CompactOptimizer._untraced = staticmethod(torch.compiler.disable(CompactOptimizer._step))

    def _options(self, group: dict[str, Any]) -> AdamGroup | SgdGroup:
        """A group's options as the kernels take them."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also checks that each weight has a master."""
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                states.check(param, self.moments, self.master, self.bounds_update)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._gradients is not None:
            self._gradients.attach(self.param_groups[-1]["params"])

    def __getstate__(self) -> dict[str, Any]:
        own = ("moments", "master", "seed", "skip_nonfinite", "clip_update", "_clip", "names", "gradient_storage")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own if name in vars(self)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept, self._plans, self._placed = {}, {}, ((), {})
        self.in_backward = vars(self).get("in_backward")
        self.gradient_storage = vars(self).get("gradient_storage")
        if vars(self).setdefault("_gradients") is None and self.gradient_storage is not None:  # a copy
            self._gradients = GradientStorage()
        self._attach()

    def _attach(self) -> None:
        """Keep gradients of parameters that are no longer frozen too."""
        if self._gradients is not None:
            self._gradients.attach(param for group in self.param_groups for param in group["params"])

    def accumulate(self) -> AbstractContextManager[None]:
        """For all micro-batches of a step but the last, where gradients are kept in FP8: sums stay float32.

        With update_in_backward it is its handle's; else it does nothing, and gradients add up as torch's do.

        Example:
            >>> import torch, octavo
            >>> layer = torch.nn.Linear(128, 128)
            >>> optimizer = octavo.optim.AdamW(layer.parameters(), gradient_storage="fp8")
            >>> with optimizer.accumulate():
            ...     layer(torch.ones(2, 128)).sum().backward()
            >>> layer(torch.ones(2, 128)).sum().backward()
            >>> layer.weight.grad
            StoredGradient((128, 128), torch.float32)
            >>> optimizer.step()
        """
        if self.in_backward is not None:
            return self.in_backward.accumulate()
        return nullcontext() if self._gradients is None else self._gradients.accumulate()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have gradients.

        On a GPU that is one launch, without waiting for the device; it can be captured in a CUDA graph once it has run,
        with lr as a tensor if it is to change. In compiled code it is a graph break.
        """
        return self._untraced(self, closure)

    def step_some(self, params: Iterable[nn.Parameter], grad_scale: Tensor | None = None) -> None:
        """Update these weights alone, all of which have gradients: their step is counted, others' is not.

        Args:
            params: of this optimizer.
            grad_scale: one number that gradients are divided by.
        """
        with torch.no_grad():
            self._run(list(params), None, grad_scale)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.in_backward is not None:
            if closure is not None:
                raise RuntimeError("a closure's gradients would be used before it returns; remove() update_in_backward")
            self.in_backward.finish()
            return None
        self._attach()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if skip is None and self.skip_nonfinite and params:
            skip = ~torch.isfinite(states.largest([param.grad for param in params if param.grad is not None]))
        self._run(params, skip, scale)
        return loss

    def _run(self, params: list[nn.Parameter], skip: Tensor | None, scale: Tensor | None) -> None:
        if not params:
            return
        updates: dict[torch.device, list[WeightUpdate]] = {}
        places = self._places()
        for param in params:
            update = self._update(param, *places[param])
            updates.setdefault(update.gradient.device, []).append(update)
        groups: Any = [self._options(group) for group in self.param_groups]
        for device, some in updates.items():
            there = [None if x is None else x.to(device, torch.float32, non_blocking=True) for x in (skip, scale)]
            optimizer_step(some, groups, there[0], there[1], self._plans)
        written: list[Tensor] = list(params)
        for param in params:
            kept, weight = self._kept[param], states.local(param)
            if isinstance(weight, StoredWeight):
                written.append(weight.q)
            elif kept.update.master.weight.data_ptr() != kept.address:
                weight.copy_(kept.update.master.weight.view(weight.shape))
        torch.autograd.graph.increment_version(written)  # of a sharded weight only the local part was written
        for param in params:
            kept = self._kept[param]
            if kept.update.master.needs_bound:
                self._kept[param] = kept._replace(version=states.held(param)._version)

    def _places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Each parameter's group and its number among all, on which random bits depend."""
        counts = tuple(len(group["params"]) for group in self.param_groups)
        if self._placed[0] != counts:
            numbers = [number for number, count in enumerate(counts) for _ in range(count)]
            params = [param for group in self.param_groups for param in group["params"]]
            self._placed = counts, dict(zip(params, zip(numbers, range(len(params)), strict=True), strict=True))
        return self._placed[1]

    def _update(self, param: nn.Parameter, group: int, index: int) -> WeightUpdate:
        weight, grad = states.local(param), states.local(param.grad)  # type: ignore[arg-type]
        if grad.is_sparse:
            raise RuntimeError("octavo's optimizers take dense gradients only")
        state = self.state[param]
        if not state:
            self._begin(param, state)
        kept, ids = self._kept.get(param), (group, index, self.seed, *map(id, state.values()))
        held = states.held(weight)
        if kept is None or kept.address != held.data_ptr() or kept.state != ids or not held.is_contiguous():
            if kept is not None:
                self._plans = {name: plan for name, plan in self._plans.items() if name == "captured"}
            kept = self._kept[param] = self._keep(param, weight, state, ids)
        elif kept.update.master.needs_bound and kept.version != held._version:  # loaded, or written otherwise
            fresh = master_of(param, self.master).new_state(weight)
            for name, value in fresh.items():
                state[name].copy_(value)
        shape = kept.update.master.weight.shape
        if isinstance(grad, StoredGradient):
            codes = grad.q.view(torch.uint8).view(shape)
            return kept.update._replace(gradient=codes, gradient_scale_inv=grad.scale_inv)
        return kept.update._replace(gradient=grad.contiguous().view(shape))

    def _keep(self, param: nn.Parameter, weight: Tensor, state: dict[str, Any], ids: tuple[int, ...]) -> _Kept:
        group, index = ids[:2]
        kept = {name: states.local(value) for name, value in state.items() if isinstance(value, Tensor)}
        matrix = states.matrix_of(weight)
        if states.is_sharded_vector(param):  # a row an element, so that its index is that of the whole vector
            kept = {name: value.view(-1, 1) if value.ndim else value for name, value in kept.items()}
            matrix = matrix.view(-1, 1)
        pairs = zip(states.moments_for(param, self.moments), self.names, strict=True)
        moments = tuple(moment.stored(name, kept) for moment, name in pairs)
        scale_inv = (weight.scale_inv,) if isinstance(weight, StoredWeight) else ()
        master = master_of(param, self.master).stored(matrix, kept, *scale_inv)
        key, row = key_of(self.seed, index), states.first_row(param)
        update = WeightUpdate(master, moments, kept.get("master_amax"), matrix, state["step"], key, group, row)
        held = states.held(weight)
        return _Kept(update, held.data_ptr(), held._version, ids)

    def _begin(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """An empty state; of a sharded weight its tensors are sharded alike."""
        weight = states.local(param)
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        found: dict[str, Tensor] = {}
        for moment, name in zip(states.moments_for(param, self.moments), self.names, strict=True):
            found |= moment.new_state(name, weight.shape, weight.device)
        found |= master_of(param, self.master).new_state(weight)
        state.update({name: states.like_param(value, param) for name, value in found.items()})

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the moments' and masters' own tensors; each group says how they are to be read."""
        found = super().state_dict()
        for group in found["param_groups"]:  # which, unlike a key beside them, torch.distributed.checkpoint keeps
            group["octavo"] = states.description(self.moments, self.master, self.seed)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state of this class, of other moments or another master (converted, with a warning), or of torch's.

        A master is taken over if it is of the same kind; another begins as the weight.

        Raises:
            ValueError: if it does not fit the parameters.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        described = None
        for group in groups:
            described = group.pop("octavo", None)
            if group.get("amsgrad"):
                raise ValueError("the state is of amsgrad=True, whose largest second moments octavo does not keep")
        own = state_dict["state"]
        super().load_state_dict({"state": {}, "param_groups": groups})
        if described is not None:
            self.seed = described["seed"]
        same = described in (None, states.description(self.moments, self.master, self.seed))
        ids = [index for group in groups for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        converted = False
        for index, param in zip(ids, params, strict=True):
            if own.get(index):
                converted |= self._adopt(param, own[index], described, same)
        if converted:
            before = "torch's"
            if described is not None:
                before = f"{tuple(map(states.moment_from, described['moments']))}, master {described['master']}"
            now = f"{self.moments}, master {self.master}"
            warnings.warn(f"the optimizer's state was converted: from {before} to {now}", stacklevel=2)

    def _adopt(self, param: nn.Parameter, given: dict[str, Any], described: dict[str, Any] | None, same: bool) -> bool:
        """Put a parameter's loaded state in place; whether it had to be converted."""
        state: dict[str, Any] = {}
        self._begin(param, state)
        step = given.get("step", 1.0)  # torch's SGD keeps none
        state["step"].copy_(torch.as_tensor(step, dtype=torch.float32))
        fits = same and all(states.is_like(value, given.get(name)) for name, value in state.items() if name != "step")
        if fits:
            for name, value in state.items():
                if name != "step":
                    states.copy_into(value, given[name])
        else:
            states.convert(param, given, described, state, self.moments, self.names)
        self.state[param] = state
        return not fits
