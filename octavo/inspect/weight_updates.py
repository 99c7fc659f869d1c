"""Recording weights: the effects of their casts, how far a step moves them, how many moments are flushed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.autograd.observer import LayerCounts
from octavo.distributed.ranks import Ranks
from octavo.granularity import PerTensor
from octavo.inspect.rows import RecordedLayer
from octavo.nn.recipe_module import RecipeModule
from octavo.optim.base import CompactOptimizer
from octavo.optim.masters import MasterForm
from octavo.scaling.recipe import Cast
from octavo.weights.fsdp2 import on_this_rank, own_slices
from octavo.weights.operands import weight_of
from octavo.weights.stored import StoredWeight


class Statistic(NamedTuple):
    """A sum over a weight's sampled elements; by its divisor it gives a measure of a record, which has its name.

    The measure is sum / divisor, or the square root of that where the sum ``is_of_squares``.
    """

    divisor: str = ""  # another statistic; "": it gives no measure
    is_of_squares: bool = False


# The columns of a record's array "moved", [weights, 18], in this order. The names are in code alone.
WEIGHT_STATISTICS = {
    "elements": Statistic(),  # how many are sampled of the weight
    "moments": Statistic(),  # how many are sampled of each moment in codes
    "masters": Statistic(),  # how many are sampled of a master that was there before the step
    "update": Statistic("elements", True),  # what the optimizer's step changes
    "grid": Statistic("", True),  # the distances between numbers of the weight's dtype
    "changed": Statistic("elements"),  # how many the step changes
    "first_flushed": Statistic("moments"),  # how many first moments are 0 while the second is not
    "second_flushed": Statistic("moments"),  # how many second moments are 0 while the first is not
    "master_update": Statistic("masters", True),  # what the step changes of the master
    "master_changed": Statistic("masters"),  # how many of the master the step changes
    "between": Statistic("elements", True),  # the change since the last recorded update
    "gradients": Statistic(),  # how many are sampled of the gradient
    "plain_second_moments": Statistic(),  # how many are sampled of a second moment that is a plain tensor
    "sampled_before_update": Statistic(),  # how many are sampled before the optimizer's step
    "size": Statistic("elements", True),  # the weight after the step
    "gradient": Statistic("gradients", True),  # what the optimizer gets, inf if not finite
    "outside": Statistic("sampled_before_update", True),  # the change before the update, by others
    "second_moment": Statistic("plain_second_moments"),  # the sampled second moments
}
# {a further measure of a record: the statistic that it compares with "grid"}
RESOLUTIONS = {"resolution": "update", "master_resolution": "master_update"}
SAMPLED = 1024  # at most so many elements of a weight are read
SECOND = "exp_avg_sq"  # the name of second moments that are plain tensors
FROZEN = "frozen"  # the kind of an event: parameters, "a.weight, b.weight", that no longer require a gradient
GROUP = " of group "  # in the name of an option, between it and its group's number


def count_weights(layers: Sequence[RecordedLayer], ranks: Ranks) -> None:
    """Count what the casts of weights do, as the next forward will make them; of sharded weights this rank's rows."""
    layers = [each for each in layers if isinstance(each[0], RecipeModule)]  # octavo.restore makes others torch's
    shared = _shared_scales(layers, ranks)
    for at, (module, layer) in enumerate(layers):
        weight = weight_of(module)
        if weight is None or weight.ndim < 2 or module.recipe is not layer.recipe:  # FSDP1's part has ndim 1
            continue
        local = on_this_rank(weight).detach()
        if local.numel() == 0:
            continue
        matrices, pair = local, None
        if isinstance(local, StoredWeight):
            matrices = local.dequantize()
            pair = local.granularity.tile, (local.qdata.flatten(0, -2), local.scale_inv.flatten(0, -2))
        scale = module.delayed_scale if module.recipe.delayed else None
        experts = slice(first := first_expert(weight), first + len(local)) if weight.ndim == 3 else None
        layer.count_weight(matrices, pair, module.stores_transposed, scale, shared.get(at), experts)


def first_expert(weight: Tensor) -> int:
    """Return the index of the first expert whose matrix this rank has."""
    return own_slices(weight.shape, weight)[0].start


