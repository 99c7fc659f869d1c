"""Triton without a GPU: kernels are compiled for a real target and bound by Triton's own launcher, but not launched.

    with offline(90) as launches:
        cast(torch.randn(256, 256), ...)        # plain CPU tensors stand for a GPU's
    launches[0].kernel.asm["cubin"]             # what machine_code.py reads

Each capability counts as a device of its own, so that Triton's caches and octavo's keep them apart. Works with Triton
3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from octavo.kernels.triton.prologue import Input
from octavo.kernels.triton.tiles import BlockScales, Source
from tests.support.emulated import DEVICES, as_gpu

SHARED_MEMORY = {capability: shared for capability, (shared, _) in DEVICES.items()}
MULTIPROCESSORS = {capability: count for capability, (_, count) in DEVICES.items()}
_REPLAYS: dict[int, dict[Any, Any]] = {capability: {} for capability in SHARED_MEMORY}  # octavo's


class Launch(NamedTuple):
    """A launch that did not happen: compiled kernel, grid, and the bytes of the tensors whose tiles it reads."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    read: int


class _Launcher(CudaLauncher):
    """Triton's launcher without what it calls in C, which alone reads the arguments and calls the driver."""

    gsan_enabled = False
    arg_annotations = kernel_signature = None

    def __init__(self, source: Any, metadata: Any) -> None:
        self.num_ctas = metadata.num_ctas
        self.global_scratch_size, self.global_scratch_align = (
            metadata.global_scratch_size,
            metadata.global_scratch_align,
        )
        self.profile_scratch_size = self.profile_scratch_align = 0
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        self.launch = _nothing


def _nothing(*args: Any) -> None:
    return None


def _load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
    """Return (None, function, registers, spills, most threads): a dying kernel would unload a module in its place."""
    return None, 1, 0, 0, 1024


@contextmanager
def offline(capability: int, record: bool = True) -> Iterator[list[Launch]]:
    """Compile for ``capability`` (90 or 100) and launch nothing; the launches are listed unless ``record`` is False."""
    launches: list[Launch] = []
    original = CompiledKernel.run

    def run(kernel: CompiledKernel) -> Callable[..., None]:
        launcher = original.fget(kernel)

        def recorded(x: int, y: int, z: int, *args: Any) -> None:
            tiled = {
                part.ptr.data_ptr(): part.ptr.nbytes for part in args if isinstance(part, (Source, BlockScales, Input))
            }
            launches.append(Launch(kernel, (x, y, z), sum(tiled.values())))
            launcher(x, y, z, *args)

        return recorded

    if record:
        CompiledKernel.run = property(run)
    try:
        with as_gpu(capability, _Launcher, _load_binary, _REPLAYS[capability]):
            yield launches
    finally:
        CompiledKernel.run = original
