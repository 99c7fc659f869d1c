"""Runs one function on several processes of this machine, joined by gloo; or on one whose collectives do nothing."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, waits: bool = True) -> list[Any]:
    """Return the results of ``function(mesh, *arguments)``, a module's function, on each of ``ranks`` new processes.

    ``waits=False``: on one process, whose collectives return at once with anything in their outputs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = ranks if waits else 1
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_serve, args=(ranks, port, waits, answers, function, arguments), nprocs=processes)
    results = dict(answers.get() for _ in range(processes))
    return [results[rank] for rank in range(processes)]


def _serve(
    rank: int, ranks: int, port: int, waits: bool, answers: Any, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("octavo").setLevel(logging.ERROR)  # that FP8 is emulated on a CPU
    if waits:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    mesh = dist.DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("shard",))
    answer = function(mesh, *arguments)
    answers.put((rank, answer))
    dist.barrier()
    dist.destroy_process_group()
