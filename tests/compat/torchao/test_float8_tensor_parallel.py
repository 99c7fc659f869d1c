"""torchao's styles of tensor parallelism, under its names, gather in FP8 as octavo's do."""

import inspect

import pytest
import torch

import octavo
from octavo.compat.torchao import float8_tensor_parallel as ours
from tests.support import parallel_tasks as tasks
from tests.support.byte_counter import GATHER


def test_a_plan_of_torchaos_styles_equals_one_rank_and_gathers_in_fp8(pool):
    for (first, second), *sent in pool.run(tasks.sequence_parallel, (2,), "power of two", True, torch.float32, "ao"):
        assert max(first.values()) <= 1e-3 and max(second.values()) <= 1e-3
        codes = 512 * 256  # a byte each of what three layers read, and of the gradient of what the fourth gives
        assert all(codes <= counter[GATHER] < 1.01 * codes for counter in sent)


def test_the_arguments_of_prepare_module_input_are_torchaos():
    theirs = pytest.importorskip("torchao.float8.float8_tensor_parallel").PrepareFloat8ModuleInput
    values = dict.fromkeys(inspect.signature(theirs).parameters) | {"float8_dtype": torch.float8_e4m3fn}
    assert ours.PrepareFloat8ModuleInput(**values).use_local_output is None
    with pytest.raises(octavo.UnsupportedOptionError, match=r"float8_e5m2: each layer's recipe.*cast_config_input"):
        ours.PrepareFloat8ModuleInput(float8_dtype=torch.float8_e5m2)
