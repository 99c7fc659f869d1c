"""What the optimizers share: weights and state found, sharded, saved, loaded; how a step computes is each one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.kernels.reference.master_weights import MasterWeight
from octavo.kernels.reference.optimizer_state import StoredMoment
from octavo.kernels.reference.random_bits import key_of
from octavo.optim import state as states
from octavo.optim.masters import master_of
from octavo.optim.moment import Moment, as_matrix


class Update(NamedTuple):
    """What a step of one weight reads and writes.

    Attributes:
        group: its group's options.
        step: counted from 1.
        key: of random bits: of the seed and the weight's number.
        master: the weight [R, C] and its master.
        moments: in the order of ``names``.
        amax: [1, 1], of a scaled master; else None.
        gradient: [R, C].
        first_row: of the whole weight that these rows begin with.
    """

    group: dict[str, Any]
    step: int
    key: int
    master: MasterWeight
    moments: list[StoredMoment]
    amax: Tensor | None
    gradient: Tensor
    first_row: int


class CompactOptimizer(Optimizer):
    """Base of octavo's optimizers: moments in few bytes, weights of any master.

    Args:
        params: parameters or groups.
        defaults: of the groups.
        moments: how each of ``names`` is stored.
        master: see AdamW.
        seed: of stochastic rounding.
    """

    names: tuple[str, ...]

    def __init__(
        self, params: Any, defaults: dict[str, Any], moments: tuple[Moment, ...], master: str | None, seed: int
    ) -> None:
        self.moments, self.master, self.seed = moments, master, seed
        super().__init__(params, defaults)

    def _run(self, update: Update) -> None:
        """Update one weight and its state in place."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; also checks that each weight has a master."""
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                states.check(param, self.moments, self.master)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = ("moments", "master", "seed", "clip_update", "names")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own if name in vars(self)}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group, index)
                index += 1
        return loss

    def _update(self, param: nn.Parameter, group: dict[str, Any], index: int) -> None:
        weight, grad = states.local(param), states.local(param.grad)  # type: ignore[arg-type]
        if grad.is_sparse:
            raise RuntimeError("octavo's optimizers take dense gradients only")
        state = self.state[param]
        if not state:
            self._begin(param, state)
        state["step"] += 1
        kept = {name: states.local(value) for name, value in state.items() if isinstance(value, Tensor)}
        whole = weight.contiguous()  # itself, where it is that
        if states.is_sharded_vector(param):  # a row an element, so that its index is that of the whole vector
            kept = {name: value.view(-1, 1) if value.ndim else value for name, value in kept.items()}
            gradient, matrix = grad.contiguous().view(-1, 1), whole.view(-1, 1)
        else:
            gradient, matrix = as_matrix(grad.contiguous()), as_matrix(whole)
        pairs = zip(states.moments_for(param, self.moments), self.names, strict=True)
        moments = [moment.stored(name, kept) for moment, name in pairs]
        master = master_of(param, self.master).stored(matrix, kept)
        key, row = key_of(self.seed, index), states.first_row(param)
        amax = kept.get("master_amax")
        self._run(Update(group, int(state["step"]), key, master, moments, amax, gradient, row))
        if whole is not weight:
            weight.copy_(whole)
        torch.autograd.graph.increment_version(param)  # of a sharded weight only the local part was written

    def _begin(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """An empty state; of a sharded weight its tensors are sharded alike."""
        weight = states.local(param)
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
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
        state["step"] = torch.as_tensor(step, dtype=torch.float32).detach().clone().cpu()
        fits = same and all(states.is_like(value, given.get(name)) for name, value in state.items() if name != "step")
        if fits:
            for name, value in state.items():
                if name != "step":
                    states.copy_into(value, given[name])
        else:
            states.convert(param, given, described, state, self.moments, self.names)
        self.state[param] = state
        return not fits
