"""Muon whose momentum takes one or two bytes.

A step of a matrix is two launches of SGD's rule, and torch's orthogonalisation between them. The first has the momentum
follow the gradient, and leaves the direction, float32, in a scratch that all matrices share; the second moves the
weight's master along the orthogonal matrix, which by then is in the scratch. Experts' matrices, stacked in one weight,
go through each of the three together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.formats import E4M3
from octavo.granularity import BLOCK, PerBlock, PerTensor
from octavo.kernels.devices import optimizer_step
from octavo.kernels.reference.optimizer_state import Fp8Weight, MasterWeight
from octavo.kernels.reference.optimizer_step import SgdGroup, WeightUpdate
from octavo.optim.adam import adam_group, check_adam_options, check_betas
from octavo.optim.base import CompactOptimizer, DeviceUpdates, check_not_negative
from octavo.optim.layout import fp8_shards, is_fp8_experts
from octavo.optim.moment import NAMED_MOMENTS, Moment, moments_of
from octavo.optim.state import Settings
from octavo.private import adjust_muon_lr, orthogonalize
from octavo.scaling.recipe import INPUT, Cast
from octavo.tensor.collectives import exchanged_rows, pack_message, unpack_message
from octavo.weights.fsdp2 import groups_of, is_sharded, on_this_rank, rows_of_rank, sharded_dims

# Torch's coefficients keep singular values, which begin in [0, 1], below 1.2024 after any number of iterations, and no
# element exceeds the largest. Where a weight lives in FP8, elements are clamped to this, so that its scale is known
# before the update whatever the coefficients.
MAX_UPDATE = 1.25
MATRICES_OF_RANK = 4  # matrices that a rank orthogonalises, of those that travel together
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_OUTSIDE_KERNELS = ("algorithm", "eps", "ns_steps", "ns_coefficients", "adjust_lr_fn")  # options of groups
_DIRECTION_CAST = Cast(E4M3, PerBlock(1, BLOCK), power_of_two=True)  # of directions
_NO_MATRIX = (
    'Muon is for matrices, and a parameter has the shape {}: stacked experts belong in a group with "algorithm": '
    '"muon", and vectors, convolutions, embeddings and heads in one with "algorithm": "adamw"'
)
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class _Workspace(NamedTuple):
    """Tensors that a matrix's launches use besides its state; they stay, as CUDA graphs and later launches read them.

    ``scratch``: the direction [R, C], then the orthogonal matrix; ``step``: a copy of the state's, which the first
    launch counts; ``rate``: the adjusted learning rate, where that is computed on a GPU; ``plans``: prepared launches.
    """

    scratch: MasterWeight
    step: Tensor
    rate: Tensor
    plans: dict[Any, Any]


class Muon(CompactOptimizer):
    """torch.optim.Muon, its momentum in few bytes, on matrices of any master.

    With ``moments="fp32"`` and float32 weights its results are torch's, bit for bit on a CPU. Embeddings, a head, and
    what is no matrix belong to AdamW: here too, in groups with ``"algorithm": "adamw"``, which take AdamW's options.
    Each device keeps a float32 scratch as large as the largest matrix, or its rows, or the experts of one weight there.

    Args:
        params: matrices [R, C], or groups of them; plain, or sharded by rows over one dimension of a mesh. In groups
            with ``"algorithm": "muon"`` stacked experts too, [E, N, K], each of which is a matrix of its own; plain, or
            sharded by experts. In groups of AdamW what octavo.optim.AdamW takes.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as torch's.
        moments: "fp8" (E4M3 in blocks of 128: 1.03 bytes an element, its rounding "hybrid"), "bf16", "fp32", a Moment;
            or three Moments: the momentum's, and AdamW's two.
        master, seed, skip_nonfinite, gradient_storage: as AdamW's.
        directions: "bf16", or "fp8": they are rounded to E4M3 in blocks of 128 before they are orthogonalised, on one
            process too; of sharded matrices that is half of what travels to their owners.
        adamw: options of AdamW's groups: lr (1e-3), betas, eps, weight_decay. If it is given, what is no matrix in
            groups that name no algorithm goes to a group of AdamW, which follows; None: it is refused.

    Raises:
        TypeError, ValueError: for arguments out of range, parameters that are no matrices or are sharded otherwise,
            or weights of a dtype that the master is not for.

    Example:
        >>> import torch, octavo
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 50))
        >>> embedding, hidden, head = model
        >>> matrices = {"params": hidden.parameters()}
        >>> others = {"params": [*embedding.parameters(), *head.parameters()], "algorithm": "adamw"}
        >>> optimizer = octavo.optim.Muon([matrices, others], lr=0.02, adamw={"lr": 1e-3})
        >>> [(group["algorithm"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 0.02, 1), ('adamw', 0.001, 1), ('adamw', 0.001, 3)]
        >>> model(torch.arange(8)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[hidden.weight])
        ['momentum_buffer_codes', 'momentum_buffer_scale_inv', 'step']
    """

    names = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    shared_settings = (*CompactOptimizer.shared_settings, "directions")
    also_pickled = ("adamw",)
    adamw: dict[str, Any] | None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        moments: str | Moment | tuple[Moment, Moment, Moment] = "fp8",
        master: str | None = "auto",
        seed: int = 0,
        skip_nonfinite: bool = False,
        gradient_storage: str | None = None,
        directions: str = "bf16",
        adamw: dict[str, Any] | None = None,
    ) -> None:
        if directions not in ("bf16", "fp8"):
            raise ValueError(f"directions={directions!r}: use 'bf16' or 'fp8'")
        check_not_negative(lr=float(lr), weight_decay=weight_decay, momentum=momentum, eps=eps)
        if momentum >= 1.0:
            raise ValueError(f"momentum={momentum!r} must be below 1: it is an average of gradients")
        if not isinstance(adamw, dict | None):
            raise TypeError(f"adamw={adamw!r}: give a dict of AdamW's options, {{}} for torch's defaults")
        if adamw is not None and (unknown := adamw.keys() - _ADAMW.keys()):
            raise ValueError(f"adamw={adamw!r}: {', '.join(sorted(unknown))} is none of {', '.join(_ADAMW)}")
        self.adamw, self.directions = adamw, directions
        check_adam_options(**self._defaults_of("adamw"))
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults, moments, master, seed, skip_nonfinite, gradient_storage)

    def _reset(self) -> None:
        super()._reset()
        self._scratch: dict[torch.device, Tensor] = {}  # as large as the largest matrix; larger ones replace it
        self._workspaces: dict[Tensor, _Workspace] = {}  # of prepared updates, dropped with the launches
        self._captured: list[_Workspace] = []  # dropped ones that CUDA graphs read

    def split_group(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the group; without an ``algorithm``, parameters that are no matrices are a group of AdamW after it.

        Options of a group that holds matrices are Muon's; of one that holds none they are AdamW's.
        """
        params = group["params"]
        if "algorithm" in group or isinstance(params, set):  # torch refuses a set
            yield self._defaults_of(group.get("algorithm", "muon")) | group
            return
        params = [params] if isinstance(params, Tensor) else list(params)
        matrices = [param for param in params if len(_shape_of(param)) == 2]
        others = [param for param in params if len(_shape_of(param)) != 2]
        if self.adamw is None:
            if stacked := [shape for shape in map(_shape_of, others) if len(shape) > 2]:
                raise ValueError(_NO_MATRIX.format(stacked[0]))  # experts or a convolution: shapes don't tell
            matrices, others = params, []  # check_weight refuses the others
        if matrices or not others:  # as torch, keep an empty group
            yield group | {"params": matrices, "algorithm": "muon"}
        if others:
            options = {name: value for name, value in group.items() if not matrices or name not in self.defaults}
            yield self._defaults_of("adamw") | options | {"params": others, "algorithm": "adamw"}

    def _defaults_of(self, algorithm: str) -> dict[str, Any]:
        return {**_ADAMW, **(self.adamw or {})} if algorithm == "adamw" else {}

    def names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum, or in a group of AdamW those of its two moments."""
        return self.names[1:] if group["algorithm"] == "adamw" else self.names[:1]

    def moments_of(self, moments: Any) -> tuple[Moment, ...]:
        """Return the momentum's Moment and AdamW's two; beside a single Moment these are of its dtype, or in FP8."""
        if isinstance(moments, Moment):
            kind = moments.format if isinstance(moments.format, str) else "fp8"
            return *moments_of(moments, 1), *NAMED_MOMENTS[kind]
        if isinstance(moments, str):
            (momentum,), others = moments_of(moments, 1), moments_of(moments)
            return (replace(momentum, rounding="hybrid") if moments == "fp8" else momentum), *others
        if not isinstance(moments, tuple) or len(moments) != 3:
            names = ", ".join(map(repr, NAMED_MOMENTS))
            raise TypeError(f"moments={moments!r}: use {names}, a Moment, or three Moments")
        return *moments_of(moments[0], 1), *moments_of(moments[1:])

    def bounds_update(self, settings: Settings, weights: Iterable[Tensor]) -> bool:
        """Whether AdamW's updates will be clipped: if a moment of AdamW is not float32, or a weight lives in FP8."""
        return any(moment.format != "fp32" for moment in settings.moments[1:]) or bool(fp8_shards(weights))

    def check_weight(self, weight: Tensor, group: dict[str, Any], settings: Settings) -> None:
        """Raise ValueError as other optimizers do, and for no matrix, shards of columns, and options out of range."""
        if (algorithm := group["algorithm"]) not in ("muon", "adamw"):
            raise ValueError(f"algorithm={algorithm!r}: use 'muon' or 'adamw'")
        if algorithm == "adamw":
            check_betas(group["betas"], weight)
            return super().check_weight(weight, group, settings)
        dims = [dim for dim, _ in sharded_dims(weight)]
        if weight.ndim not in (2, 3):
            raise ValueError(_NO_MATRIX.format(tuple(weight.shape)))
        if any(dims) or (weight.ndim == 2 and len(dims) > 1):
            raise ValueError(
                f"a weight {tuple(weight.shape)} with placements {weight.placements}: Muon takes matrices that ranks "  # type: ignore[attr-defined]
                "share by rows, over one dimension of a mesh (FSDP2, HSDP, ColwiseParallel), and stacked experts that "
                'they share by experts; "algorithm": "adamw" is for others'
            )
        if is_fp8_experts(weight) and settings.moments[0].granularity == PerTensor():
            raise ValueError("experts that live in FP8 have a momentum in blocks: leave out granularity=PerTensor()")
        if (adjustment := group["adjust_lr_fn"]) not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={adjustment!r}: use {', '.join(map(repr, _ADJUSTMENTS))}")
        coefficients, count = group["ns_coefficients"], group["ns_steps"]
        if len(coefficients) != 3 or not 0 <= count < 100:
            raise ValueError(f"ns_coefficients={coefficients!r}, ns_steps={count!r}: give three, and below 100 steps")
        super().check_weight(weight, group, settings)

    def _options(self, group: dict[str, Any]) -> Any:
        if group["algorithm"] == "adamw":
            return adam_group(group, maximize=False, decoupled=True, bounds_update=self.clip_update)
        momentum, decay = float(group["momentum"]), float(group["weight_decay"])
        options = group["lr"], momentum, 0.0, decay, group["nesterov"]
        return SgdGroup(*options, maximize=False, averages=True, max_update=MAX_UPDATE)

    def _shared_options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in _OUTSIDE_KERNELS if name in group} | super()._shared_options_of(group)

    def _launch(self, updates: DeviceUpdates, skip: Tensor | None, scale: Tensor | None, sums: Tensor | None) -> None:
        adamws = [number for number, group in enumerate(self.param_groups) if group["algorithm"] == "adamw"]
        by_adamw = [each._replace(group=adamws.index(each.group)) for _, each in updates if each.group in adamws]
        if by_adamw:
            options = [self._options(self.param_groups[number]) for number in adamws]
            optimizer_step(by_adamw, options, skip, scale, self._plans, sums)
        sharded: dict[Any, DeviceUpdates] = {}  # by the group of ranks that share rows
        for param, update in updates:
            if update.group in adamws:
                continue
            if is_sharded(param) and param.ndim == 2:
                sharded.setdefault(groups_of(param)[0], []).append((param, update))
            else:
                direction = self._direction(param, update, skip, scale)
                self._move(param, update, self._orthogonal(param, update, direction), skip, sums)
        for ranks, members in sharded.items():
            device = members[0][0].device_mesh.device_type  # type: ignore[attr-defined]
            count = MATRICES_OF_RANK * ranks.size()
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                parts = [self._direction(*member, skip, scale).to(device) for member in batch]
                functions = [partial(self._orthogonal, *member) for member in batch]
                results = by_owners(parts, [param.shape for param, _ in batch], ranks, functions)
                for member, orthogonal in zip(batch, results, strict=True):
                    self._move(*member, orthogonal, skip, sums)

    def _direction(self, param: Tensor, update: WeightUpdate, skip: Tensor | None, scale: Tensor | None) -> Tensor:
        """Have the momentum follow the gradient; return this rank's rows [r, C] of the direction, or its experts'.

        They are as they travel: in bf16, which torch orthogonalises, or codes in bytes.
        """
        workspace = self._workspace(param, update)
        rule = self._options(self.param_groups[update.group])
        matrix = workspace.scratch.weight.zero_()
        if matrix.numel():
            workspace.step.copy_(update.step)
            update = update._replace(master=workspace.scratch, step=workspace.step, group=0, measured=False)
            optimizer_step([update], [rule._replace(lr=-1.0, weight_decay=0.0)], skip, scale, workspace.plans)
        shape = on_this_rank(param).shape  # the matrix may be a row that stands in for a shard without rows
        direction = matrix.view(-1)[: shape.numel()].view(shape).flatten(0, -2)
        if self.directions == "bf16":
            return direction.to(torch.bfloat16)
        qdata, _, scale_inv, *_ = kernels.cast(direction, None, INPUT, *_DIRECTION_CAST.arguments)
        return pack_message(qdata, scale_inv, True)

    def _orthogonal(self, param: nn.Parameter, update: WeightUpdate, direction: Tensor) -> Tensor:
        """Orthogonalise a matrix's direction, or each expert's, after a rank received it: bf16 [R, C] or [E * N, K]."""
        if not direction.numel():
            return direction
        if self.directions == "fp8":
            pair = unpack_message(direction, param.shape[-1], E4M3.dtype, True, _DIRECTION_CAST.tile)
            direction = kernels.dequantize(*pair, _DIRECTION_CAST.tile, torch.bfloat16)
        options = [self.param_groups[update.group][name] for name in ("ns_coefficients", "ns_steps", "eps")]
        if param.ndim == 2:
            return orthogonalize(direction, *options)
        return orthogonalize_each(direction.view(-1, *param.shape[1:]), *options).flatten(0, 1)

    def _move(
        self, param: nn.Parameter, update: WeightUpdate, orthogonal: Tensor, skip: Tensor | None, sums: Tensor | None
    ) -> None:
        """Move this rank's part of a weight along the orthogonal matrix's part."""
        workspace = self._workspace(param, update)
        group = self.param_groups[update.group]
        rule = self._options(group)
        matrix = workspace.scratch.weight
        matrix.view(-1)[: orthogonal.numel()].view(orthogonal.shape).copy_(orthogonal)
        if isinstance(update.master, Fp8Weight):
            matrix.clamp_(-MAX_UPDATE, MAX_UPDATE)
        ratio = adjust_muon_lr(1.0, group["adjust_lr_fn"], param.shape[-2:]) if param.numel() else 1.0
        if isinstance(rule.lr, Tensor) and rule.lr.is_cuda and matrix.is_cuda:
            rate: float | Tensor = workspace.rate.copy_(rule.lr.view(()) * ratio)
        else:
            rate = float(rule.lr) * ratio
        rule = rule._replace(lr=rate, weight_decay=rule.weight_decay / ratio)  # torch decays by lr as it is
        update = update._replace(moments=(), gradient=matrix, gradient_scale_inv=None, group=0)
        optimizer_step([update], [rule], skip, None, workspace.plans, sums)

    def _workspace(self, param: Tensor, update: WeightUpdate) -> _Workspace:
        if (workspace := self._workspaces.get(param)) is None:
            shape, device = update.master.weight.shape, update.gradient.device
            if (scratch := self._scratch.get(device)) is None or scratch.numel() < shape.numel():
                groups = [group["params"] for group in self.param_groups if group["algorithm"] == "muon"]
                largest = max(shape.numel(), *(on_this_rank(param).numel() for params in groups for param in params))
                scratch = self._scratch[device] = torch.empty(largest, device=device, dtype=torch.float32)
            whole = MasterWeight(scratch[: shape.numel()].view(shape), "weight")
            rate = torch.zeros((), device=device, dtype=torch.float32)
            workspace = self._workspaces[param] = _Workspace(whole, rate.clone(), rate, {})
        return workspace

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._captured += [workspace for workspace in self._workspaces.values() if "captured" in workspace.plans]
        self._workspaces = {}


