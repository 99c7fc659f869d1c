"""Octavo's GPU path on CPU tensors: Triton compiles as for a GPU, and its launches' PTX runs in the emulator.

    with emulating(90) as launches:
        kernels.cast(...)

Triton's driver and its last step, from PTX to machine code, are replaced while it lasts.
"""

from __future__ import annotations

import functools
import gc
import importlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import emulator
from emulator.machine import Launch
from emulator.memory import GlobalMemory, Span

# By compute capability: bytes of shared memory a program, and multiprocessors, of a GPU that has it.
DEVICES = {89: (101376, 128), 90: (232448, 132), 100: (232448, 148), 120: (101376, 170)}
FORMATS = {"fp32": "<f", "f32": "<f", "fp64": "<d", "i1": "<b", "u1": "<B", "i8": "<b", "u8": "<B"}
FORMATS |= {"i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q"}
COUNT_MULTIPROCESSORS = ("launch", "cast_input", "norm_kernels", "optimizer_step")  # modules that imported the name


class Done(NamedTuple):
    """A launch that the emulator ran."""

    kernel: str
    grid: tuple[int, int, int]
    seconds: float
    launch: Launch


ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


@functools.cache
def _written_by(function: Any) -> tuple[tuple[int, str], ...]:
    """Return places and names of an operator's arguments that it writes."""
    arguments = enumerate(function._schema.arguments if hasattr(function, "_schema") else ())
    return tuple((place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write)


class Unwritten(TorchDispatchMode):
    """Notes memory that torch allocated and nobody wrote: torch.empty's, until an operator or a kernel writes it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, np.ndarray]] = {}  # by address: bool [bytes]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for place, name in _written_by(function):
            value = args[place] if place < len(args) else named.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and (written := self._of(tensor.untyped_storage())) is not None:
                    size, first = tensor.element_size(), tensor.storage_offset()
                    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                    written[first * size : (first + (reach if tensor.numel() else 0)) * size] = True
        result = function(*args, **named)
        if function._opname in ALLOCATES and result.device.type == "cpu":
            storage = result.untyped_storage()
            if storage.nbytes():
                self._known[storage.data_ptr()] = StorageWeakRef(storage), np.zeros(storage.nbytes(), bool)
        return result

    def _of(self, storage: Any) -> np.ndarray | None:
        reference, written = self._known.get(storage.data_ptr(), (None, None))
        known = reference is not None and not reference.expired() and len(written) == storage.nbytes()
        return written if known else None

    def spans(self, storages: Iterable[Any]) -> list[Span]:
        """Return these storages as the emulator takes them."""
        return [(storage.data_ptr(), storage.nbytes(), self._of(storage)) for storage in storages]


def flattened(types: Any, arguments: Any) -> Iterator[tuple[str, Any]]:
    for kind, argument in zip(types, arguments, strict=True):
        if isinstance(kind, (tuple, list)):
            yield from flattened(kind, argument)
        elif kind != "constexpr":
            yield kind, argument


def _packed(kind: str, argument: Any) -> bytes:
    if not kind.startswith("*"):
        return struct.pack(FORMATS[kind], argument)
    return struct.pack("<Q", 0 if argument is None else argument.data_ptr())


def live_tensors(kind: str = "cpu") -> Iterator[torch.Tensor]:
    """Yield all tensors of a kind of device that have memory: a kernel may find pointers in memory."""
    for obj in gc.get_objects():
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device.type == kind:
            with suppress(RuntimeError, NotImplementedError):  # a tensor without memory
                obj.untyped_storage().data_ptr()
                yield obj


def all_storages() -> Iterator[Any]:
    """Yield the memory of all CPU tensors."""
    return (tensor.untyped_storage() for tensor in live_tensors())


class _Run(NamedTuple):
    """Options and results of the launches within ``emulating``."""

    options: emulator.Options
    change: Callable[[str], str]
    done: list[Done]
    unwritten: Unwritten


class _Launcher:
    """Takes the place of Triton's launcher of one compiled kernel."""

    gsan_enabled = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self.types = source.signature
        if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "num_ctas", 1) != 1:
            raise emulator.Unsupported("scratch memory, or clusters of programs")

    def __call__(self, x: int, y: int, z: int, stream: Any, function: int, *arguments: Any) -> None:
        name, text, shared = _functions[function]
        text = _runs[-1].change(text)
        typed = list(flattened(self.types.values(), arguments[4:]))  # after two kinds of metadata and two hooks
        values = [_packed(*one) for one in typed]
        values += [b"\0" * 8] * (len(emulator.parse(text).parameters) - len(values))  # scratch that is not there
        spans = _runs[-1].unwritten.spans
        storages = [tensor.untyped_storage() for _, tensor in typed if isinstance(tensor, torch.Tensor)]
        memory = GlobalMemory(spans(storages), more=lambda: spans(all_storages()))
        began = time.perf_counter()
        launch = emulator.run(text, (x, y, z), values, shared, memory, _runs[-1].options)
        _runs[-1].done.append(Done(name, (x, y, z), time.perf_counter() - began, launch))


