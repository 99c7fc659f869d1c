"""Gradients averaged over ranks in FP8: half of the bytes of a bf16 all-reduce, with float32 accumulation.

    every rank     casts its gradients, seen as [n, S], to FP8: row r is rank r's to average
    all-to-all     each rank receives its row from all ranks, as bytes: codes and their scales
    every rank     reads [n, S] back, adds in float32, divides by n, casts the mean [S]
    all-gather     all ranks read the same codes, so that they have the same bits

There are n ranks, each of which averages S = ceil(N / n) elements of a bucket of N. Under FSDP2 the mean is not
gathered, and stays in float32.

With several servers of L ranks this is done twice (levels), so that a server's gradients are added before they cross
the network: its L ranks average L rows [n / L x S]; then one rank of each server averages n / L rows [S] of the means.

A gradient is rounded twice, and once more between servers. No partial sum is rounded, as it would be on a ring. Scales
are powers of two, so codes times scales are exact in float32, and so are sums while n times the ratio of the ranks'
scales of a block is at most 64 (E4M3: 18 bits from its smallest number to its largest).

No `from __future__ import annotations`: DDP compares the hook's annotations with classes.
"""

import itertools
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from octavo import kernels
from octavo.formats import E4M3, FORMATS, HIGH_PRECISION, Format
from octavo.granularity import BLOCK
from octavo.kernels.layouts import multiply_tiles_
from octavo.kernels.moment_codes import encode_moment
from octavo.kernels.step_numbers import key_of, random_bits
from octavo.numerics import scale_from_amax, scale_inv_from_scale
from octavo.tensor.collectives import check_ranks_agree, pack_message, unpack_message

GRADIENTS, MEAN, SERVER_MEANS = 0, 1, 2  # the roundings: of gradients, of the gathered mean, of servers' means
_SHARED_OPTIONS = "ranks_per_server", "format", "stochastic", "gather_dtype", "seed"
_TILE = (1, BLOCK)  # elements of a row that share a scale
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 warns of the latter


def levels(ranks: Sequence[int], servers: Sequence[object]) -> list[list[list[int]]]:
    """Return for each level the sets of ranks that exchange with each other; all sets of a level are equally large.

    ``ranks``: a group's, by their numbers in the job, ascending; ``servers``: a number or name of each one's server.
    ValueError if one server has more of these ranks than another, or another's ranks lie between its own.

    Example:
        >>> levels(range(6), "aaabbb")
        [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
        >>> levels(range(3), "aaa"), levels([0, 8, 16], "abc")
        ([[[0, 1, 2]]], [[[0, 8, 16]]])
    """
    runs = [[rank for rank, _ in run] for _, run in itertools.groupby(zip(ranks, servers, strict=True), lambda x: x[1])]
    counts = [*map(len, runs)]
    if len({*servers}) in (1, len(ranks)):
        return [[[*ranks]]]
    if len({*counts}) > 1 or len(runs) > len({*servers}):
        raise ValueError(
            f"servers have, in the order of their ranks, {counts} of this group's {len(ranks)}, but two levels need "
            "as many consecutive ones on each; Fp8Reduction(ranks_per_server=1) reduces at one level"
        )
    return [runs, [[*some] for some in zip(*runs, strict=True)]]


