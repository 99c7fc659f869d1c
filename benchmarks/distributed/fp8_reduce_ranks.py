"""Ranks simulated in one process, whose gradients are averaged as octavo.distributed.fp8_reduce does, or others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo import E4M3, E5M2, kernels
from octavo.distributed import Fp8Reduction
from octavo.distributed.fp8_reduce import BETWEEN, MEAN, SENT, levels
from octavo.granularity import ALL
from octavo.numerics import scale_from_amax, scale_inv_from_scale

Average = Callable[[Sequence[Tensor]], Tensor]  # of each rank's flat gradients [N] float32, all ranks' result
SATURATED = 1e-5  # the share of saturated elements above which MS-AMP halves mu


class InOneScale(Fp8Reduction):
    """With one scale for all ranks' gradients, from the largest amax, as MS-AMP; Fp8Reduction does not have it."""

    agreed: Tensor  # [1, 1]

    def pack(self, x: Tensor, rank: int, rounding: int) -> Tensor:
        """As Fp8Reduction's; the message has codes alone."""
        return kernels.cast(x, self.agreed.view(1).repeat(3), 0, self.format.dtype, (ALL, ALL), True, 0)[0].view(
            torch.uint8
        )

    def unpack(self, message: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """As Fp8Reduction's."""
        codes = message.view(self.format.dtype)
        return kernels.dequantize(codes, scale_inv_from_scale(self.agreed), (ALL, ALL), dtype)


class InFp8:
    """Fp8Reduction on every rank: what its hook gives on as many processes, bit for bit.

    ``error_feedback``: add what each rounding lost to the next step's gradients, which Fp8Reduction does not do.
    """

    def __init__(self, error_feedback: bool = False, kind: type[Fp8Reduction] = Fp8Reduction, **options: Any) -> None:
        self.reduction, self.error_feedback = kind(**options), error_feedback
        self.lost: list[Tensor] = []  # of what ranks sent at each level [n, rows, S], and of means [n, S]

    def __call__(self, flats: Sequence[Tensor]) -> Tensor:
        reduction, ranks, count = self.reduction, len(flats), len(flats[0])
        reduction.calls += 1
        width = -(-count // ranks)
        parts = torch.stack([F.pad(flat, (0, ranks * width - count)).view(ranks, width) for flat in flats])
        all_levels = levels(range(ranks), [rank // (reduction.ranks_per_server or ranks) for rank in range(ranks)])
        if self.error_feedback and not self.lost:
            between = [torch.zeros(ranks, len(level[0]), width) for level in all_levels[1:]]
            self.lost = [torch.zeros_like(parts), *between, torch.zeros(ranks, width)]
        if self.lost:
            parts += self.lost[0]
        if isinstance(reduction, InOneScale):
            amax = kernels.amax(parts.view(1, -1), (ALL, ALL))
            reduction.agreed = scale_from_amax(amax, reduction.format.max, True, 0)
        parts = self._level(parts, SENT, all_levels[0], 0)
        for level in all_levels[1:]:
            if self.lost:
                parts += self.lost[1]
            parts = self._level(parts, BETWEEN, level, 1)
        means = parts[:, 0]
        if self.lost:
            means += self.lost[-1]
        if reduction.gather_dtype is None:
            rows = [reduction.pack(means[rank : rank + 1], rank, MEAN) for rank in range(ranks)]
            gathered = reduction.unpack(torch.cat(rows), width, torch.float32)
        else:
            gathered = means.to(reduction.gather_dtype).to(torch.float32)
        if self.lost:
            torch.sub(means, gathered, out=self.lost[-1])
        return gathered.view(-1)[:count]

    def _level(self, parts: Tensor, rounding: int, sets: Sequence[list[int]], at: int) -> Tensor:
        """Each rank's rows [n, R, S], averaged in sets of m ranks: the rows [n, R / m, S] that each owns."""
        (ranks, _, width), members = parts.shape, len(sets[0])
        by_owner = parts.view(ranks, -1, members, width).transpose(1, 2).reshape(ranks, members, -1)
        columns, read = by_owner.shape[2], self.reduction.unpack
        sent = torch.stack([self.reduction.pack(own, rank, rounding) for rank, own in enumerate(by_owner)])
        if self.lost:
            left = [part - read(own, columns, torch.float32) for part, own in zip(by_owner, sent, strict=True)]
            self.lost[at] = torch.stack(left).view(ranks, members, -1, width).transpose(1, 2).reshape(parts.shape)
        means = torch.empty(ranks, columns // width, width)
        for own in sets:
            for place, rank in enumerate(own):  # the owner
                values = read(sent[own, place].contiguous(), columns, torch.float32)
                means[rank] = values.sum(0).div_(members).view(-1, width)
        return means


def in_bf16(flats: Sequence[Tensor]) -> Tensor:
    """DDP's division and a ring's sum, both rounded to bf16 at each rank."""
    total = torch.zeros_like(flats[0], dtype=torch.bfloat16)
    for flat in flats:
        total += (flat.to(torch.bfloat16)) / len(flats)
    return total.to(torch.float32)


def in_bf16_backwards(flats: Sequence[Tensor]) -> Tensor:
    """The same, from the last rank to the first: another run by its last bits."""
    return in_bf16(flats[::-1])


def in_float32(flats: Sequence[Tensor]) -> Tensor:
    """The mean."""
    return torch.stack([*flats]).mean(0)


class SumsInFp8:
    """As MS-AMP: E4M3, a scale a tensor for all ranks, the smallest of theirs times mu, and partial sums in FP8 too.

    mu starts at its best: as large as it may be for the first gradients. Then it doubles in 1,000 steps.

    Args:
        sizes: elements of each parameter.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.mu = sizes, [1.0] * len(sizes)

    def __call__(self, flats: Sequence[Tensor]) -> Tensor:
        tensors = zip(*(flat.split([*self.sizes]) for flat in flats), strict=True)
        return torch.cat([self._tensor(number, own) for number, own in enumerate(tensors)])

    def _tensor(self, number: int, own: Sequence[Tensor]) -> Tensor:
        largest = torch.stack([part.abs().max() for part in own]).max()
        scale = scale_from_amax(largest, E4M3.max, False, 0)
        self.mu[number] *= 2 ** (1 / 1000)
        while True:
            factor, total = scale * self.mu[number], torch.zeros_like(own[0])
            saturates = torch.zeros_like(total, dtype=torch.bool)
            for part in own:
                total = total + (part * factor).to(E4M3.dtype).float()
                saturates |= ~(total.abs() <= E4M3.max)  # what is cast alone overflows to NaN
                total = total.clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype).float()
            if float(saturates.float().mean()) <= SATURATED:
                return total / (factor * len(own))
            self.mu[number] /= 2


def variants(sizes: Sequence[int]) -> dict[str, Callable[[], Average]]:
    """All that is compared, made anew for each run."""
    return {
        "bf16": lambda: in_bf16,
        "bf16, ranks reversed": lambda: in_bf16_backwards,
        "float32": lambda: in_float32,
        "E4M3": InFp8,
        "E4M3, stochastic": lambda: InFp8(stochastic=True),
        "E4M3, error feedback": lambda: InFp8(error_feedback=True),
        "E4M3, mean in bf16": lambda: InFp8(gather_dtype=torch.bfloat16),
        "E4M3, one scale a bucket": lambda: InFp8(kind=InOneScale),
        "E4M3, one scale a tensor, FP8 sums": lambda: SumsInFp8(sizes),
        "E5M2": lambda: InFp8(format=E5M2),
        "E5M2, stochastic": lambda: InFp8(format=E5M2, stochastic=True),
        "E5M2, error feedback": lambda: InFp8(format=E5M2, error_feedback=True),
        # the first rounding alone
        "E4M3, mean in float32": lambda: InFp8(gather_dtype=torch.float32),
        "E4M3, stochastic, mean in float32": lambda: InFp8(stochastic=True, gather_dtype=torch.float32),
    } | {f"E4M3, servers of {count}{name}": on_servers(count, **options) for count in SERVERS for name, options in WAYS}


def on_servers(count: int, **options: Any) -> Callable[[], Average]:
    """Two levels; one level on as many ranks or fewer."""
    return lambda: InFp8(ranks_per_server=count, **options)


SERVERS = (2, 8)  # of so many ranks
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    (", stochastic", {"stochastic": True}),
    (", error feedback", {"error_feedback": True}),
    (", mean in float32", {"gather_dtype": torch.float32}),
)
SENT_ALONE = ("E4M3, mean in float32", "E4M3, stochastic, mean in float32")
BASELINES = ("bf16", "bf16, ranks reversed")
