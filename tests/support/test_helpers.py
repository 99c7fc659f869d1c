"""Checks of shared helpers whose faults no other test would show."""

import ctypes

import torch

from tests.support.helpers import thread_pool


def test_threads_of_a_pool_multiply_on_as_many_threads_as_this_one():
    """A pool's threads have this thread's number; in a new thread BLAS would use ``OMP_NUM_THREADS``."""
    number_now, asked = torch.get_num_threads(), ctypes.CDLL(None).omp_get_max_threads
    torch.set_num_threads(7)
    try:
        with thread_pool(1) as pool:
            assert pool.submit(asked).result() == 7
    finally:
        torch.set_num_threads(number_now)
