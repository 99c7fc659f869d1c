from typing import Any

import pytest


@pytest.fixture
def theirs() -> Any:
    return pytest.importorskip("torchao.float8")
