"""The base of the optimizers: it finds, shards, saves and loads weights and state; each adds how its step computes."""

from __future__ import annotations

import functools
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo.kernels.devices import optimizer_step
from octavo.kernels.reference.optimizer_step import AdamGroup, BitNumbers, SgdGroup, WeightUpdate
from octavo.kernels.step_numbers import key_of
from octavo.optim import state as states
from octavo.optim.gradients import GradientStorage
from octavo.optim.layout import (
    check_options_agree,
    fp8_shards,
    place_of,
    ranks_share_amax,
    settle_gradient,
    share_amaxes,
)
from octavo.optim.masters import MasterForm
from octavo.optim.moment import Moment, moments_of
from octavo.optim.resolution import Resolution
from octavo.optim.state import Settings
from octavo.private import untraced
from octavo.step_count import OPTIMIZER_STEPS
from octavo.tensor.stored_gradient import StoredGradient
from octavo.weights.fsdp2 import is_sharded, on_this_rank
from octavo.weights.stored import StoredWeight

_REFUSED = {
    "amsgrad": "octavo keeps no largest second moments; clip_update bounds updates",
    "foreach": "a step is one launch on a GPU already",
    "fused": "a step is one launch on a GPU already, which heeds a GradScaler without waiting",
    "capturable": "every step can be captured in a CUDA graph, once it has run",
    "decoupled_weight_decay": "that is octavo.optim.AdamW",
    "differentiable": "autograd does not go through octavo's steps",
}


def refuse(**arguments: Any) -> None:
    """Raise ValueError, with the reason, if any of these arguments of torch's optimizers is on."""
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{name}={value!r}: {_REFUSED[name]}; leave the argument out")


def check_not_negative(**numbers: float) -> None:
    """Raise ValueError for a number below 0, or NaN."""
    for name, value in numbers.items():
        if not value >= 0.0:
            raise ValueError(f"{name}={value!r} must be at least 0")


DeviceUpdates = list[tuple[nn.Parameter, WeightUpdate]]  # of weights on one device


class PreparedUpdate(NamedTuple):
    """A weight's update without its gradient, and the values it was made from: it is used again while they stay.

    Attributes:
        data: the tensor that the step writes: the weight, or its codes.
        address: of data.
        version: of data after the last step.
        options: (the weight's group, its number in the optimizer, the seed, its moments' names).
        state: the values of the weight's state.
    """

    update: WeightUpdate
    data: Tensor
    address: int
    version: int
    options: tuple[int, int, int, tuple[str, ...]]
    state: tuple[Any, ...]


def changes_since(prepared: PreparedUpdate, weight: Tensor, data: Tensor) -> tuple[bool, bool]:
    """Return whether a weight has moved to other memory since the last step, and whether others have written it.

    The master of a weight that was written has to begin anew. ``data``: the tensor that a step writes now.
    """
    before = prepared.data
    has_moved = prepared.address != data.data_ptr()
    if not isinstance(weight, StoredWeight):  # the master is the weight and bits below it: a write goes into it
        return has_moved, False
    if not weight.is_shard:
        return has_moved, not has_moved and prepared.version != data._version
    # without rows a shard has no address; where FSDP2 loads it, it gets other memory, in which other bytes are a write
    has_same_bytes = before is data or torch.equal(before.view(torch.uint8), data.view(torch.uint8))
    return before is not data, not has_same_bytes or before._version != prepared.version