def _shared_scales(layers: Sequence[RecordedLayer], ranks: Ranks) -> dict[int, Tensor]:
    """Return {index of a layer: scale} of per-tensor casts of sharded weights, from the amax of all ranks' rows."""
    shards: dict[int, tuple[Tensor, Cast]] = {}
    for at, (module, _) in enumerate(layers):
        weight = weight_of(module)
        cast = next((c for c in module.recipe.weight_casts[:2] if c is not None and c.tile == PerTensor().tile), None)
        if weight is None or cast is None or weight.ndim == 3 or module.recipe.delayed:
            continue
        shard = on_this_rank(weight)
        if shard is not weight and not isinstance(shard, StoredWeight):
            shards[at] = shard.detach(), cast
    if not shards:
        return {}
    return dict(zip(shards, LayerCounts.shared_scales([*shards.values()], ranks.largest), strict=True))


class _Sample(NamedTuple):
    """Views of at most SAMPLED elements of a weight [N, K], at equal distances."""

    weight: Tensor  # this rank's rows; for a weight in FP8 the pair
    elements: Tensor  # for a weight in FP8 its codes, uint8
    master: MasterForm | None  # None if the optimizer keeps nothing besides the weight
    low_bits: Tensor | None  # the sampled elements of its low bits, or of the master itself
    moments: Sequence[Tensor]  # the sampled codes of the first and the second, uint8; empty if they are not in codes
    second: Tensor  # the sampled elements of a second moment that is a plain tensor; else empty

    @classmethod
    def of(cls, module: RecipeModule | nn.Parameter, optimizer: torch.optim.Optimizer | None) -> _Sample:
        """Return the sample of a module's weight, or of a parameter, and of its present state in the optimizer."""
        param: Tensor | None = module if isinstance(module, Tensor) else weight_of(module)
        if param is None:
            param = torch.zeros(0, device=module.parameters_device, dtype=torch.float32)  # type: ignore[union-attr]
        param_state = {} if optimizer is None else optimizer.state.get(param, {})
        state = {name: on_this_rank(value) for name, value in param_state.items() if isinstance(value, Tensor)}
        weight = on_this_rank(param).detach()
        low_bits = state.get("master_rest")
        master = None
        if isinstance(optimizer, CompactOptimizer) and low_bits is not None:
            master = MasterForm.of(param, optimizer.settings.master)
            assert master.low_bits_dtype is not None
            low_bits = strided(low_bits.view(master.low_bits_dtype))
        names = sorted((name for name in state if name.endswith("_codes")), key=len)
        codes = [strided(state[name].view(torch.uint8)) for name in names]
        elements = strided(weight.qdata.view(torch.uint8) if isinstance(weight, StoredWeight) else weight)
        second = strided(state[SECOND]) if SECOND in state else elements[:0]
        return cls(weight, elements, master, low_bits, codes if len(codes) == 2 else (), second)


class _Values(NamedTuple):
    """Sampled elements of all weights at a time: float32 [weights, SAMPLED] each, padded with zeros."""

    forms: list[MasterForm | None]  # of the masters
    weights: Tensor
    spacing: Tensor  # the distance between the weight's number and the next one of its dtype
    masters: Tensor  # the weights, where the optimizer keeps nothing besides them


