"""The delayed scales that are known to exist, and the launches that a cast leaves out then."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.scaling.delayed import State
from tests.support.casts import update_args
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

UPDATE = update_args("max")


@pytest.fixture
def known(kernels: TritonKernels) -> Callable[[Tensor], list[bool]]:
    """Return a function that says which of the three scales are known to exist once all copies have arrived."""

    def ask(state: Tensor) -> list[bool]:
        if state.is_cuda:
            torch.cuda.synchronize()
        return [kernels.module("delayed_update").scale_exists(state, role) for role in range(3)]

    return ask


def commit(kernels: TritonKernels, state: State, *amaxes: float | None) -> None:
    kernels.delayed_update(*state, *[None if a is None else torch.full((1, 1), a) for a in amaxes], *UPDATE)


def commit_twice(
    kernels: TritonKernels, known: Callable[[Tensor], list[bool]], state: State, *amaxes: float | None
) -> None:
    """Commit twice: after the second commit the host knows the scales that the first one wrote."""
    commit(kernels, state, *amaxes)
    known(state.scale)  # as a forward asks
    commit(kernels, state, *amaxes)


def test_a_commit_makes_known_what_the_one_before_it_wrote(kernels, known):
    state = State.empty(4)
    commit(kernels, state, 1.0, None, 0.0)
    assert known(state.scale) == [False] * 3
    assert (state.scale != 0).tolist() == [True, False, False]
    commit(kernels, state, None, None, None)
    assert known(state.scale) == [False] * 3
    commit(kernels, state, 0.0, 2.0, None)
    assert known(state.scale) == [True, False, False]
    commit(kernels, state, None, 0.0, 3.0)
    assert known(state.scale) == [True, True, False]
    commit(kernels, state, None, None, 0.0)
    assert known(state.scale) == [True] * 3


def test_anyone_elses_write_makes_it_unknown(kernels: TritonKernels, known: Callable[[Tensor], list[bool]]) -> None:
    state = State.empty(4)
    for write in (Tensor.zero_, lambda s: s.copy_(torch.ones(3)), lambda s: s[0].fill_(0.0)):
        commit_twice(kernels, known, state, 1.0, 1.0, 1.0)
        assert known(state.scale) == [True] * 3
        write(state.scale)
        assert known(state.scale) == [False] * 3
    # and what was known before that write is not taken up again
    state.scale.zero_()
    commit_twice(kernels, known, state, None, 1.0, None)
    assert known(state.scale) == [False, True, False]


def test_inference_tensors_are_never_known(kernels: TritonKernels, known: Callable[[Tensor], list[bool]]) -> None:
    with torch.inference_mode():
        state = State.empty(4)
        for _ in range(3):
            commit(kernels, state, 1.0, 1.0, 1.0)
            assert known(state.scale) == [False] * 3
    assert (state.scale != 0).all()
    state = State.empty(4)
    with torch.inference_mode():  # a state from outside has its version there too
        commit_twice(kernels, known, state, 1.0, 1.0, 1.0)
        assert known(state.scale) == [True] * 3


def test_an_entry_goes_with_its_tensor(kernels: TritonKernels) -> None:
    entries = kernels.module("delayed_update")._entries
    gc.collect()
    before = len(entries)
    state = State.empty(4)
    commit(kernels, state, 1.0, 1.0, 1.0)
    assert len(entries) == before + 1
    del state
    gc.collect()
    assert len(entries) == before
