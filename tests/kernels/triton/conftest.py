import pytest

from tests.support.triton_cases import use_small_tiles
from tests.support.triton_kernels import TritonKernels


@pytest.fixture(params=[False, True], ids=["", "small"])
def tiles_of_any_size(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Run once with the table's tiles and once with small ones, where small tensors are several programs."""
    if request.param:
        use_small_tiles(kernels, monkeypatch)


@pytest.fixture
def small(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the optimizer's step have two tiles of 4 rows: small tensors are several."""
    config = kernels.module("launch").Config(4, 128, 2, 4)
    monkeypatch.setattr(kernels.module("optimizer_step"), "config", lambda *_: config)
