"""Without a GPU Triton's kernels run in its interpreter. To be imported before octavo.kernels.triton is."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _patch_once() -> None:
    """Leave triton.language to the interpreter for good.

    It takes its place at every call of a function and gives it back after, which is most of the time of a call. Nothing
    is compiled in this process.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    done: dict[frozenset[str], Any] = {}

    def patched(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        languages = frozenset(m.__name__ for m in modules if m.__name__.startswith("triton.language"))
        if languages not in done:
            done[languages] = patch(function)
            tl.tensor.__index__ = lambda value: value.handle.data.item()  # NumPy 2.4 refuses how Triton 3.6 does it
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    _patch_once()