def _shape_of(param: Any) -> tuple[int, ...]:
    """Return the shape of a group's parameter, or (name, parameter); () of what is no tensor, which torch refuses."""
    return tuple(getattr(param[1] if isinstance(param, tuple) else param, "shape", ()))


def orthogonalize_each(matrices: Tensor, coefficients: tuple[float, float, float], count: int, eps: float) -> Tensor:
    """Orthogonalise each matrix as torch does, [E, N, K] to bf16 of this shape, by its operations on all at once."""
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = (matrices.mT if is_tall else matrices).to(torch.bfloat16)
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(count):
        square = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Return the rank that owns each matrix [R, C]: the work, R C min(R, C), is spread evenly, alike on all ranks."""
    work = [shape.numel() * min(shape) for shape in shapes]
    owners, loads = [0] * len(shapes), [0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: -work[number]):
        owners[number] = owner = loads.index(min(loads))
        loads[owner] += work[number]
    return owners


def by_owners(
    parts: Sequence[Tensor], shapes: Sequence[torch.Size], group: Any, functions: Sequence[Callable[[Tensor], Tensor]]
) -> list[Tensor]:
    """Call each matrix's function on the matrix's owner alone, and return this rank's rows of all results.

    ``parts``: this rank's rows of each matrix, [r, C] or coded [r, C'], all of one dtype and device, divided as FSDP2
    divides them; ``shapes``: of the whole matrices [R, C], the same on all ranks, which are in the order of the rows.
    Functions make bf16 [R, C] of all rows.
    """
    owners, ranks = owners_of(shapes, group.size()), range(group.size())
    order = sorted(range(len(shapes)), key=owners.__getitem__)  # the matrices' numbers, by their owners
    owned_matrices = [number for number in order if owners[number] == group.rank()]
    # (a rank, the number of a matrix that this rank owns, that rank's rows of it)
    incoming = [
        (rank, matrix, rows_of_rank(shapes[matrix][0], len(ranks), rank)) for rank in ranks for matrix in owned_matrices
    ]
    to_owners = [(owners[number], parts[number]) for number in order]
    shapes_from_ranks = [(rank, (rows.stop - rows.start, parts[matrix].shape[1])) for rank, matrix, rows in incoming]
    shards = _exchange(to_owners, shapes_from_ranks, parts[0], group)
    results: dict[int, Tensor] = {}
    for index, matrix in enumerate(owned_matrices):
        results[matrix] = functions[matrix](torch.cat(shards[index :: len(owned_matrices)]))
    to_ranks = [(rank, results[matrix][rows]) for rank, matrix, rows in incoming]
    shapes_from_owners = [(owners[number], (parts[number].shape[0], shapes[number][1])) for number in order]
    result_rows = _exchange(to_ranks, shapes_from_owners, parts[0].new_empty(0, dtype=torch.bfloat16), group)
    rows_by_number = dict(zip(order, result_rows, strict=True))
    return [rows_by_number[number] for number in range(len(parts))]


def _exchange(
    tensors: list[tuple[int, Tensor]], shapes: list[tuple[int, tuple[int, int]]], like: Tensor, group: Any
) -> list[Tensor]:
    """Send each (rank, tensor) by one all-to-all; return the tensors that this rank receives, as (rank, shape) says.

    Both lists are in the order of the ranks. ``like``: a tensor of their dtype and device, if this rank sends nothing.
    """
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for _, tensor in tensors)])
    ranks = range(group.size())
    send_sizes = [sum(tensor.numel() for to_rank, tensor in tensors if to_rank == rank) for rank in ranks]
    receive_sizes = [sum(math.prod(shape) for of_rank, shape in shapes if of_rank == rank) for rank in ranks]
    message = exchanged_rows(flat, send_sizes, receive_sizes, group.group_name)
    pieces = message.split([math.prod(shape) for _, shape in shapes])
    return [piece.view(shape) for piece, (_, shape) in zip(pieces, shapes, strict=True)]
