import pytest

from octavo import kernels
from octavo.kernels.reference import KERNELS


@pytest.fixture(autouse=True)
def _by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``kernels.cast`` and its kin be the reference's here; tests/kernels/cpu compares the CPU's with these."""
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(kernels, name, kernel)
