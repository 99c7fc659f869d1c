"""What is tuned is what the table holds, and each configuration of a grid can be a kernel's."""

from types import ModuleType

import pytest

pytestmark = pytest.mark.gpu


def test_every_row_of_the_table_is_read_by_the_cases_that_tune_it(tuner: ModuleType) -> None:
    kinds = tuner.KINDS
    assert tuner.launch.TABLE.keys() == kinds.keys()
    unread = {kind: tuner.unaffected(kind, tuner.buckets_of(kind, True)[64][0]) for kind in kinds}
    assert unread == dict.fromkeys(kinds, "")


def test_grids(tuner: ModuleType) -> None:
    for kind, (cases, configs, buckets) in tuner.KINDS.items():
        assert len(set(configs)) == len(configs) >= 7 and cases and max(buckets) == 64, kind
        assert {config.num_warps for config in configs} <= {2, 4, 8, 16}
        assert all((c.block_r * c.block_c).bit_count() == 1 for c in configs), kind