class CompactOptimizer(Optimizer):
    """Base of octavo's optimizers: moments in few bytes, weights of any master.

    ``moments`` says how each of the moments called ``names`` is stored; the other arguments are AdamW's.

    A subclass says by ``_options`` how its step computes. It may also have other ``moments_of``, ``names_of`` (which
    moments a group's weights have), ``bounds_update``, ``check_weight``, ``split_group`` and ``_launch``.

    A step has three parts: ``begin_step``; ``_run``, or a ``step_some`` for each batch of weights; ``end_step``.

    Attributes:
        shared_settings: names of attributes that all ranks must have alike; they are pickled.
        also_pickled: names of the other attributes that are pickled.
    """

    names: tuple[str, ...] = ()
    shared_settings: tuple[str, ...] = tuple("moments master seed clip_update skip_nonfinite gradient_storage".split())
    also_pickled: tuple[str, ...] = ()
    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf, and does not wait for them

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        moments: Any,
        master: str | None,
        seed: int,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
    ) -> None:
        if gradient_storage not in (None, "fp8"):
            raise ValueError(f"gradient_storage={gradient_storage!r}: use None or 'fp8'")
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"skip_nonfinite={skip_nonfinite!r}: use True or False")
        self.moments = self.moments_of(moments)
        self.master, self.seed = master, seed
        self.skip_nonfinite, self.gradient_storage = skip_nonfinite, gradient_storage
        self._reset()
        if isinstance(params, set | frozenset):
            raise TypeError("a set's order changes between runs, and random bits with it: give a list of parameters")
        super().__init__(params, defaults)

    def _reset(self) -> None:
        """Give attributes that are neither copied nor pickled the values of an optimizer without any steps."""
        # each weight's update as the last step used it; _current_update makes anew those that are no longer right
        self._prepared: dict[nn.Parameter, PreparedUpdate] = {}
        # the kernels' launches of prepared updates: dropped once one update is made anew, but for the entry "captured",
        # whose tensors CUDA graphs read
        self._plans: dict[Any, Any] = {}
        # _find_positions finds both anew once there are other parameters: each parameter's (group, number), and the
        # weights in FP8 with one scale whose shards lie on several ranks
        self._positions: dict[nn.Parameter, tuple[int, int]] = {}
        self._sharded: list[nn.Parameter] = []
        self._options_compared = False  # whether ranks have compared their options
        self._step_has_begun = False  # from begin_step to end_step, or to a load
        self._was_loaded = False  # from a load to the next begin_step
        self._gradients = None if self.gradient_storage is None else GradientStorage()
        self.in_backward: Any = None  # the handle of update_in_backward
        self.skip: Tensor | None = None  # one number; where it is not 0, the next step does nothing
        self.skip_flag: Tensor | None = None  # not 0 where the last step did nothing; for callers to read
        self.resolution: Resolution | None = None

    def _options(self, group: dict[str, Any]) -> AdamGroup | SgdGroup:
        """Return a group's options in the form that the kernels take."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; ValueError for weights that it can't update, and nothing is added then."""
        count = len(self.param_groups)
        try:
            for group in self.split_group(param_group):
                super().add_param_group(group)
                for param in group["params"]:
                    self.check_weight(param, group, self.settings)
            self._attach()
        except BaseException:
            del self.param_groups[count:]
            self._attach()
            raise
        self._forget_clip_update()
        self._describe()
        for group in self.param_groups[count:]:
            for shard in fp8_shards(group["params"]):
                shard.facts.awaited = True

    def split_group(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the groups that are added in place of one that the user gives."""
        yield group

    def _describe(self) -> None:
        """Write to each group how states are to be read: checkpoints of torch.distributed save groups' entries."""
        for group in self.param_groups:
            group["octavo"] = states.describe(self.settings, self.seed)

    def check_weight(self, weight: Tensor, group: dict[str, Any], settings: Settings) -> None:
        """Raise ValueError if an optimizer of these settings can't update a weight of this group."""
        states.check_weight(weight, settings.only(self.names_of(group)), self.bounds_update(settings, [weight]))

    def moments_of(self, moments: Any) -> tuple[Moment, ...]:
        """Return the Moments that a ``moments`` argument means for this optimizer."""
        return moments_of(moments, len(self.names))

    def bounds_update(self, settings: Settings, weights: Iterable[Tensor]) -> bool:
        """Whether steps of all these weights would bound updates under these settings."""
        return False

    @functools.cached_property
    def clip_update(self) -> bool:
        """Whether steps bound updates: Adam clips them to R_t, the largest that exact Adam can make."""
        return self.bounds_update(self.settings, self.all_params())

    def _forget_clip_update(self) -> None:
        """Drop ``clip_update``, which settings, parameters and weights' storage decide, as one of these changed."""
        vars(self).pop("clip_update", None)

    def adopt(self, settings: Settings) -> None:
        """Take the settings to which optim/conversion.py has converted weights and state as the optimizer's own."""
        self.moments, self.master = settings.moments, settings.master
        self._forget_clip_update()
        self._describe()
        self.forget_prepared()
        self.end_step()  # conversion has found new amaxes, whose maxima over ranks this takes

    def measure(self, weights: Iterable[nn.Parameter] | None) -> None:
        """Sum updates of these weights in a new ``resolution`` from the next step on; None: measure no updates."""
        self.resolution = None if weights is None else Resolution(weights)
        self.forget_prepared()

    def forget_prepared(self) -> None:
        """Drop what earlier steps prepared for the next ones."""
        self._prepared, self._positions, self._options_compared = {}, {}, False
        self._forget_plans()

    def _forget_plans(self) -> None:
        """Drop prepared launches, except the tensors that CUDA graphs read."""
        self._plans = {name: plan for name, plan in self._plans.items() if name == "captured"}

    def __getstate__(self) -> dict[str, Any]:
        pickled = {*self.shared_settings, *self.also_pickled}
        return super().__getstate__() | {name: value for name, value in vars(self).items() if name in pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        self._attach()

    def all_params(self) -> list[nn.Parameter]:
        """Return the parameters of all groups, in their order."""
        return [param for group in self.param_groups for param in group["params"]]

    def _attach(self) -> None:
        """Hook parameters that have no hook yet, with gradients in FP8: some may be new, or no longer frozen."""
        if self._gradients is not None:
            self._gradients.hooks.attach(self.all_params())

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for all micro-batches of a step but the last; gradients kept in FP8 are summed in float32.

        With update_in_backward it is the handle's; without either it does nothing, and torch adds gradients up.

        Example:
            >>> import torch, octavo
            >>> layer = torch.nn.Linear(128, 128)
            >>> optimizer = octavo.optim.AdamW(layer.parameters(), gradient_storage="fp8")
            >>> with optimizer.accumulate():
            ...     layer(torch.ones(2, 128)).sum().backward()
            >>> layer(torch.ones(2, 128)).sum().backward()
            >>> layer.weight.grad
            StoredGradient((128, 128), torch.float32)
        """
        gradient_taker = self.in_backward or self._gradients  # it uses or rounds gradients as they come
        return nullcontext() if gradient_taker is None else gradient_taker.accumulate()

    def step_some(self, params: list[nn.Parameter], grad_scale: Tensor | None = None) -> None:
        """Update weights by their gradients, divided by ``grad_scale``, between ``begin_step`` and ``step()``."""
        with torch.no_grad(), OPTIMIZER_STEPS.writing(params):
            self._run(params, None, grad_scale)

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero or drop gradients, as torch does; those that were used in backward are then zeros or absent, too."""
        super().zero_grad(set_to_none)
        if self.in_backward is not None:
            self.in_backward.leaves_zeros = not set_to_none

    @torch.no_grad()
    def begin_step(self) -> None:
        """Begin a step, unless it has begun: where weights were loaded or written, take amaxes' maxima over ranks.

        Every rank decides alike whether to, by its states, its tensors' versions and loads.
        """
        if self._step_has_begun:
            return
        self._step_has_begun = True
        self._compare_options()
        params = self._params_with_shared_amax()
        new_masters = [begins_anew for _, begins_anew in map(self._current_update, params)]  # of all: each is prepared
        if any(new_masters) or (self._was_loaded and params):
            share_amaxes(params, self.state)
        self._was_loaded = False

    def end_step(self) -> None:
        """End a step: take the maxima over ranks of updated weights' amaxes."""
        self._step_has_begun = False
        share_amaxes(self._params_with_shared_amax(), self.state)

    def _compare_options(self) -> None:
        """Have ranks compare their options, once after each change."""
        if not self._options_compared:
            self._options_compared = True
            check_options_agree(self)

    def _params_with_shared_amax(self) -> list[nn.Parameter]:
        self._find_positions()
        return [param for param in self._sharded if param.requires_grad]

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have gradients.

        On a GPU that is one launch, without waiting for the device; it can be captured in a CUDA graph once it has run,
        with lr as a tensor if it is to change. In compiled code it is a graph break.
        """
        self._attach()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_backward is not None:
            self.skip_flag = None
            self.begin_step()
            self.in_backward.finish()
            self.end_step()
            return loss
        # before gradients are redistributed or checked for inf and NaN, for which ranks wait
        self._compare_options()
        params = [param for param in self.all_params() if settle_gradient(param) is not None]
        gradients = [param.grad for param in params if param.grad is not None]
        skip, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)  # a GradScaler sets both
        if skip is None and self.skip_nonfinite and params:
            skip = ~torch.isfinite(states.largest_gradient(gradients))
        if self.skip is not None:
            skip = self.skip if skip is None else skip + self.skip.to(skip.device)
        self.skip_flag = skip
        self.begin_step()
        self._run(params, skip, scale)
        if scale is not None:
            states.unscale(gradients, scale, skip)
        self.end_step()
        return loss

    def _run(self, params: list[nn.Parameter], skip: Tensor | None, scale: Tensor | None) -> None:
        updates: dict[torch.device, DeviceUpdates] = {}
        self._find_positions()
        for param in params:
            update = self._update(param)
            updates.setdefault(update.gradient.device, []).append((param, update))
        for device, on_device in updates.items():
            skip_there = None if skip is None else skip.to(device, torch.float32, non_blocking=True)
            scale_there = None if scale is None else scale.to(device, torch.float32, non_blocking=True)
            sums = None if self.resolution is None else self.resolution.on(device)
            self._launch(on_device, skip_there, scale_there, sums)
        self._note_writes(params)

    def _note_writes(self, params: list[nn.Parameter]) -> None:
        """Raise the versions of what a step wrote; copy it to weights that are not contiguous from their copies."""
        codes: dict[nn.Parameter, Tensor] = {}
        for param in params:
            prepared, weight = self._prepared[param], on_this_rank(param)
            if isinstance(weight, StoredWeight):
                codes[param] = weight.qdata
            elif prepared.update.master.weight.data_ptr() != prepared.address:
                weight.copy_(prepared.update.master.weight.view(weight.shape))
        # of a sharded weight only the local shard was written
        torch.autograd.graph.increment_version([*params, *codes.values()])
        for param, qdata in codes.items():
            self._prepared[param] = self._prepared[param]._replace(data=qdata, version=qdata._version)

    def _launch(self, updates: DeviceUpdates, skip: Tensor | None, scale: Tensor | None, sums: Tensor | None) -> None:
        """Update weights of one device; arguments as the kernels' ``optimizer_step``."""
        groups: Any = [self._options(group) for group in self.param_groups]
        optimizer_step([update for _, update in updates], groups, skip, scale, self._plans, sums)

    def _find_positions(self) -> None:
        """Find each parameter's group and its number among all parameters, on which its random bits depend."""
        params = self.all_params()
        if len(params) != len(self._positions) or not all(map(operator.is_, params, self._positions)):
            groups = [number for number, group in enumerate(self.param_groups) for _ in group["params"]]
            self._sharded = [param for param in params if ranks_share_amax(param)]
            self._positions = dict(zip(params, zip(groups, range(len(params)), strict=True), strict=True))

    def shared_options(self) -> dict[str, Any]:
        """Return the options on which ranks that share weights must agree."""
        options = {name: getattr(self, name) for name in self.shared_settings}
        for number, group in enumerate(self.param_groups):
            options |= {f"{name} of group {number}": value for name, value in self._shared_options_of(group).items()}
        if (handle := self.in_backward) is not None:
            options |= {"update_in_backward's clip": handle.clip, "outstanding_weight_updates_bytes": handle.threshold}
        return options

    def _shared_options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return self._options(group)._replace(lr=float(group["lr"]))._asdict()

    def _update(self, param: nn.Parameter) -> WeightUpdate:
        grad = on_this_rank(param.grad)  # type: ignore[arg-type]
        if grad.is_sparse:
            raise RuntimeError("octavo's optimizers take dense gradients only")
        prepared, _ = self._current_update(param)
        update = prepared.update
        shape = update.master.weight.shape
        if grad.numel() == 0 and shape.numel() > 0:  # the weight is a row that stands in for a shard without rows
            return update._replace(gradient=torch.zeros(shape, device=grad.device, dtype=torch.float32))
        if isinstance(grad, StoredGradient):
            return states.with_codes(update, grad)
        return update._replace(gradient=grad.resolve_neg().contiguous().view(shape))

    def _current_update(self, param: nn.Parameter) -> tuple[PreparedUpdate, bool]:
        """Return a weight's update, and whether its master begins anew: in the first step, or after a write.

        It brings what the update reads up to date: it makes the state of a first step, restarts the master of a weight
        that was written, and then drops the extra bits of a weight in FP8, which the new master has.
        """
        weight, state = on_this_rank(param), self.state[param]
        data = states.data_of(weight)
        is_new = not state
        group, number = self._positions[param]
        names = self.names_of(self.param_groups[group])
        if is_new:
            state.update(states.new_state(param, self.settings.only(names)))
        options = group, number, self.seed, names
        prepared = self._prepared.get(param)
        has_moved, was_written = (True, False) if prepared is None else changes_since(prepared, weight, data)
        if (
            prepared is None
            or has_moved
            or prepared.options != options
            or [*map(id, prepared.state)] != [*map(id, state.values())]
            or not data.is_contiguous()
        ):
            prepared = self._prepare(param, weight, options)
        if was_written:  # by a load or by the user: the master begins anew, as these codes
            for name, value in MasterForm.of(param, self.master).new_state(weight).items():
                on_this_rank(state[name]).copy_(on_this_rank(value))
            prepared = self._prepared[param] = prepared._replace(data=data, version=data._version)
        begins_anew = is_new or was_written
        if isinstance(weight, StoredWeight) and begins_anew:
            weight.extra_bits = None  # the master has them
        return prepared, begins_anew

    def _prepare(self, param: nn.Parameter, weight: Tensor, options: Any) -> PreparedUpdate:
        """Make a weight's update anew, which the next steps use too; launches of the update before it are dropped."""
        group, number, seed, names = options  # see PreparedUpdate
        if param in self._prepared:
            self._forget_plans()
        if isinstance(weight, StoredWeight) and not self.clip_update:  # it may have been stored since
            self._forget_clip_update()
        self.check_weight(param, self.param_groups[group], self.settings)
        state = self.state[param]
        data = states.data_of(weight)
        settings = self.settings.only(names)
        if settings.in_state(state) != settings:  # SGD's group was given a momentum, which begins as the gradient
            state.update(states.new_state(param, settings) | state)
            state["step"].zero_()
        states.renew_master(param, state, self.master)
        master, moments = states.for_kernel(param, weight, state, settings)
        bits = BitNumbers(key_of(seed, number), *place_of(param))
        measured = self.resolution is not None and self.resolution.counts(param)
        update = WeightUpdate(master, moments, master.weight, state["step"], bits, group, None, measured)
        prepared = PreparedUpdate(update, data, data.data_ptr(), data._version, options, (*state.values(),))
        self._prepared[param] = prepared
        return prepared

    @property
    def settings(self) -> Settings:
        """Return how the optimizer keeps weights."""
        return Settings(self.moments, self.names, self.master)

    def settings_of(self, group: dict[str, Any]) -> Settings:
        """Return the settings of a group's weights."""
        return self.settings.only(self.names_of(group))

    def names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that steps of a group read and write."""
        return self.names

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's dict, with moments' and masters' own tensors; each group says how to read them.

        Weights that live in FP8 and have no state yet are saved with the state that their first step would begin with,
        as the extra bits of their values are kept nowhere else; ranks that share such weights call this together.
        """
        self._describe()
        first_states: Any = self._first_states()
        self.state.update(first_states)
        try:
            return super().state_dict()
        finally:
            for param in first_states:
                del self.state[param]

    @torch.no_grad()
    def _first_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return first states of the trained weights without a state; none if none of these weights lives in FP8."""
        groups = {param: group for group in self.param_groups for param in group["params"] if param.requires_grad}
        missing = [param for param in groups if not self.state.get(param)]
        if not fp8_shards(missing):
            return {}
        first_states = {param: states.new_state(param, self.settings_of(groups[param])) for param in missing}
        if not first_states.keys().isdisjoint(params := self._params_with_shared_amax()):
            share_amaxes(params, self.state | first_states)
        return first_states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's; one with other moments or masters is converted, with a warning.

        A weight's master is loaded if it was kept in the same way; else it begins as the weight: so load the model
        first. A state without steps is dropped where the first step would make the same one, because accelerate's
        ``prepare`` loads an optimizer's own state, and may replace or store the weights anew afterwards.

        Raises:
            ValueError: if the state does not fit the parameters; nothing is changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved_groups = state_dict["param_groups"]
        groups = states.groups_to_load(saved_groups, self)
        description = saved_groups[-1].get("octavo")  # how the state is to be read; None: it is torch's
        group_of = {param: group for group in groups for param in group["params"]}
        saved_ids = dict(zip(group_of, (index for group in saved_groups for index in group["params"]), strict=True))
        same_form = description is None or states.has_form_of(description, self.settings)
        loaded_states: dict[Tensor, states.LoadedState] = {}
        for param, group in group_of.items():
            if saved := state_dict["state"].get(saved_ids[param]):
                settings = self._settings_in(saved, group)
                loaded_states[param] = states.load_state(param, saved, description, same_form, settings)
        new_states = defaultdict(dict, {param: loaded.state for param, loaded in loaded_states.items()})
        lost_masters = {loaded.lost_master for loaded in loaded_states.values()}
        is_converted = any(lost_masters) or any(loaded.moments_converted for loaded in loaded_states.values())
        if not is_converted and self._would_begin_with(new_states, group_of):
            new_states.clear()
        super().__setstate__({"state": new_states, "param_groups": groups})
        self.forget_prepared()
        self._step_has_begun, self._was_loaded = False, True
        self.seed = self.seed if description is None else description["seed"]
        self._describe()
        self._attach()
        for shard in fp8_shards(new_states):
            shard.extra_bits = None  # the loaded masters have them
        for attached in filter(None, (self.resolution, self.in_backward)):
            attached.restart()
        if is_converted:
            warnings.warn(states.conversion_warning(description, self.settings, lost_masters), stacklevel=2)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _would_begin_with(self, loaded: dict[Any, dict[str, Any]], group_of: dict[Any, dict[str, Any]]) -> bool:
        """Whether the first step would make just these loaded states, so that they need not be kept.

        Only weights in FP8 have a state saved before their first step. Sharded ones keep it: ranks, which could answer
        differently, begin their states together.
        """
        if not fp8_shards(loaded) or any(is_sharded(param) or state["step"].is_meta for param, state in loaded.items()):
            return False
        pairs = ((state, states.new_state(param, self.settings_of(group_of[param]))) for param, state in loaded.items())
        return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)

    def _settings_in(self, saved_state: dict[str, Any], group: dict[str, Any]) -> Settings:
        """Return the settings for a loaded state of a weight of this group."""
        return self.settings_of(group)