class _Driver:
    """Takes the place of a GPU's driver, as far as Triton and octavo call it."""

    def __init__(self, capability: int, launcher: Any, load_binary: Callable[..., tuple[Any, ...]]) -> None:
        from triton.backends.compiler import GPUTarget

        self.launcher_cls, number = launcher, 1000 * id(launcher) + capability
        properties = dict(zip(("max_shared_mem", "multiprocessor_count"), DEVICES[capability], strict=True))
        self.utils = SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: properties)
        # closures, as fast as torch's own functions are in the real driver
        self.get_current_device = lambda: number  # Triton and octavo keep compiled kernels by the device
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""


@contextmanager
def as_gpu(capability: int, launcher: Any, load_binary: Callable[..., tuple[Any, ...]], replays: Any) -> Iterator[None]:
    """Make Triton compile for a capability, each a device of its own, without a GPU.

    Args:
        launcher: a class in place of Triton's.
        load_binary: from (name, binary, shared bytes, device) to (module, function, registers, spills, most threads).
        replays: octavo's of this capability alone.
    """
    from triton.runtime.driver import driver

    before, count = driver._active, DEVICES[capability][1]
    driver.set_active(_Driver(capability, launcher, load_binary))
    try:
        with ExitStack() as patches:
            for name in COUNT_MULTIPROCESSORS:
                module = importlib.import_module(f"octavo.kernels.triton.{name}")
                patches.enter_context(mock.patch.object(module, "multiprocessors", lambda index: count))
            replay = importlib.import_module("octavo.kernels.triton.replay")
            patches.enter_context(mock.patch.object(replay, "REPLAYS", replays))
            yield
    finally:
        driver._active = before


def _load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
    _functions.append((name, bytes(binary).decode(), shared))
    return None, len(_functions) - 1, 32, 0, 1024


_functions: list[tuple[str, str, int]] = []  # name, PTX and shared bytes of compiled kernels, by their handles
_replays: dict[int, dict[Any, Any]] = {}  # octavo's, by capability
_runs: list[_Run] = []


@contextmanager
def emulating(
    capability: int,
    options: emulator.Options | None = None,
    finds_unwritten: bool = True,
    change: Callable[[str], str] = str,
) -> Iterator[list[Done]]:
    """Launch octavo's Triton kernels in the emulator, on CPU tensors; the list takes each launch.

    Args:
        capability: 89, 90, 100 or 120: what Triton compiles for.
        options: how they run.
        finds_unwritten: raise at reads of global memory that nobody wrote; torch.compile does not work meanwhile.
        change: what runs in place of a kernel's PTX.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    own_hash = CUDABackend.hash

    def other_hash(backend: Any) -> str:  # Triton's cache on disk holds real binaries by the other
        return f"{own_hash(backend)}-emulated"

    _runs.append(_Run(options or emulator.Options(), change, [], Unwritten()))
    try:
        with (
            as_gpu(capability, _Launcher, _load_binary, _replays.setdefault(capability, {})),
            mock.patch.object(CUDABackend, "hash", other_hash),
            mock.patch.object(CUDABackend, "make_cubin", lambda backend, source, *others: source.encode()),
            _runs[-1].unwritten if finds_unwritten else nullcontext(),
        ):
            yield _runs[-1].done
    finally:
        _runs.pop()
