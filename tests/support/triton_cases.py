"""Triton's tiles, launches and shared counters, as tests need them."""

from typing import Any

import pytest

from tests.support.triton_kernels import TritonKernels

# Smaller tiles than a table has, so that small tensors are several programs in each direction. What is padded to 16
# needs tiles of 16.
SMALL_TILES = {
    "amax": [16, 64, 2, 4],
    "cast": [8, 64, 3, 4],
    "cast_transpose": [16, 32, 2, 4],
    "cast_rows": [4, 128, 1, 4],
    "amax_lines": [16, 32, 2, 4],
    "cast_lines": [16, 32, 2, 4],
    "cast_blocks": [16, 32, 1, 4],
    "cast_blocks_transpose": [32, 32, 1, 4],
    "norm_cast": [2, 128, 2, 4],
    "norm_cast_transpose": [16, 32, 2, 4],
    "norm_cast_blocks": [2, 128, 1, 4],
    "norm_cast_blocks_transpose": [32, 32, 1, 4],
    "norm_backward": [4, 64, 1, 8],
}


def assert_counters_are_zero(kernels: TritonKernels) -> None:
    """Check that the memory that programs share is as the next launch expects it."""
    launch = kernels.module("launch")
    for work in (*launch._work.values(), *(work for pool in launch._pools.values() for work in pool)):
        assert not work.any(), "a launch left a counter or an amax behind"


class _Forgetful(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def never_replay(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each call in the remaining test a first one."""
    monkeypatch.setattr(kernels.module("replay"), "REPLAYS", _Forgetful())


def use_small_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels work in SMALL_TILES for the remaining test."""
    launch = kernels.module("launch")
    monkeypatch.setattr(kernels.module("replay"), "REPLAYS", {})
    config = launch.config

    def small(kernel: str, log2_elements: int) -> Any:
        name = kernel.removesuffix("_activation").removesuffix("_gradient").removesuffix("_gated").removesuffix("_norm")
        return launch.Config(*SMALL_TILES[name]) if name in SMALL_TILES else config(kernel, log2_elements)

    for module in kernels.modules.values():
        if vars(module).get("config") is config:
            monkeypatch.setattr(module, "config", small)


def count_launches(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, computes: bool = True) -> list[str]:
    """Return a list that takes the names of the kernels that are launched in the remaining test, or else would be."""
    never_replay(kernels, monkeypatch)
    launch, names = kernels.module("launch").launch, []

    def record(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        if computes:
            launch(kernel, *args, **options)

    for module in kernels.modules.values():
        if vars(module).get("launch") is launch:
            monkeypatch.setattr(module, "launch", record)
    return names
