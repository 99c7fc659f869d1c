"""Four processes that stay, joined by gloo: a task runs on the first ranks of them."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _serve(rank: int, port: int, connection: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.suppress(KeyboardInterrupt):
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
        meshes: dict[Any, Any] = {}
        while (task := connection.recv()) is not None:
            module, name, shape, arguments = task
            try:
                connection.send((True, _run(rank, meshes, module, name, shape, arguments)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()


def _run(rank: int, meshes: dict[Any, Any], module: str, name: str, shape: tuple[int, ...], arguments: Any) -> Any:
    if shape not in meshes:  # every rank takes part in making the groups
        count = int(torch.tensor(shape).prod())
        names = ("replicate", "shard")[-len(shape) :]
        meshes[shape] = dist.DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=names)
    if rank >= meshes[shape].size():
        return None
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), name)(meshes[shape], *arguments)


class Pool:
    """``run(task, shape, *arguments)`` calls ``task(mesh, *arguments)`` on each rank of a mesh of this shape."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        context, port = mp.get_context("spawn"), free_port()
        ends = [context.Pipe() for _ in range(WORLD)]
        self._connections = [here for here, _ in ends]
        self._processes = [
            context.Process(target=_serve, args=(rank, port, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def run(self, task: Any, shape: Sequence[int], *arguments: Any, seconds: float = 300) -> list[Any]:
        """What each rank returned.

        Raises:
            AssertionError: with the ranks' tracebacks, where any failed or took longer.
        """
        for connection in self._connections:
            connection.send((task.__module__, task.__name__, tuple(shape), arguments))
        answers = [connection.recv() if connection.poll(seconds) else None for connection in self._connections]
        failed = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if answer and not answer[0]]
        failed += [f"rank {rank}: no answer" for rank, answer in enumerate(answers) if answer is None]
        if failed:
            self.stop()
            self._start()  # collectives may be half done
            raise AssertionError("\n".join(failed))
        return [answer[1] for answer in answers if answer][: int(torch.tensor(tuple(shape)).prod())]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
