import pytest

import octavo
from octavo.train.errors import CheckpointError, DivergedError, TrainError


@pytest.mark.parametrize("error", [TrainError, CheckpointError, DivergedError])
def test_one_except_clause_catches_all_of_them(error):
    assert issubclass(error, TrainError) and issubclass(error, octavo.OctavoError)
