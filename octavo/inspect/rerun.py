"""Runs the forwards and backwards of a recorded step once more, in high precision or in FP8, without a trace.

Each forward begins with the arguments, random numbers and states of modules that it had in the step, and its backward
with the gradients that the step's outputs got. So a rerun needs no loss function: what the model returns times these
gradients is the loss, to first order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.distributed.ranks import Ranks
from octavo.inspect.first_batch import FirstBatch
from octavo.inspect.forwards import Forward, backward, without_trace
from octavo.inspect.module_outputs import OutputChanges
from octavo.inspect.notes import Call, gets_gradient
from octavo.inspect.products import GradientPair
from octavo.inspect.slope import aimed_change, changes_along, dot
from octavo.nn.convert import using
from octavo.weights.fsdp2 import whole

LayerWeights = Sequence[Tensor | None]  # None of a layer whose weight is computed or gone


class Rerun(NamedTuple):
    """A step that ran once more, beside the step. Losses are float64, and times the loss scale.

    Attributes:
        pairs: each weight's gradients, of the step and of the rerun.
        loss_change: the rerun's loss less the step's; nan where an output was overwritten.
        loss: the rerun's loss; nan where a model returns another tensor than a number.
        slope: changes_along of the first forward of a twin; zeros of other reruns.
        outputs: by how far modules' outputs of the first recorded batch moved, before a twin ran.
    """

    pairs: list[GradientPair]
    loss_change: Tensor
    loss: Tensor
    slope: Tensor
    outputs: OutputChanges | None


class StepRunner:
    """Runs recorded steps of a model once more; see Twin for the arguments."""

    def __init__(self, model: nn.Module, ranks: Ranks, folder: Path, resumes: bool) -> None:
        self._model, self._ranks, self._folder, self._resumes = model, ranks, folder, resumes
        self._first_batch: FirstBatch | None = None

    def run(self, calls: Sequence[Call], weights: LayerWeights, recipe: Any, is_twin: bool) -> Rerun:
        """Run a step's forwards and their backwards again, with all layers under a recipe; StepNotes has ended.

        Before the twin's the first recorded batch runs: their backwards reshard what FSDP2 gathers for it.
        """
        with without_trace(self._model) as step_gradients, using(self._model, recipe):
            outputs = self._run_first_batch(calls[0].forward) if is_twin else None
            values = [self._run_call(call, has_slope=is_twin and call is calls[0]) for call in calls]
            pairs = [(None, None) if w is None else (step_gradients.get(w), w.grad) for w in weights]
        loss_changes, losses, slopes = zip(*values, strict=True)
        loss_change, loss = (functools.reduce(torch.add, each) for each in (loss_changes, losses))
        return Rerun(pairs, loss_change, loss, slopes[0], outputs)

    def _run_first_batch(self, forward: Forward) -> OutputChanges | None:
        """Run the first recorded batch in a forward's modes; return how far outputs moved since the last run."""
        if self._first_batch is None or not self._first_batch.outputs.is_of(self._model):
            self._first_batch = FirstBatch(self._model, forward, self._ranks, self._folder, self._resumes)
        return self._first_batch.run(forward.modes)

    def _run_call(self, call: Call, has_slope: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run a forward and its backward again; return the loss_change, loss and slope of a Rerun of this call alone.

        ``has_slope``: run it from moved weights too; only of a step's first call, as weights have its gradients alone.
        """
        with torch.enable_grad():
            all_outputs = call.forward.again(self._model)
        places = [place for place, y in enumerate(all_outputs) if gets_gradient(y)]
        noted = dict(zip(places, call.outputs, strict=True))
        grads = {place: output.grad for place, output in noted.items() if output.grad is not None}
        backward(self._model, [all_outputs[place] for place in grads], [*grads.values()])
        outputs = {place: all_outputs[place].detach() for place in grads}
        del all_outputs  # with their graph
        loss = _loss(outputs, grads)
        loss_change = loss - sum(noted[place].product for place in grads)
        slope = self._slope(call, outputs, grads, loss) if has_slope else loss.new_zeros(2)
        is_more_than_loss = [whole(grads[place]).any() for place, y in outputs.items() if y.numel() > 1]
        if is_more_than_loss:
            loss = loss.masked_fill(torch.stack(is_more_than_loss).any(), math.nan)
        return loss_change, loss, slope

    def _slope(self, call: Call, outputs: dict[int, Tensor], grads: dict[int, Tensor], loss: Tensor) -> Tensor:
        """Return changes_along of a call that ran again, and whose weights have their gradients."""
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        is_float32 = dtypes == {torch.float32} and not call.forward.autocast.enabled
        pairs = [(whole(y), whole(grads[place])) for place, y in outputs.items()]
        aim = torch.stack([aimed_change(y, grad, is_float32) for y, grad in pairs]).sum()

        def change() -> Tensor:
            return _loss(call.forward.again(self._model), grads) - loss

        return changes_along(self._model, self._ranks, aim, change)


def _loss(outputs: Sequence[Tensor] | dict[int, Tensor], grads: dict[int, Tensor]) -> Tensor:
    """Return the sum of products of outputs and their gradients, float64: the loss, to first order."""
    return torch.stack([dot(whole(outputs[place].detach()), whole(grad)) for place, grad in grads.items()]).sum()