Weights = Sequence[RecipeModule | nn.Parameter]  # layers, and parameters of other modules


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch.optim.Optimizer, of accelerate's the one that it wraps, whose step runs hooks; else None."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def hook_before_update(optimizer: torch.optim.Optimizer, call: Callable[[bool], None]) -> Any:
    """Call a function before each update of an optimizer; return a handle with ``remove()``.

    Where ``optimizer.step`` gets a closure that computes the gradients, as Lightning's, it is called after that.
    ``call(True)``: after a closure, for which the optimizer may have moved weights, as sharpness-aware minimisation
    does.
    """

    def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if torch.compiler.is_compiling() or not callable(closure):
            return call(False)

        def closure_and_call() -> Any:
            loss = closure()
            call(True)
            return loss

        return (args[0], *args[2:]), {**kwargs, "closure": closure_and_call}

    return optimizer.register_step_pre_hook(before_step)


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter's gradient, sharded as the parameter is.

    Under sequence parallelism gradients of norms arrive as addends, and that of an embedding as a whole.
    """
    grad: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(grad, "placements", placements) != placements:
        grad = grad.redistribute(placements=placements)
    return None if grad is None else on_this_rank(grad)


class Updates:
    """Reads weights before and after the optimizer's step of recorded steps, for WEIGHT_STATISTICS of each.

    Without an optimizer, or if its ``step`` is not called or is compiled, the step's begin and end are compared, and
    gradients are those that are left at the end, of weights that changed. ``is_hooked``: hooks wait for a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._hooks = contextlib.ExitStack()
        self._weights: Weights = ()
        self._last: Tensor | None = None  # sampled weights after the last recorded step's update
        self._statistics: Tensor | None = None  # from the step's begin until the optimizer's update
        if (hooked := torch_optimizer(optimizer)) is not None:
            self._hooks.enter_context(hooked.register_step_pre_hook(lambda *_: self._before_step()))
            self._hooks.enter_context(hook_before_update(hooked, lambda _: self._before_update()))
            self._hooks.enter_context(hooked.register_step_post_hook(lambda *_: self._after_update()))
        self.is_hooked = hooked is not None

    def close(self) -> None:
        """Remove the hooks from the optimizer's step."""
        self._hooks.close()

    def begin(self, weights: Weights, is_as_before: bool) -> None:
        """Begin a recorded step; ``is_as_before``: the last one had the same weights."""
        _, values = _read(weights, self.optimizer)
        self._weights = weights
        self._last = self._last if is_as_before else None
        self._begun = values  # at the step's begin
        self._before = values  # before the optimizer's step, which reads them again
        self._gradients: tuple[list[int], Tensor] | None = None  # as the optimizer gets them

    def _before_step(self) -> None:
        """Read weights before the optimizer's step, once in a recorded step."""
        if not torch.compiler.is_compiling() and self._weights and self._gradients is None:
            _, self._before = _read(self._weights, self.optimizer)

    def _before_update(self) -> None:
        """Read the gradients that the optimizer gets, once in a recorded step."""
        if not torch.compiler.is_compiling() and self._weights and self._gradients is None:
            self._gradients = self._read_gradients()

    @torch.no_grad()
    def _read_gradients(self) -> tuple[list[int], Tensor]:
        """Return how many elements of each gradient are sampled, and these; of gradients that are plain tensors."""
        params = [weight if isinstance(weight, Tensor) else weight_of(weight) for weight in self._weights]
        local = [local_gradient(p) if p is not None and p.is_leaf else None for p in params]
        none = self._before.weights[0, :0]
        gradients = [strided(grad) if type(grad) is Tensor and not grad.is_sparse else none for grad in local]
        return [len(grad) for grad in gradients], padded(gradients)

    def _after_update(self) -> None:
        """Compare weights after the optimizer's step, in a recorded step."""
        if not torch.compiler.is_compiling() and self._weights:
            self._statistics = self._since_begin()

    def end(self) -> Tensor:
        """Return WEIGHT_STATISTICS of the step, summed over samples: float64 [weights, 18]."""
        statistics = self._since_begin() if self._statistics is None else self._statistics
        self._statistics, self._weights = None, ()
        return statistics

    @torch.no_grad()
    def _since_begin(self) -> Tensor:
        """Return WEIGHT_STATISTICS from the step's begin until now, summed over samples: float64 [weights, 18]."""
        samples, after = _read(self._weights, self.optimizer)
        before, begun = self._before, self._begun.weights
        is_watched = self._gradients is not None
        gradient_lengths, gradients = self._gradients or self._read_gradients()
        update, master_update = after.weights - before.weights, after.masters - before.masters
        drift = begun - (begun if self._last is None else self._last)
        terms = {"update": update, "master_update": master_update, "size": after.weights, "gradient": gradients}
        terms |= {"grid": after.spacing, "between": drift, "outside": before.weights - begun}
        sums = dict(zip(terms, torch.stack([*terms.values()]).double().square().sum(-1), strict=True))
        is_changed = torch.stack([update, master_update]) != 0
        sums["changed"], sums["master_changed"] = is_changed.sum(-1, dtype=torch.float64)
        elements, forms = [len(sample.elements) for sample in samples], zip(samples, before.forms, strict=True)
        # not in the first step, which creates the master
        has_same_master = [sample.master is not None and sample.master == form for sample, form in forms]
        masters = [count * is_same for count, is_same in zip(elements, has_same_master, strict=True)]
        counts = {"elements": elements, "masters": masters, "gradients": gradient_lengths}
        counts["moments"] = [len(sample.moments[0]) if sample.moments else 0 for sample in samples]
        counts["plain_second_moments"] = [len(sample.second) for sample in samples]
        counts["sampled_before_update"] = [count * is_watched for count in elements]
        sums |= zip(counts, _on_device(tuple(map(tuple, counts.values())), update.device), strict=True)
        if not is_watched:  # gradients that are left are known to be of this step where the weight changed
            sums["gradients"] = sums["gradients"] * (sums["changed"] > 0)
        sums["first_flushed"], sums["second_flushed"] = _flushed(samples)
        sums["second_moment"] = padded([sample.second for sample in samples]).double().sum(-1)
        self._last = after.weights
        return torch.stack([sums[name] for name in WEIGHT_STATISTICS], 1)


