"""What several tests share, where it can be wrong without any of them failing here."""

import ctypes

import torch

from tests.support.helpers import thread_pool


def test_threads_of_a_pool_multiply_on_as_many_threads_as_this_one():
    """Of which BLAS asks OpenMP; in a thread that was told nothing it answers ``OMP_NUM_THREADS``."""
    number_now, asked = torch.get_num_threads(), ctypes.CDLL(None).omp_get_max_threads
    torch.set_num_threads(7)
    try:
        with thread_pool(1) as pool:
            assert pool.submit(asked).result() == 7
    finally:
        torch.set_num_threads(number_now)
