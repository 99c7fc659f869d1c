import pytest

from tests.support.triton_cases import use_small_tiles
from tests.support.triton_kernels import TritonKernels


@pytest.fixture(params=[False, True], ids=["", "small"])
def tiles_of_any_size(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Run once with the table's tiles and once with small ones, where small tensors are several programs."""
    if request.param:
        use_small_tiles(kernels, monkeypatch)
