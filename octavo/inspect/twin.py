"""The twin of a recorded step: its batches once more in high precision, with the same weights and random numbers.

A step's forwards of the model are noted with their arguments, random states and autocast, and the gradients that their
outputs get (notes.py). Before the optimizer's update they run again with every layer in high precision, and backward
begins with the same gradients of the outputs (rerun.py). So weights' gradients can be compared however the loss is
computed (products.py). Of a model that returns its loss the twin has the loss itself; of others it has it to first
order, by the change of the outputs times their gradients.

That gives a step's gradients only if all that reaches the weights goes through the model's outputs, and nothing changes
a gradient before the update. So there is a second rerun of some steps, the *FP8 rerun*, with the layers' own recipes:

    of the first recorded step    if it gives far other gradients than the step had, there is no twin
    of later recorded steps       once a layer's gradient differed from its twin's, which the host learns some steps
                                  later, or a step's loss was not that of its FP8 rerun, as when weights are moved for
                                  the forward alone. Then the FP8 rerun is compared with the twin in place of the step:
                                  an error of FP8 is in it, a change after backward, or of weights, is not

Before the twin a part of the first recorded batch runs again, in high precision too (first_batch.py). So in each
recorded step modules compute the same batch, and where one computes something else of the same input than in the step
before, or backward another gradient, the program changed, and neither the data nor the labels. After the twin's first
backward the same forward runs from weights that are moved along the gradients: whether the loss falls as these say
tells if backward is that of the forward (slope.py).

The twin leaves no trace: gradients, buffers, modules' attributes, random states and what octavo keeps are as before.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from octavo import recipes
from octavo.distributed.ranks import Ranks
from octavo.errors import first_line
from octavo.inspect.forwards import device_of
from octavo.inspect.module_outputs import OutputChanges
from octavo.inspect.notes import Call, StepNotes
from octavo.inspect.products import Products, RankSums, cosines_of
from octavo.inspect.remedies import own_recipes
from octavo.inspect.rerun import LayerWeights, Rerun, StepRunner
from octavo.inspect.rows import RecordedLayer, observe
from octavo.inspect.weight_updates import hook_before_update, torch_optimizer
from octavo.weights.fsdp2 import forget_failed_pass, on_this_rank
from octavo.weights.operands import weight_of

# --- scalars of the record, by recorded step

TWIN_LOSS = "twin_loss"  # the loss in high precision
# the cosine of all weights' gradients with the twin's, where no layer's weight has one, as of adapters
OTHERS_COSINE = "twin_cosine"
# the norm of gradients that are there before the step's first backward, of weights that the optimizer has, over the
# norm of all weights' gradients after the last
LEFTOVER_SHARE = "left_gradient"
RERUN_COSINE = "twin_control"  # the lowest cosine of a layer's gradient with the FP8 rerun's, in later steps
SLOPE = "twin_slope"  # of the twin's first forward, see slope.py

NO_TWIN = "no twin"  # the kind of an event: why no step was computed in high precision

# --- limits, of cosines of gradients as the optimizer gets them, and chosen by `python -m benchmarks causes`

# Of the first recorded step and its FP8 rerun: of all weights' gradients together, or of a layer's. Below the first,
# the rerun's are not the step's gradients; below the other a part of them comes by another way than the model's
# outputs, and in later steps a low cosine proves nothing. A rerun that changes nothing has the same bits: 1.
LEAST_RERUN_COSINE, REPRODUCED_COSINE = 0.8, 0.99
# Of a layer in a step and its twin. Below it FP8 differs, and later steps have an FP8 rerun, with the step's scales.
# In the benchmark's 78 healthy runs with twins the third least of five in turn is at least 0.949, or of four bits 0.924
DIFFERING_COSINE = 0.95
# |loss of the FP8 rerun - the step's| / |loss of the twin - the step's|: beyond it, outputs were of other weights
LARGEST_RERUN_LOSS = 0.1

NO_OPTIMIZER = "a twin runs before an optimizer's update: give octavo.inspect.record the optimizer"
NO_HOOKS = "a twin runs before an optimizer's update, but optimizer.step() runs no hooks, as if it is compiled"
IN_BACKWARD = (
    "the model's parameters have no gradients before the update: hooks take them as backward makes them, such as an "
    "optimizer's update in backward, or forwards compute with other parameters (torch.func.functional_call)"
)
NO_OUTPUT = (
    "no gradient came through the outputs of the model that octavo.inspect.record has: give it the module that the "
    "training calls (what torch.compile returned, not the module inside; a model.compile() cannot be noted), which "
    "returns tensors, or lists, dicts or dataclasses of them"
)
WRITTEN_WEIGHTS = (
    "weights were written between the forward and the update of the optimizer that octavo.inspect.record has, such as "
    "by another optimizer: give it the one that updates first"
)
OTHER_GRADIENTS = (
    "gradients reach the weights by another way than the model's outputs, or are changed before the update: its "
    "forwards run once more in FP8 have gradients whose cosine with the step's is {:.2f}"
)
OTHER_RANK = "it failed on another rank"


class Comparison(NamedTuple):
    """The comparison of a step's gradients and loss with its twin's, on the device; losses are times the loss scale.

    Attributes:
        products: [layers, 3] float64: of the step's gradients, or of the FP8 rerun's where there is one, and the
            twin's; see products.py.
        loss_change: the twin's loss less the step's, float64, or less the FP8 rerun's; nan where an output was
            overwritten.
        loss: the twin's loss; nan where a model returns another tensor than a number.
        has_scale: whether backward probably began from a loss times a scale: in float16, or with a GradScaler.
        reproduced: in the first recorded step of these layers the cosine of all gradients with the FP8 rerun's.
            Where it is below LEAST_RERUN_COSINE the numbers above are nan, in later steps too; where a layer's is,
            those of the layer.
        rerun_loss: |loss of the FP8 rerun - the step's| / |loss of the twin - the step's|; 0 without a rerun.
        scalars: OTHERS_COSINE, LEFTOVER_SHARE, RERUN_COSINE and SLOPE by name; None where the step has no such number.
        outputs: by how far modules' outputs of the first recorded batch moved since the last recorded step.
    """

    products: Tensor
    loss_change: Tensor
    loss: Tensor
    has_scale: bool
    reproduced: Tensor | None
    rerun_loss: Tensor
    scalars: dict[str, Tensor | None]
    outputs: OutputChanges | None

    def twin_loss(self, loss: float | Tensor | None, loss_scale: float | Tensor | None) -> Tensor | None:
        """Return the twin's loss beside a step's loss; None without one, nan where it needs a loss scale that is None.

        A loss that the model returns is compared by its ratio, which no scale, mean over batches or rank changes.
        """
        if loss is None:
            return None
        ratio = self.loss / (self.loss - self.loss_change)
        scale = (math.nan if self.has_scale else 1.0) if loss_scale is None else loss_scale
        exact = torch.where((loss * ratio).isfinite(), loss * ratio, self.loss / scale)
        return torch.where(self.loss.isnan(), loss + self.loss_change / scale, exact)


class _StepInFP8(NamedTuple):
    """A step in FP8 compared with its twin: the step itself, or its FP8 rerun.

    Attributes:
        products: of these gradients and the twin's, [layers + 1, 3]; see products.py.
        loss_change: the twin's loss less this one.
        rerun_loss: Comparison.rerun_loss.
        cosines: of the step's gradients and these: of layers, of other weights, and of all together, [layers + 2];
            a single 1 for the step itself.
    """

    products: Tensor
    loss_change: Tensor
    rerun_loss: Tensor
    cosines: Tensor


class Twin:
    """Runs the forwards of a recorded step again before the optimizer's update, and compares.

    A recorded step, in order:

        begin            hooks of the model note its forwards, from now on
        forward          its arguments, random states and autocast are noted, and its outputs get hooks
        first backward   before it changes a gradient, the norms of gradients that earlier steps left over are noted
        each backward    the outputs' gradients are noted
        before update    a hook of the optimizer decides whether the step has a twin, and runs on the device
                         1. in high precision a part of the first recorded batch, forward and backward,
                         2. in high precision the step's forwards, each with its backward; after the first one's the
                            slope: its forward from moved weights,
                         3. in FP8 the step's forwards again, with their backwards, if the step needs an FP8 rerun.
                         The first rerun's cosines stay on the device, where they mask the numbers of all steps
        after update     ``take`` hands the Comparison to the recorder, which sends it to the host
        a later step     the host has it: ``arrived`` lets all recorded steps from then on have an FP8 rerun, if a
                         layer's gradient is unlike its twin's, or the loss not its rerun's; and the recorder writes it

    Args:
        model: whose forwards are noted; they run again without DistributedDataParallel and torch.compile around it.
        optimizer: before whose update the twin runs.
        ranks: that train together.
        folder, resumes: of the record, where the first batch lies, and whether a run goes on that has one there.

    Attributes:
        reason: why there is no twin; empty if there is one.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks, folder: Path, resumes: bool) -> None:
        self._ranks = ranks
        self._notes = StepNotes(model, self._note_leftover_gradients, self._or_reason)
        self._model = self._notes.model
        self._runner = StepRunner(self._model, ranks, folder, resumes)
        self._comparison: Comparison | None = None
        # of the recorded step that now runs
        self._layers: Sequence[RecordedLayer] = ()
        self._leftover_squares: Tensor | None = None  # of norms of gradients before the first backward, [layers + 1]
        # of all steps of these modules, the layers of the last recorded step
        self._modules: list[nn.Module] = []
        self._sums = RankSums(self._model, ranks)
        self._first_cosines: Tensor | None = None  # _StepInFP8.cosines of their first step
        self._needs_reruns = False  # whether later steps need an FP8 rerun, as a Comparison says that arrived
        self._optimizer = torch_optimizer(optimizer)
        self.reason, self._hook = NO_OPTIMIZER, None
        if self._optimizer is not None:
            self.reason, self._hook = "", hook_before_update(self._optimizer, self._before_update)

    def begin(self, layers: Sequence[RecordedLayer]) -> None:
        """Note the forwards of a recorded step, from now on."""
        self.end()
        if not self.reason:
            last_modules, self._modules = self._modules, [module for module, _ in layers]
            if self._modules != last_modules:  # what is known by a layer's index
                self._first_cosines, self._sums = None, RankSums(self._model, self._ranks)
            self._layers = layers
            self._notes.begin()

    def take(self) -> Comparison | None:
        """End a step; return what its twin found, or None where none ran."""
        self.end()
        comparison, self._comparison = self._comparison, None
        return comparison

    def arrived(self, products: Tensor, rerun_loss: Tensor) -> None:
        """Let later steps have an FP8 rerun if a layer's gradient is unlike its twin's, or the loss not its rerun's.

        ``products``, ``rerun_loss``: a Comparison's, on the CPU.
        """
        differs = (cosines_of(products) < DIFFERING_COSINE).any()
        self._needs_reruns |= bool(differs | (rerun_loss > LARGEST_RERUN_LOSS))

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        self._notes.end()
        self._layers, self._leftover_squares = (), None

    def close(self) -> None:
        """Leave model and optimizer alone."""
        self.end()
        if self._hook is not None:
            self._hook.remove()

    @contextlib.contextmanager
    def _or_reason(self) -> Iterator[None]:
        """Note an error of the twin as the reason why there is none: the training goes on."""
        try:
            yield
        except Exception as error:
            if not forget_failed_pass(self._model):
                raise
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Note an error as the reason why there is no twin."""
        self.reason = f"the twin failed: {type(error).__name__}: {first_line(error)}"

    def _any_rank_has_reason(self) -> bool:
        """Return whether a rank has a reason for no twin; then all have one."""
        if self._ranks.any(bool(self.reason)):
            self.reason = self.reason or OTHER_RANK
        return bool(self.reason)

    def _note_leftover_gradients(self) -> None:
        """Note the norms of the gradients that are there before the step's first backward."""
        if self._leftover_squares is None:
            try:
                of_layers = (getattr(weight_of(module), "grad", None) for module, _ in self._layers)
                self._leftover_squares = self._sums.squares([*of_layers, None])  # None: other weights' are not noted
            except Exception as error:  # the training's backward goes on
                self._note_failure(error)

    def _before_update(self, is_after_closure: bool) -> None:
        """Compare the step with its twin before the optimizer's update, and note the comparison for ``take``."""
        if torch.compiler.is_compiling() or not self._layers or own_recipes(self._model) is None:
            return  # None: octavo.restore made all layers torch's meanwhile
        if device_of(self._model).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        calls = [call for call in self._notes.calls if any(output.grad is not None for output in call.outputs)]
        if is_after_closure:  # where the optimizer moved weights for the closure, gradients are of its forwards alone
            calls = [call for call in calls if not call.weights_written_since(self._model)]
        trained = [p for p in self._model.parameters() if p.grad is not None]
        if not trained:
            if calls:
                self.reason = self.reason or IN_BACKWARD
            return  # such as an update before the first step that makes the optimizer's state
        layers, leftover_squares = self._layers, self._leftover_squares
        self.end()
        self.reason = self._reason_against(calls, trained)
        if self._any_rank_has_reason():
            return
        comparison = None
        with self._or_reason():
            comparison = self._compared(calls, layers, trained, leftover_squares)
        self._comparison = None if self._any_rank_has_reason() else comparison

    def _reason_against(self, calls: Sequence[Call], trained: Sequence[Tensor]) -> str:
        """Return why this step has no twin; empty if it has one."""
        if any(type(on_this_rank(p.grad)) is not Tensor for p in trained if p.grad is not None):
            return IN_BACKWARD
        if not calls:
            return self.reason or NO_OUTPUT
        return WRITTEN_WEIGHTS if calls[0].weights_written_since(self._model) else self.reason

    def _compared(
        self, calls: list[Call], layers: Sequence[RecordedLayer], trained: Sequence[Tensor], leftover: Tensor | None
    ) -> Comparison | None:
        """Run a step's twin, and its FP8 rerun where one is needed; return the comparison, None where a run failed.

        ``trained``: parameters that have a gradient. ``leftover``: of this rank, see ``_leftover_squares``.
        """
        weights: LayerWeights = [weight_of(module) for module, _ in layers]
        has_others = all(weight is None or weight.grad is None for weight in weights)
        weights = [*weights, *trained] if has_others else weights
        if (twin := self._run(calls, weights, recipes.high_precision(), is_twin=True)) is None:
            return None
        zero, one = torch.zeros_like(twin.loss_change), torch.ones_like(twin.loss_change)  # the step is like itself
        of_step = _StepInFP8(self._sums.products(twin.pairs, len(layers)), twin.loss_change, zero, one)
        is_first = self._first_cosines is None
        needs_rerun = self._ranks.any(is_first or self._needs_reruns)
        if (in_fp8 := self._run_in_fp8(calls, weights, layers, twin) if needs_rerun else of_step) is None:
            return None
        first_cosines = self._first_cosines = in_fp8.cosines if self._first_cosines is None else self._first_cosines

        step_squares = Products(*of_step.products.unbind(1)).first_squares
        leftover_squares = torch.zeros_like(step_squares) if leftover is None else self._ranks.sum(leftover)
        in_fp8 = in_fp8._replace(products=in_fp8.products.masked_fill((leftover_squares != 0).unsqueeze(1), 0.0))
        in_fp8, loss = self._without_unknown(in_fp8, twin.loss, first_cosines < LEAST_RERUN_COSINE)

        of_layers, of_others = in_fp8.products.split([len(layers), 1])
        change_along, predicted = self._ranks.sum(twin.slope)
        lowest = in_fp8.cosines.masked_fill(first_cosines < REPRODUCED_COSINE, 1.0).min()
        scalars = {
            RERUN_COSINE: lowest if needs_rerun and not is_first else None,
            LEFTOVER_SHARE: self._leftover_share(leftover_squares, step_squares, layers),
            SLOPE: change_along / predicted,
        }
        if has_others:
            dots, fp8_squares, twin_squares = Products(*of_others.unbind(1))
            scalars[OTHERS_COSINE] = torch.where(fp8_squares == 0, 0.0, dots / (fp8_squares * twin_squares).sqrt())
        return Comparison(
            products=of_layers,
            loss_change=in_fp8.loss_change,
            loss=loss,
            has_scale=any(call.forward.is_float16 for call in calls) or _has_scale(trained),
            reproduced=first_cosines[-1] if is_first else None,
            rerun_loss=in_fp8.rerun_loss,
            scalars=scalars,
            outputs=twin.outputs,
        )

    def _without_unknown(self, in_fp8: _StepInFP8, loss: Tensor, are_unlike: Tensor) -> tuple[_StepInFP8, Tensor]:
        """Return a step and its twin's loss, the losses as means over ranks; nan in place of what is unknown.

        ``are_unlike``: of layers, of other weights and of all together, whether gradients of the first recorded step
        were not those of its FP8 rerun: these rows of the products are unknown then, or all of them and the losses.
        """
        rows_are_unlike, all_are_unlike = are_unlike[:-1], are_unlike[-1]
        products = in_fp8.products.masked_fill((rows_are_unlike | all_are_unlike).unsqueeze(1), math.nan)
        losses = in_fp8.loss_change, loss
        loss_change, loss = (self._ranks.mean(x).masked_fill(all_are_unlike, math.nan) for x in losses)
        return in_fp8._replace(products=products, loss_change=loss_change), loss

    def _run_in_fp8(
        self, calls: Sequence[Call], weights: LayerWeights, layers: Sequence[RecordedLayer], twin: Rerun
    ) -> _StepInFP8 | None:
        """Run a step again in FP8, uncounted, and compare it; return None where that failed on a rank."""
        with _not_counted(layers):
            rerun = self._run(calls, weights, own_recipes(self._model), is_twin=False)
        if rerun is None:
            return None
        with_step = self._sums.products(rerun.pairs, len(layers))
        cosines = cosines_of(torch.cat([with_step, with_step.sum(0, keepdim=True)]))
        both = zip(rerun.pairs, twin.pairs, strict=True)  # of weights that have a gradient of the step
        pairs = [(None if of_step is None else of_rerun, of_twin) for (of_step, of_rerun), (_, of_twin) in both]
        products = self._sums.products(pairs, len(layers), is_first_run_again=True)
        rerun_loss = (rerun.loss_change / twin.loss_change).abs()
        return _StepInFP8(products, twin.loss_change - rerun.loss_change, rerun_loss, cosines)

    def _run(self, calls: Sequence[Call], weights: LayerWeights, recipe: Any, is_twin: bool) -> Rerun | None:
        """Run a step again under a recipe; return None where that failed on a rank."""
        rerun = None
        with self._or_reason():
            rerun = self._runner.run(calls, weights, recipe, is_twin)
        return None if self._any_rank_has_reason() else rerun

    def _leftover_share(self, leftover: Tensor, step_squares: Tensor, layers: Sequence[RecordedLayer]) -> Tensor:
        """Return LEFTOVER_SHARE, by the squares of gradients' norms before the step's first backward, and after it."""
        assert self._optimizer is not None
        in_optimizer = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        trained_layers = [at for at, (module, _) in enumerate(layers) if id(weight_of(module)) in in_optimizer]
        of_trained = sum((leftover[at] for at in trained_layers), torch.zeros_like(leftover[0]))
        return torch.where(of_trained == 0, 0.0, (of_trained / step_squares.sum()).sqrt())


def _has_scale(trained: Sequence[Tensor]) -> bool:
    """Return whether weights are float16, or a GradScaler calls the optimizer's step, in a hook of which this is."""
    steps = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code is GradScaler.step.__code__)
    return any(p.dtype == torch.float16 for p in trained) or any(f.f_locals["self"].is_enabled() for f in steps)


def _not_counted(layers: Sequence[RecordedLayer]) -> contextlib.ExitStack:
    """Return a context in which casts are not recorded."""
    stack = contextlib.ExitStack()
    for module, counts in layers:
        observe(module, counts=None)
        stack.callback(observe, module, counts=counts)
    return stack