def optimizer_facts(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return an optimizer's options and age, as numbers by name for a record; nothing waits for the device.

    "lr" is the largest of its groups', "state_age" the steps that the state of its first weight has seen. A group's
    options are "weight_decay of group 0", "betas 1 of group 0" and so on.
    """
    if optimizer is None:
        return {}
    groups = optimizer.param_groups
    ages = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    facts = {"lr": _largest([group["lr"] for group in groups if "lr" in group]), "state_age": next(ages, None)}
    for at, group in enumerate(groups):
        for name, value in group.items():
            parts = enumerate(value) if name == "betas" else [("", value)]
            named = {f"{name} {number}".strip() + f"{GROUP}{at}": part for number, part in parts}
            facts |= {option: fact for option, fact in named.items() if isinstance(fact, float | int) or name == "lr"}
    return facts


def _largest(rates: Sequence[float | Tensor]) -> float | Tensor | None:
    """Return the largest of learning rates, a tensor if one is; None without any.

    Python's ``max`` would wait for tensors' device: each comparison asks for its result.
    """
    if len(rates) < 2 or not any(isinstance(rate, Tensor) for rate in rates):
        return max(rates, default=None)
    devices = [rate.device if isinstance(rate, Tensor) else "cpu" for rate in rates]  # kernels take numbers of the CPU
    tensors = [torch.as_tensor(rate, dtype=torch.float64, device=at) for rate, at in zip(rates, devices, strict=True)]
    return functools.reduce(torch.maximum, tensors)


@functools.lru_cache(maxsize=8)
def _on_device(numbers: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, float64, which equal ones share: most steps have the same counts."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def other_parameters(model: nn.Module, layers: Sequence[RecordedLayer]) -> dict[str, nn.Parameter]:
    """Return {name: parameter} of those that are no recorded layer's weight: norms' weights, biases, embeddings."""
    recorded = {id(weight_of(module)) for module, _ in layers}
    others = {name: param for name, param in model.named_parameters() if id(param) not in recorded}
    devices = {module.parameters_device for module, _ in layers}
    return {name: param for name, param in others.items() if param.is_floating_point() and param.device in devices}


def tied_names(model: nn.Module) -> set[str]:
    """Return the parameters that several modules share, each as "a.weight and b.weight"."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {" and ".join(several) for several in names.values() if len(several) > 1}


def trained_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {name for name, param in model.named_parameters() if param.requires_grad}


def strided(tensor: Tensor) -> Tensor:
    """Return at most SAMPLED elements of a tensor, at equal distances."""
    flat = tensor.reshape(-1)
    step = _distance(len(flat))
    return flat[: step * SAMPLED : step]


def _distance(elements: int) -> int:
    """Return the distance of sampled elements: odd, as an even one would sample few columns of rows of even lengths."""
    return max(1, (elements // SAMPLED - 1) | 1)


def padded(samples: Sequence[Tensor]) -> Tensor:
    """Return samples as one tensor [samples, SAMPLED], padded with zeros, in few launches however many they are."""
    if all(len(sample) == SAMPLED for sample in samples):
        return torch.stack([*samples])
    numbers = torch.cat([*samples])
    is_sampled = _is_sampled(tuple(map(len, samples)), numbers.device)
    return numbers.new_zeros(is_sampled.shape).masked_scatter_(is_sampled, numbers)


@functools.lru_cache(maxsize=32)
def _is_sampled(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where samples of these lengths have numbers, and no padding: [samples, SAMPLED]."""
    return (torch.arange(SAMPLED, device="cpu") < torch.tensor(lengths, device="cpu").unsqueeze(1)).to(device)


@torch.no_grad()
def _read(weights: Weights, optimizer: torch.optim.Optimizer | None) -> tuple[list[_Sample], _Values]:
    """Return samples and their values, which a few launches read, however many layers there are."""
    samples = [_Sample.of(weight, optimizer) for weight in weights]
    by_key: dict[object, list[int]] = {}
    for at, sample in enumerate(samples):
        by_key.setdefault((type(sample.weight), sample.weight.dtype, sample.master), []).append(at)
    rows: dict[int, Tensor] = {}
    for indices in by_key.values():
        alike = [samples[at] for at in indices]
        read = torch.stack(_read_stored(alike) if isinstance(alike[0].weight, StoredWeight) else _read_plain(alike))
        rows |= zip(indices, read.unbind(1), strict=True)
    values = torch.stack([rows[at] for at in range(len(samples))], 1)
    return samples, _Values([sample.master for sample in samples], *values)


def _low_bits(samples: Sequence[_Sample]) -> Tensor:
    """Return the low bits of samples' masters, or the masters themselves, [samples, SAMPLED]."""
    return padded([sample.low_bits for sample in samples if sample.low_bits is not None])


def _read_plain(samples: Sequence[_Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of _Values, [samples, SAMPLED], of plain weights."""
    elements = padded([sample.elements for sample in samples])
    values = elements.float()
    eps = torch.full_like(values, torch.finfo(elements.dtype).eps).masked_fill_(values == 0, 0)
    masters = values
    if (master := samples[0].master) is not None:
        masters = master.for_kernel(elements, {"master_rest": _low_bits(samples)}).read_all(elements)
    return values, torch.ldexp(eps, torch.frexp(values).exponent - 1), masters


def _read_stored(samples: Sequence[_Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``_read_plain`` does, of weights in FP8, from their codes and each element's scale_inv."""
    codes = padded([sample.elements for sample in samples])
    weights: list[Any] = [sample.weight for sample in samples]
    scales_by_weight = [weight.scale_inv.float().reshape(-1) for weight in weights]  # E8M0 of a frozen one in 1x32
    scales = torch.cat([*scales_by_weight, codes.new_zeros(1, dtype=torch.float32)])
    shapes = tuple((tuple(weight.shape), weight.granularity) for weight in weights)
    scale_inv = scales[_scale_indices(shapes, codes.device)]
    values = codes.view(weights[0].qdata.dtype).float()
    exponent = (torch.frexp(values).exponent - 1).clamp_(min=-6)  # E4M3's smallest normal is 2^-6
    distances = torch.ldexp(scale_inv, exponent - 3)
    values = values * scale_inv
    if (master := samples[0].master) is None:
        return values, distances, values
    low_bits = _low_bits(samples)
    if low_bits.dtype == torch.float32:  # the master itself
        return values, distances, low_bits
    one = torch.ones(1, 1, device=codes.device, dtype=torch.float32)
    return values, distances, master.for_kernel(codes, {"master_rest": low_bits}, one).read_all(codes) * scale_inv


@functools.lru_cache(maxsize=8)
def _scale_indices(shapes: tuple[Any, ...], device: torch.device) -> Tensor:
    """Return the index of each sampled element's scale_inv among those of all weights; -1 for padding."""
    indices, begin = torch.full((len(shapes), SAMPLED), -1, device="cpu"), 0
    for of_weight, (shape, granularity) in zip(indices, shapes, strict=True):
        (rows, cols), (height, width) = granularity.scale_shape(shape[-2:]), granularity.tile
        elements, numbers = math.prod(shape), math.prod(shape[-2:])
        at = torch.arange(0, elements, _distance(elements), device="cpu")[:SAMPLED]
        expert, in_matrix = at // numbers, at % numbers
        row = in_matrix // shape[-1] // height if rows > 1 else 0
        column = in_matrix % shape[-1] // width if cols > 1 else 0
        of_weight[: len(at)] = begin + (expert * rows + row) * cols + column
        begin += elements // numbers * rows * cols
    return indices.to(device)


def _flushed(samples: Sequence[_Sample]) -> list[Tensor]:
    """Return how many codes of each first moment are 0 where the second's are not, and the other way round."""
    none = torch.zeros(SAMPLED, dtype=torch.uint8, device=samples[0].elements.device)
    first, second = (padded([s.moments[which] if s.moments else none for s in samples]) for which in range(2))
    no_first, no_second = first & 0x7F == 0, second == 0
    return [only.sum(-1, dtype=torch.float64) for only in (no_first & ~no_second, no_second & ~no_first)]
