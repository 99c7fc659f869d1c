"""Triton without a GPU and without its compiler: kernels are bound and have a name, and no code is made of them.

For tests of what is launched, and with what. benchmarks/machine_code/compiled.py makes the code, a second a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.triton import replay

NOWHERE = -1  # a device whose caches hold no compiled kernel


class Uncompiled(CompiledKernel):
    """A kernel with only the attributes that launching needs."""

    def __init__(self, source: Any, options: Any) -> None:
        self.src, self.name, self.hash = source, source.name, (source.hash(), options.hash())
        self.module, self.function, self.packed_metadata, self._run = None, 1, self.hash, lambda *args: None

    def _init_handles(self) -> None:
        pass


def _named(
    self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> Uncompiled:
    kernel = Uncompiled(self.ASTSource(self, signature, constexprs, attrs), options)
    self.device_caches[device][0][key] = kernel
    return kernel


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compile no kernel that is launched for the first time inside benchmarks' ``offline``."""
    with (
        mock.patch.object(JITFunction, "_do_compile", _named),
        mock.patch.object(driver.active, "get_current_device", lambda: NOWHERE),
        mock.patch.object(replay, "REPLAYS", {}),
    ):
        yield
