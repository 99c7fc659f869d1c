"""Products of weights' gradients of two runs of the same step, summed over ranks, and their cosines.

They are a table, float64 [layers + 1, 3], whose columns ``Products`` names. It has a row for each layer's weight, and a
last one for all other weights together, 0 where these are not compared. All three of a row are 0 where nothing is
compared: a run has no gradient of a weight, or one that is not of this step alone. They are nan where nothing is known:
where the step's FP8 rerun (twin.py) does not have the step's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.distributed.ranks import Ranks
from octavo.inspect.forwards import device_of
from octavo.inspect.slope import dot
from octavo.weights.fsdp2 import on_this_rank

GradientPair = tuple[Tensor | None, Tensor | None]  # a weight's gradients of two runs of a step


class Products(NamedTuple):
    """The columns of a table, [rows] each: products of gradients a and b of two runs."""

    dots: Tensor  # <a, b>
    first_squares: Tensor  # <a, a>
    second_squares: Tensor  # <b, b>


def cosines_of(products: Tensor) -> Tensor:
    """Return the cosine of each row of a table, [rows], so that all below a limit are errors.

    One is 0 where one run's gradient is 0 and the other's is not. It is 1, an error of neither run, where both are 0 or
    one is inf or NaN.
    """
    dots, first, second = Products(*products.unbind(1))
    return (dots / (first * second).sqrt()).nan_to_num(1.0).masked_fill((first == 0) != (second == 0), 0.0)


class RankSums:
    """Multiplies gradients of a model's weights on each rank, and sums the products over ranks."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._are_replicated: list[bool] | None = None  # whether all ranks have a weight's gradient, found once

    def products(self, pairs: Sequence[GradientPair], layers: int, is_first_run_again: bool = False) -> Tensor:
        """Return the table of products of pairs of gradients, of which the first ``layers`` are layers'.

        ``is_first_run_again``: the first gradients are of a run again too, in which ranks reduce none.
        """
        replicated_pairs = zip(pairs, self._replicated(pairs), strict=True)
        of_rank = [self._product(*pair, each, is_first_run_again) for pair, each in replicated_pairs]
        products = self._ranks.sum(torch.stack(of_rank))
        return torch.cat([products[:layers], products[layers:].sum(0, keepdim=True)])

    def squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the squares of the norms of this rank's gradients, 0 where there is none: float64 [gradients]."""
        zero = torch.zeros((), dtype=torch.float64, device=device_of(self._model))
        local = [None if grad is None else on_this_rank(grad) for grad in gradients]
        return torch.stack([zero if grad is None else dot(grad, grad) for grad in local])

    def _replicated(self, pairs: Sequence[GradientPair]) -> list[bool]:
        """Return whether all ranks have the same gradient of a weight, as under DDP, found once: it is a mean then."""
        if self._ranks.size == 1:
            return [False] * len(pairs)
        if self._are_replicated is None or len(self._are_replicated) != len(pairs):
            squares = self.squares([grad for grad, _ in pairs])
            largest, least = self._ranks.largest(squares), -self._ranks.largest(-squares)
            self._are_replicated = [bool(each) for each in ((largest == least) & (largest > 0)).tolist()]
        return self._are_replicated

    def _product(self, a: Tensor | None, b: Tensor | None, is_replicated: bool, is_first_run_again: bool) -> Tensor:
        """Return the products of a weight's gradients, a row of the table: float64 [3]."""
        if a is None or b is None:
            return torch.zeros(3, dtype=torch.float64, device=device_of(self._model))
        a, b = on_this_rank(a).float(), on_this_rank(b).float()
        b = self._ranks.mean(b) if is_replicated else b
        a = self._ranks.mean(a) if is_replicated and is_first_run_again else a
        return torch.stack([dot(a, b), dot(a, a), dot(b, b)])
