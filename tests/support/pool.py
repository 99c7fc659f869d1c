"""Processes that stay, joined by gloo: a task runs on the first ranks of them. They are two until a task wants more."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

FEW, MANY = 2, 4
GROUPS_A_TASK = 1000  # more than any makes
SECONDS_AFTER_A_FAULT = 5  # in which the others may still tell of theirs

# Imported once, in a process without threads that ranks are forked from: each would take seconds for it.
PRELOADED = [
    "pytest",
    "tests.support.pool",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "octavo.train",
    "octavo.cli.train",
    "octavo.distributed.checkpoint",
]


COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}  # namespaces of torch's ops


class NoCollectives(TorchDispatchMode):
    """Raises where a collective begins; a wait for a collective that all ranks began is allowed.

    What all ranks run together, so that a fault of one ends all, may wait for no other rank.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if func.namespace in COLLECTIVES and name != "wait_tensor":
            raise AssertionError(
                f"{name} began inside Ranks.together(): a rank that fails in that block never calls it, and the others "
                "would wait for it; end the block before it"
            )
        return func(*args, **(kwargs or {}))


def guard_together() -> None:
    """Make Ranks.together() run its blocks so, in this process."""
    from octavo.distributed.ranks import Ranks

    together = Ranks.together

    @contextlib.contextmanager
    def guarded(self: Ranks) -> Iterator[None]:
        with together(self), NoCollectives():
            yield

    if together.__name__ != "guarded":
        Ranks.together = guarded


def share_device() -> None:
    """Have all groups of this process wait for messages in one thread: each one's own would wake 100 times a second."""
    gloo, device = dist.ProcessGroupGloo, dist.ProcessGroupGloo.create_device(interface="lo")
    construct = gloo.__init__

    def on_the_device(group: Any, store: Any, rank: int, size: int, timeout: Any, **newer: Any) -> None:
        options = gloo._Options()  # torch 2.14 also gives enable_reconfigure, False unless set by hand
        options._devices, options._timeout = [device], timeout
        construct(group, store, rank, size, options)

    gloo.__init__ = on_the_device


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def prepare() -> Any:
    """Begin to import the modules that ranks need, in the background."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    return context


def _serve(rank: int, world: int, port: int, connection: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    gc.freeze()  # imports stay: each garbage collection would look at their 400,000 objects
    gc.set_threshold(10_000, 20, 20)  # and few are needed
    warnings.simplefilter("ignore")
    guard_together()
    share_device()
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        meshes: dict[Any, Any] = {}
        module_before = None
        while (task := connection.recv()) is not None:
            number, module, name, shape, arguments = task
            if module != module_before:  # nobody looks again at the objects of another file's tasks
                if dynamo := sys.modules.get("torch._dynamo"):
                    dynamo.reset()  # see tests/conftest.py
                gc.collect()
                gc.freeze()
            module_before = module
            # Groups are named by their number, and torch 2.14 counts those too that some ranks make without the others,
            # as those of a smaller task may: the next group of all would have other names on these, and never meet.
            dist.distributed_c10d._world.group_count = number * GROUPS_A_TASK
            try:
                connection.send((True, _run(rank, meshes, module, name, shape, arguments)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()


def _run(rank: int, meshes: dict[Any, Any], module: str, name: str, shape: tuple[int, ...], arguments: Any) -> Any:
    if shape not in meshes:  # every rank takes part in making the groups
        names = ("replicate", "shard")[-len(shape) :]
        meshes[shape] = dist.DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)
    if rank >= meshes[shape].size():
        return None
    torch.manual_seed(0)
    return getattr(importlib.import_module(module), name)(meshes[shape], *arguments)


class Pool:
    """``run(task, shape, *arguments)`` calls ``task(mesh, *arguments)`` on each rank of a mesh of this shape."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._tasks = 0
        self._apart: Pool | None = None  # fewer ranks, for tasks that want no others beside theirs

    def start(self) -> None:
        """Start the few ranks that most tasks want, for which the first task would wait."""
        if not self._processes:
            self._start(FEW)

    def _start(self, world: int) -> None:
        context = prepare()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a free port
        for rank in range(world):
            here, there = context.Pipe()
            arguments = rank, world, self._store.port, there
            self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._processes[-1].start()
            there.close()
            self._connections.append(here)

    def run(
        self, task: Any, shape: Sequence[int], *arguments: Any, seconds: float = 120, whole: bool = False
    ) -> list[Any]:
        """Return each rank's result; ``whole``: the default group has no others, which torch's broadcasts from 0 need.

        Raises:
            AssertionError: with the ranks' tracebacks, where any failed or took longer.
        """
        size = math.prod(shape)
        if whole and len(self._processes) > size:
            self._apart = self._apart or Pool()
            return self._apart.run(task, shape, *arguments, seconds=seconds, whole=True)
        world = size if whole else max(len(self._processes), FEW if size <= FEW else MANY, size)
        if world != len(self._processes):
            self.stop()
            self._start(world)
        self._tasks += 1
        for connection in self._connections:
            connection.send((self._tasks, task.__module__, task.__name__, tuple(shape), arguments))
        answers = self._answers(seconds)
        failed = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failed:
            self.stop(seconds=0)  # collectives may be half done
            raise AssertionError("\n".join(failed))
        return [answer for _, answer in answers[:size]]

    def _answers(self, seconds: float) -> list[tuple[bool, Any]]:
        """Return whether each rank did its task, and its result or traceback."""
        answers: dict[Any, tuple[bool, Any]] = {}
        deadline = time.monotonic() + seconds
        while left := [connection for connection in self._connections if connection not in answers]:
            ready = multiprocessing.connection.wait(left, max(0.0, deadline - time.monotonic()))
            for process in [] if ready else self._processes:
                os.kill(process.pid, signal.SIGUSR1)  # it prints where it is
            for connection in ready or left:
                try:
                    answers[connection] = connection.recv() if ready else (False, "no answer")
                except EOFError:
                    answers[connection] = False, "it ended"
                if not answers[connection][0]:
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAULT)
        return [answers[connection] for connection in self._connections]

    def stop(self, seconds: float = 5) -> None:
        """End all ranks; those that do not within some seconds are killed."""
        if self._apart is not None:
            self._apart.stop(seconds)
        deadline = time.monotonic() + seconds
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._connections = [], []
