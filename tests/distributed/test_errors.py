from octavo import OctavoError
from octavo.distributed.errors import CheckpointError, RankError


def test_they_are_octavos_own():
    assert issubclass(CheckpointError, OctavoError) and issubclass(RankError, OctavoError)
