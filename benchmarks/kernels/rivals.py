"""The same work as each case by torch.compile of plain torch, and by those of the libraries that are installed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.kernels import libraries
from benchmarks.kernels.libraries import Rival
from benchmarks.kernels.plain_torch import PLAIN, compiled
from octavo.kernels.triton import cases

RIVALS = ("inductor", "torchao", "liger", "te")


def rivals_of(name: str, toy: bool) -> dict[str, Rival]:
    """Return the rivals of a case, by the names of their columns; earlier compiled functions are forgotten."""
    torch.compiler.reset()  # a function compiled for more shapes and cases than 8 is refused
    by_column = {"inductor": Rival(compiled(PLAIN[name], toy))} if name in PLAIN else {}
    if name in cases.FUSED:
        others = {"liger": libraries.liger, "te": libraries.transformer_engine}
    else:
        others = {"torchao": functools.partial(libraries.torchao, toy)}
    for who, works in others.items():
        try:
            rivals = works()
        except ModuleNotFoundError:
            continue
        except Exception as error:  # it is there, but not for this torch or GPU
            rivals = {name: Rival(functools.partial(_raise, error))}
        if name in rivals:
            by_column[who] = rivals[name]
    return by_column


def _raise(error: Exception, *inputs: Tensor) -> None:
    raise error
