import pytest

from octavo import kernels
from octavo.kernels import cpu, reference


@pytest.fixture(autouse=True)
def _by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``kernels.cast`` and its kin be the reference's here; tests/kernels/cpu compares the CPU's with these."""
    for name, kernel in reference.KERNELS.items():
        if kernel is not cpu.KERNELS[name] and name != "cast_and_commit":  # a cast and an update, compiled in tests
            monkeypatch.setattr(kernels, name, kernel)