def own_levels(group: Any, ranks_per_server: int | None) -> list[list[int]]:
    """Return for each level a list with 1 for each rank of ``group`` that exchanges with this one, 0 for others.

    Rank r of the job is on server r // ranks_per_server; None: as LOCAL_WORLD_SIZE says, which torchrun sets; where a
    rank has none (srun, mpirun), by the ranks' host names. All ranks of the group call it together.
    Where ``levels`` raises, there is one level, with a warning; with a number the error is raised.
    """
    ranks, this_rank = dist.get_process_group_ranks(group), dist.get_rank()
    sets_by_level = [[ranks]]
    if ranks_per_server:
        sets_by_level = levels(ranks, [rank // ranks_per_server for rank in ranks])
    elif len(ranks) > 3:  # at least 2 servers of 2; ranks exchange sizes and hosts, so that all compute the same levels
        size_and_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)), socket.gethostname()
        sizes_and_hosts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(sizes_and_hosts, size_and_host, group=group)
        sizes, hosts = zip(*sizes_and_hosts, strict=True)
        try:
            if all(sizes) and len({*sizes}) > 1:
                raise ValueError(f"LOCAL_WORLD_SIZE is {min(sizes)} on one rank and {max(sizes)} on another")
            sets_by_level = levels(ranks, [rank // sizes[0] for rank in ranks] if all(sizes) else hosts)
        except ValueError as error:
            warnings.warn(f"gradients are reduced in FP8 at one level: {error}", stacklevel=2)
    return [[int(rank in some) for rank in ranks] for level in sets_by_level for some in level if this_rank in some]


class Fp8Reduction:
    """A way to average gradients in FP8: the state of ``fp8_reduce_hook`` (DDP), and a reduce-scatter for FSDP2.

    As the latter (``FSDPModule.set_custom_reduce_scatter``) it rounds a gradient once, and the mean is in FSDP2's
    ``reduce_dtype``. Replicas (HSDP) reduce it further in that dtype, or in FP8 by ``all_reduce``. One object serves
    all modules of a model; its ``gather_dtype`` and ``group`` are not used there.

    Args:
        format: octavo.E4M3 or octavo.E5M2.
        stochastic: round stochastically, with bits that depend on ``seed``, the rank, ``calls`` and the element alone,
            and not to nearest, ties to even. inf then becomes NaN in E5M2 too.
        gather_dtype: the dtype in which the mean is gathered; None: ``format``. torch.bfloat16 avoids the second
            rounding to FP8, for 1.5 times the bytes.
        seed: for ``stochastic``.
        group: DDP's process group, or that of FSDP2's replicas; None is the default one. Else FSDP2 brings its own.
        ranks_per_server: ranks r of the job with the same r // ranks_per_server reduce among themselves first, and then
            with other servers. None: as LOCAL_WORLD_SIZE says, which torchrun sets, or else the ranks' host names;
            if servers have different numbers of the group's ranks, there is one level. 1: one level.

    Attributes:
        calls: reductions so far. To resume stochastic rounding bit for bit, save and restore it.

    Raises:
        TypeError, ValueError: for arguments of the wrong kind; at the first gradients, if ``ranks_per_server`` is given
            and servers have different numbers of the group's ranks, or if ranks have different arguments.

    Example:
        >>> import octavo
        >>> reduction = Fp8Reduction(format=octavo.E5M2, stochastic=True)
        >>> reduction.format, reduction.stochastic
        (E5M2, True)
        >>> def in_fp8(model: torch.nn.Module) -> None:
        ...     for module in model.modules():
        ...         if isinstance(module, torch.distributed.fsdp.FSDPModule):
        ...             module.set_custom_reduce_scatter(reduction)
    """

    def __init__(
        self,
        format: Format = E4M3,
        stochastic: bool = False,
        gather_dtype: torch.dtype | None = None,
        seed: int = 0,
        group: Any = None,
        ranks_per_server: int | None = None,
    ) -> None:
        if not isinstance(format, Format) or format not in FORMATS.values():
            raise TypeError(f"format={format!r}: use octavo.E4M3 or octavo.E5M2")
        if gather_dtype not in (None, *HIGH_PRECISION):
            raise TypeError(f"gather_dtype={gather_dtype}: use torch.bfloat16, or None to gather in {format}")
        if ranks_per_server is not None and ranks_per_server < 1:
            raise ValueError(f"ranks_per_server={ranks_per_server}: use 1 or more, or None to find it")
        self.format, self.stochastic, self.gather_dtype = format, stochastic, gather_dtype
        self.seed, self.group = seed, group
        self.ranks_per_server, self.calls = ranks_per_server, 0
        self._streams: dict[torch.device, Any] = {}
        self._levels_by_group: dict[str, list[list[int]]] = {}  # by name, of groups whose ranks were compared

    def mean(self, x_nS: Tensor, group: Any) -> Tensor:
        """Return the mean [1, S] of the row that this rank averages, in float32.

        Args:
            x_nS: [n, S] bf16, fp16 or fp32, this rank's gradients; row r is rank r's to average.
            group: the process group of n ranks.
        """
        self.calls += 1
        x, columns = x_nS, x_nS.shape[1]
        for rounding, level in zip((GRADIENTS, SERVER_MEANS), self._levels(group), strict=False):
            members = sum(level)
            x = x.view(-1, members, columns).transpose(0, 1).reshape(members, -1)  # a row for each rank that averages
            message = self._message_of(x, dist.get_rank(group), rounding)
            answer = torch.empty_like(message)
            splits = None if all(level) else level
            dist.all_to_all_single(answer, message, splits, splits, group)
            x = self._read(answer, x.shape[1], torch.float32).sum(0).div_(members).view(-1, columns)
        return x

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor; FSDP2 calls it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the mean or sum over ranks of this rank's row of ``input_tensor`` [n x S] to ``output_tensor``."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                f"FSDP2 asks for {op}, not for a mean or a sum: where set_gradient_divide_factor is used, call "
                "set_force_sum_reduction_for_comms(True) too"
            )
        ranks = dist.get_world_size(group)
        mean = self.mean(input_tensor.view(ranks, -1), group).view(-1)
        output_tensor.copy_(mean if op == dist.ReduceOp.AVG else mean.mul_(ranks))

    def _levels(self, group: Any) -> list[list[int]]:
        if group.group_name not in self._levels_by_group:
            check_ranks_agree({f"Fp8Reduction's {name}": getattr(self, name) for name in _SHARED_OPTIONS}, [group])
            self._levels_by_group[group.group_name] = own_levels(group, self.ranks_per_server)
        return self._levels_by_group[group.group_name]

    def all_reduce(self, flat: Tensor) -> None:
        """Average the gradients of FSDP2's replicas (HSDP): what ``FSDPModule.set_all_reduce_hook`` takes.

        FSDP2 must shard over the ranks of one replica alone, ``fully_shard(module, mesh=mesh["shard"])``, as its own
        all-reduce comes before the hook. All replicas get the same bits.

        Args:
            flat: [N] bf16, fp16 or fp32, this replica's, which becomes the mean over ``group``.

        Raises:
            TypeError: for gradients of another dtype.

        Example:
            >>> def in_fp8(module, mesh):
            ...     between = Fp8Reduction(group=mesh["replicate"].get_group())
            ...     module.set_all_reduce_hook(between.all_reduce)
        """
        if flat.device.type != "cpu":  # it is of FSDP2's other stream
            flat.record_stream(torch.accelerator.current_stream(flat.device))
        self._average(flat).wait()

    def _average(self, flat: Tensor) -> torch.futures.Future[Tensor]:
        """Return a Future of ``flat`` [N] once it holds the mean."""
        group = self.group if self.group is not None else dist.group.WORLD
        if flat.dtype not in HIGH_PRECISION:
            raise TypeError(f"gradients of {flat.dtype} are not reduced in FP8; use bfloat16, float16 or float32")
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        width = -(-len(flat) // ranks)
        mean = self.mean(F.pad(flat, (0, ranks * width - len(flat))).view(ranks, width), group)
        message = mean.to(self.gather_dtype) if self.gather_dtype else self._message_of(mean, rank, MEAN)
        gathered = message.new_empty(ranks, message.shape[1])

        def finish(_: Any) -> Tensor:
            if flat.device.type != "cpu":  # a callback has a stream of its own, and the memory is of another
                gathered.record_stream(torch.accelerator.current_stream(flat.device))
            read = gathered if self.gather_dtype else self._read(gathered, width, flat.dtype)
            return flat.copy_(read.view(-1)[: len(flat)])

        return _all_gather(gathered, message, group=group, async_op=True).get_future().then(finish)

    def _message_of(self, x: Tensor, rank: int, rounding: int) -> Tensor:
        """Cast [R, S] to a message, uint8 [R, .]: each row's codes and exponents.

        The bits of stochastic rounding depend on the ``rank`` that sends it, and on ``rounding``: GRADIENTS, MEAN
        or SERVER_MEANS.
        """
        if not self.stochastic:
            codes, _, scale_inv, *_ = kernels.cast(x, None, 0, self.format.dtype, _TILE, True, 0)
            return pack_message(codes, scale_inv, True)
        scale = scale_from_amax(kernels.amax(x, _TILE), self.format.max, True, 0)
        index_dtype = torch.int32 if x.numel() < 1 << 31 else torch.int64
        index = torch.arange(x.numel(), dtype=index_dtype, device=x.device).view(x.shape)
        bits = random_bits(key_of(self.seed, rank, self.calls, rounding), index)
        wide = multiply_tiles_(x.to(torch.float32, copy=True), scale, _TILE).contiguous()
        return pack_message(encode_moment(wide, self.format, bits), scale_inv_from_scale(scale), True)

    def _read(self, message: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the values [R, columns] of ``dtype`` in a message."""
        return kernels.dequantize(*unpack_message(message, columns, self.format.dtype, True), _TILE, dtype)


def fp8_reduce_hook(state: Fp8Reduction, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in FP8, as ``state`` says: DDP's communication hook.

    All ranks get the same bits. If a rank's gradient is NaN or inf, so is the mean. A single rank rounds, too.

    Args:
        state: one for each DistributedDataParallel.
        bucket: DDP's, of bf16, fp16 or fp32, any size.

    Returns:
        a Future of the bucket's flat tensor, [N] of its dtype, once it holds the mean over ranks.

    Raises:
        TypeError: for another ``state``, or gradients of another dtype.

    Example:
        >>> import torch
        >>> def in_fp8(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        ...     ddp.register_comm_hook(Fp8Reduction(), fp8_reduce_hook)
    """
    if not isinstance(state, Fp8Reduction):
        raise TypeError(f"the state is {state!r}: call register_comm_hook(Fp8Reduction(), fp8_reduce_hook)")
    if (flat := bucket.buffer()).device.type == "cpu":
        return state._average(flat)
    # on a stream of its own, so that backward does not wait for the all-to-all
    if (stream := state._streams.get(flat.device)) is None:
        stream = state._streams[flat.device] = torch.Stream(flat.device)
    stream.wait_stream(torch.accelerator.current_stream(flat.device))
    with stream:
        return state._average(flat)
