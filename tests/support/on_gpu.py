"""On a GPU, Triton's launches take CPU tensors too: their memory goes there before a launch and back after it.

So a test is written once, with CPU tensors, for the interpreter, the emulator and a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.emulated import COUNT_MULTIPROCESSORS, flattened, live_tensors


def as_bytes(storage: Any) -> Tensor:
    """Return a storage's bytes, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def words(storage: Any) -> Tensor:
    """Return a storage's whole int64 numbers."""
    return as_bytes(storage)[: storage.nbytes() // 8 * 8].view(torch.int64)


def touched(tensors: Sequence[Tensor]) -> tuple[dict[int, Tensor], set[int]]:
    """Return the memory that a launch with these arguments may touch.

    Returns:
        a tensor of each memory, by its address, with those that addresses in it point to; and which hold addresses,
        as int64 does.
    """
    tensors_by_address = {x.untyped_storage().data_ptr(): x for x in tensors if x.untyped_storage().nbytes()}
    tables = {x.untyped_storage().data_ptr() for x in tensors if x.dtype is torch.int64} & tensors_by_address.keys()
    if tables:
        pointed = torch.cat([words(tensors_by_address[at].untyped_storage()) for at in tables])
        for x in live_tensors(pointed.device.type):
            first, end = x.untyped_storage().data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
            if first not in tensors_by_address and ((pointed >= first) & (pointed < end)).any():
                tensors_by_address[first] = x
    return tensors_by_address, tables


def relocated(values: Tensor, moves: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return int64 numbers in which addresses of memory that moved, (from, bytes, to), are the new ones."""
    result = values.clone()
    for first, size, to in moves:
        result[(values >= first) & (values < first + size)] += to - first
    return result


class There:
    """CPU tensors' memory and its copies on the GPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors_by_address, tables = touched(tensors)
        storages = {at: x.untyped_storage() for at, x in tensors_by_address.items()}
        self.copies = {at: as_bytes(storage).cuda() for at, storage in storages.items()}
        self.storages = {at: storage for at, storage in storages.items() if at not in tables}
        moves = [(at, copy.numel(), copy.data_ptr()) for at, copy in self.copies.items()]
        for at in tables:
            addresses = relocated(words(storages[at]), moves).view(torch.uint8)
            self.copies[at][: addresses.numel()].copy_(addresses)

    def address(self, value: Any) -> Any:
        """Return an argument as the launcher takes it: for a CPU tensor the address of its copy."""
        if isinstance(value, Tensor) and value.is_cpu:
            at = value.untyped_storage().data_ptr()
            return self.copies[at].data_ptr() + value.data_ptr() - at if at in self.copies else 0
        if isinstance(value, tuple):
            parts = [self.address(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def bring_back(self) -> None:
        """Copy the results of the launch back into the CPU tensors."""
        for at, storage in self.storages.items():
            as_bytes(storage).copy_(self.copies[at])


@functools.cache
def take_cpu_tensors() -> None:
    """Make Triton's launches take CPU tensors from now on, in this process."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    class Launcher(CudaLauncher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.types = source.signature

        def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
            values = [value for _, value in flattened(self.types.values(), arguments[4:])]  # after metadata and hooks
            tensors = [value for value in values if isinstance(value, Tensor) and value.is_cpu]
            if not tensors:
                return super().__call__(x, y, z, stream, function, *arguments)
            there = There(tensors)
            super().__call__(x, y, z, stream, function, *arguments[:4], *map(there.address, arguments[4:]))
            there.bring_back()

    active = driver.active
    stream_of = active.get_current_stream
    active.launcher_cls = Launcher
    active.get_current_stream = lambda device: stream_of(max(device, 0))
    for name in COUNT_MULTIPROCESSORS:
        module = importlib.import_module(f"octavo.kernels.triton.{name}")
        count = module.multiprocessors
        module.multiprocessors = lambda index, count=count: count(max(index, 0))
