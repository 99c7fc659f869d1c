"""The twin of a recorded step: its batches once more in high precision, with the same weights and random numbers.

A step's forwards of the model are noted with their arguments, random states and autocast, and the gradients that their
outputs get (notes.py). Before the optimizer's update they run again with every layer in high precision, and backward
begins with the same gradients of the outputs. So weights' gradients can be compared however the loss is computed
(products.py). Of a model that returns its loss the twin has the loss itself; of others it has it to first order, by the
change of the outputs times their gradients.

That gives a step's gradients only if all that reaches the weights goes through the model's outputs, and nothing changes
a gradient before the update. So the first recorded step runs once more in FP8 too: if that gives far other gradients
than the step had, there is no twin. Later recorded steps run once more in FP8 too, once either has happened: a layer's
gradient differed from its twin's, which the host learns some steps later; or a step's loss was not that of its FP8
re-run, as when weights are moved for the forward alone. Then that run is compared with the twin: an error of FP8 is in
it, a change after backward, or of weights, is not.

Before that a part of the first recorded batch runs again, in high precision too (first_batch.py). So in each recorded
step modules compute the same batch, and where one computes something else of the same input than in the step before,
or backward another gradient, the program changed, and neither the data nor the labels. After the first backward the
same forward runs from weights that are moved along the gradients: whether the loss falls as these say tells if backward
is that of the forward (slope.py).

The twin leaves no trace: gradients, buffers, modules' attributes, random states and what octavo keeps are as before.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from octavo import recipes
from octavo.distributed.ranks import Ranks
from octavo.errors import first_line
from octavo.inspect.first_batch import FirstBatch
from octavo.inspect.forwards import Forward, backward, device_of, without_trace
from octavo.inspect.module_outputs import OutputChanges
from octavo.inspect.notes import Call, StepNotes, gets_gradient
from octavo.inspect.products import GradientPair, RankSums, cosines_of
from octavo.inspect.remedies import own_recipes
from octavo.inspect.rows import RecordedLayer, observe
from octavo.inspect.slope import aimed_change, changes_along, dot
from octavo.inspect.weight_updates import hook_before_update, torch_optimizer
from octavo.nn.convert import using
from octavo.weights.fsdp2 import forget_failed_pass, on_this_rank, whole
from octavo.weights.operands import weight_of

TWIN_LOSS = "twin_loss"  # a scalar of the record: the loss in high precision
# the same: the cosine of all weights' gradients with the twin's, where no layer's weight has one, as of adapters
OTHERS = "twin_cosine"
# the same: the norm of gradients from before the step's first backward, of weights that the optimizer has, over the
# norm of all weights' gradients after the last
LEFT = "left_gradient"
# the same: the lowest cosine of a layer's gradients with those of the step's run once more in FP8, in later steps
CONTROL = "twin_control"
SLOPE = "twin_slope"  # the same: of the twin's first forward, see slope.py
NO_TWIN = "no twin"  # the kind of an event: why no step was computed in high precision

# --- limits, of cosines of gradients as the optimizer gets them, and chosen by `python -m benchmarks causes`

# With the gradients of the step's run once more in FP8: of all weights, or of a layer, in the first recorded step.
# Below the first, these are not the step's gradients; below the other a part of them comes by another way than the
# model's outputs, and in later steps a low cosine proves nothing. A run that changes nothing has the same bits: 1.
CONTROL_COSINE, REPRODUCED_COSINE = 0.8, 0.99
# With the twin's, of a layer in a step. Below it FP8 differs, and later steps run once more in FP8, with their scales.
# In the benchmark's 78 healthy runs with twins the third least of five in turn is at least 0.949, or of four bits 0.924
DIFFERING_COSINE = 0.95
# |loss of the run once more in FP8, less the step's| over |the twin's, less the step's|: beyond it, outputs were of
# other weights
MOVED_LOSS = 0.1

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
OTHER_RANK = "it failed on another rank"

_LayerWeights = Sequence[Tensor | None]  # None of a layer whose weight is computed or gone


class DeviceEvent(NamedTuple):
    """An event that is recorded if a number says so that arrives from the device; that number is no scalar.

    Attributes:
        kind, text: of the event; "{}" in the text stands for the number.
        happened: whether the number says so.
    """

    kind: str
    text: str
    happened: Callable[[float], bool]


OTHER_GRADIENTS = DeviceEvent(  # its number is Comparison.reproduced
    NO_TWIN,
    "gradients reach the weights by another way than the model's outputs, or are changed before the update: its "
    "forwards run once more in FP8 have gradients whose cosine with the step's is {:.2f}",
    lambda cosine: cosine < CONTROL_COSINE,
)


class Comparison(NamedTuple):
    """The comparison of a step's gradients and loss with its twin's, on the device; losses are times the loss scale.

    Attributes:
        products: [layers, 3] float64: of the step's gradients, or of the step's run once more in FP8 where there is
            one, and the twin's; see products.py.
        loss_change: the twin's loss less the step's, float64, or less that of the step's run once more in FP8; nan
            where an output was overwritten.
        loss: the twin's loss; nan where a model returns another tensor than a number.
        has_scale: whether backward probably began from a loss times a scale: in float16, or with a GradScaler.
        reproduced: in the first recorded step of these layers the cosine of all gradients with those of a run in FP8.
            Where it is below CONTROL_COSINE the numbers above are nan, in later steps too; where a layer's is, those
            of the layer.
        control_loss_ratio: |loss of the run once more in FP8 - the step's| / |the twin's - the step's|; 0 without one.
        scalars: by OTHERS, LEFT, CONTROL and SLOPE; None where the step has no such number.
        outputs: by how far modules' outputs of the first recorded batch moved since the last recorded step.
    """

    products: Tensor
    loss_change: Tensor
    loss: Tensor
    has_scale: bool
    reproduced: Tensor | None
    control_loss_ratio: Tensor
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


class _RunAgain(NamedTuple):
    """The calls of a step run once more: both gradients of each layer's weight, the loss and its change.

    ``slope``: what changes_along returned; ``outputs``: what FirstBatch.run returned.
    """

    pairs: list[GradientPair]
    loss_change: Tensor
    loss: Tensor
    slope: Tensor
    outputs: OutputChanges | None


class _StepInFP8(NamedTuple):
    """A step in FP8 compared with its twin: the step itself, or its control.

    Attributes:
        products: of these gradients and the twin's, [layers + 1, 3].
        loss_change: the twin's loss less this one.
        control_loss_ratio: Comparison.control_loss_ratio.
        cosines: of the step's gradients and these: of layers, of others, and of all gradients together, [layers + 2];
            a single 1 for the step itself.
    """

    products: Tensor
    loss_change: Tensor
    control_loss_ratio: Tensor
    cosines: Tensor


class Twin:
    """Runs the forwards of a recorded step again before the optimizer's update, and compares.

    The control is the step's run once more in FP8. A recorded step, in order:

        begin            hooks of the model note its forwards, from now on
        forward          its arguments, random states and autocast are noted, and its outputs get a node of autograd
        first backward   before it changes a gradient, the norms of those that are left of earlier steps are noted
        each backward    the outputs' gradients are noted
        before update    a hook of the optimizer decides whether the step has a twin, and runs on the device
                         1. in high precision a part of the first recorded batch, forward and backward,
                         2. in high precision the step's forwards, each with its backward; after the first one's the
                            slope: its forward from moved weights,
                         3. in FP8 the step's forwards again, with their backwards, if the step needs a control.
                         The first control's cosines stay on the device, where they mask the numbers of all steps
        after update     ``take`` hands the Comparison to the recorder, which sends it to the host
        a later step     the host has it: ``arrived`` lets all recorded steps from then on have a control, if a layer's
                         gradient is unlike its twin's, or the loss not its control's; and the recorder writes it

    Args:
        model: whose forwards are noted; they run again without DistributedDataParallel and torch.compile around it.
        optimizer: before whose update the twin runs.
        ranks: that train together.
        folder, resumes: of the record, where the first batch lies, and whether a run goes on that has one there.

    Attributes:
        reason: why there is no twin; empty if there is one.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks, folder: Path, resumes: bool) -> None:
        self._comparison: Comparison | None = None
        self._notes, self._ranks = StepNotes(model, self._note_left, self._or_reason), ranks
        self._model = self._notes.model
        # ``_needs_controls``: whether later steps need a control, as a Comparison says that arrived
        self._sums, self._needs_controls = RankSums(self._model, ranks), False
        self._first_cosines: Tensor | None = None  # of the gradients of these modules' first step and its control's
        self._modules: list[nn.Module] = []  # of the layers of the last recorded step
        self._layers: Sequence[RecordedLayer] = ()
        self._left: Tensor | None = None  # squares of norms of gradients from before the first backward, [layers + 1]
        self._first_batch: FirstBatch | None = None
        self._folder, self._resumes = folder, resumes
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

    def arrived(self, products: Tensor, control_loss_ratio: Tensor) -> None:
        """Let later steps have a control if a layer's gradient is unlike its twin's, or the loss not its control's.

        ``products``, ``control_loss_ratio``: a Comparison's, on the CPU.
        """
        differs = (cosines_of(products) < DIFFERING_COSINE).any()
        self._needs_controls |= bool(differs | (control_loss_ratio > MOVED_LOSS))

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        self._notes.end()
        self._layers, self._left = (), None

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

    def _note_left(self) -> None:
        """Note the gradients that are there before the step's first backward."""
        if self._left is None:
            try:
                of_layers = (getattr(weight_of(module), "grad", None) for module, _ in self._layers)
                self._left = self._sums.squares([*of_layers, None])  # those of other weights are not noted
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
        left, layers = self._left, self._layers
        with_gradient = [p for p in self._model.parameters() if p.grad is not None]
        if not with_gradient:
            if calls:
                self.reason = self.reason or IN_BACKWARD
            return  # such as an update before the first step that makes the optimizer's state
        self.end()
        self.reason = self._reason_against(calls, with_gradient)
        if self._has_reason():
            return
        comparison = None
        with self._or_reason():
            comparison = self._compared(calls, layers, with_gradient, left)
        self._comparison = None if self._has_reason() else comparison

    def _compared(
        self, calls: list[Call], layers: Sequence[RecordedLayer], with_gradient: Sequence[Tensor], left: Tensor | None
    ) -> Comparison | None:
        """Run a step's twin, and its control where one is needed; return the comparison, None where a run failed."""
        weights: _LayerWeights = [weight_of(module) for module, _ in layers]
        has_others = all(weight is None or weight.grad is None for weight in weights)
        weights = [*weights, *with_gradient] if has_others else weights
        if (twin := self._run(calls, weights, recipes.high_precision(), is_twin=True)) is None:
            return None
        zero, one = torch.zeros_like(twin.loss_change), torch.ones_like(twin.loss_change)  # the step is like itself
        of_step = _StepInFP8(self._sums.products(twin.pairs, len(layers)), twin.loss_change, zero, one)
        squares_left = torch.zeros_like(of_step.products[:, 1]) if left is None else self._ranks.sum(left)

        is_first = self._first_cosines is None
        needs_control = self._ranks.any(is_first or self._needs_controls)
        if (fp8 := self._run_control(calls, weights, layers, twin) if needs_control else of_step) is None:
            return None
        if self._first_cosines is None:
            self._first_cosines = fp8.cosines
        first_cosines = self._first_cosines
        lowest = fp8.cosines.masked_fill(first_cosines < REPRODUCED_COSINE, 1.0).min()

        # nan where the first recorded step's gradients were not its control's, as what is compared is unknown then
        is_unlike = first_cosines < CONTROL_COSINE
        known = fp8.products.masked_fill(squares_left.unsqueeze(1) != 0, 0.0)
        known = known.masked_fill((is_unlike[:-1] | is_unlike[-1]).unsqueeze(1), math.nan)
        change, loss = (self._ranks.mean(x).masked_fill(is_unlike[-1], math.nan) for x in (fp8.loss_change, twin.loss))
        change_along, predicted = self._ranks.sum(twin.slope)
        scalars = {
            CONTROL: lowest if needs_control and not is_first else None,
            LEFT: self._share_left(squares_left, of_step.products, layers),
            SLOPE: change_along / predicted,
        }
        if has_others:
            product, of_fp8, of_twin = known[-1]
            scalars[OTHERS] = torch.where(of_fp8 == 0, 0.0, product / (of_fp8 * of_twin).sqrt())
        return Comparison(
            products=known[:-1],
            loss_change=change,
            loss=loss,
            has_scale=any(call.forward.is_float16 for call in calls) or _has_scale(with_gradient),
            reproduced=first_cosines[-1] if is_first else None,
            control_loss_ratio=fp8.control_loss_ratio,
            scalars=scalars,
            outputs=twin.outputs,
        )

    def _run_control(
        self, calls: list[Call], weights: _LayerWeights, layers: Sequence[RecordedLayer], twin: _RunAgain
    ) -> _StepInFP8 | None:
        """Run a step's control, uncounted, and compare it; return None where that failed on a rank."""
        with _not_counted(layers):
            run = self._run(calls, weights, own_recipes(self._model))
        if run is None:
            return None
        beside_step = self._sums.products(run.pairs, len(layers))
        cosines = cosines_of(torch.cat([beside_step, beside_step.sum(0, keepdim=True)]))
        both = zip(run.pairs, twin.pairs, strict=True)  # of weights that have a gradient of the step
        pairs = [(None if of_step is None else of_control, of_twin) for (of_step, of_control), (_, of_twin) in both]
        products = self._sums.products(pairs, len(layers), is_first_run_again=True)
        control_loss_ratio = (run.loss_change / twin.loss_change).abs()
        return _StepInFP8(products, twin.loss_change - run.loss_change, control_loss_ratio, cosines)

    def _reason_against(self, calls: Sequence[Call], with_gradient: Sequence[Tensor]) -> str:
        """Return why this step has no twin; empty if it has one."""
        if any(type(on_this_rank(p.grad)) is not Tensor for p in with_gradient if p.grad is not None):
            return IN_BACKWARD
        if not calls:
            return self.reason or NO_OUTPUT
        return WRITTEN_WEIGHTS if calls[0].weights_written_since(self._model) else self.reason

    def _share_left(self, squares: Tensor, products: Tensor, layers: Sequence[RecordedLayer]) -> Tensor:
        """Return LEFT, by the squares of gradients' norms before the step's first backward."""
        assert self._optimizer is not None
        in_optimizer = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        trained_layers = [at for at, (module, _) in enumerate(layers) if id(weight_of(module)) in in_optimizer]
        left_of_trained = sum((squares[at] for at in trained_layers), torch.zeros_like(squares[0]))
        return torch.where(left_of_trained == 0, 0.0, (left_of_trained / products[:, 1].sum()).sqrt())

    def _has_reason(self) -> bool:
        """Return whether a rank has a reason for no twin; then all have one."""
        if self._ranks.any(bool(self.reason)):
            self.reason = self.reason or OTHER_RANK
        return bool(self.reason)

    def _run(self, calls: list[Call], weights: _LayerWeights, recipe: Any, is_twin: bool = False) -> _RunAgain | None:
        """Run forwards and their backwards again under a recipe; return None where that failed on a rank.

        Before the twin's the first recorded batch runs: their backwards reshard what FSDP2 gathers for it.
        """
        run = None
        with self._or_reason():
            with without_trace(self._model) as gradients, using(self._model, recipe):
                outputs = self._run_first_batch(calls[0].forward) if is_twin else None
                sums, slope = self._call_again(calls[0], is_twin)
                for call in calls[1:]:
                    sums = sums + self._call_again(call)[0]
                pairs = [(None, None) if w is None else (gradients.get(w), w.grad) for w in weights]
            run = _RunAgain(pairs, sums[0], sums[1], slope, outputs)
        return None if self._has_reason() else run

    def _run_first_batch(self, forward: Forward) -> OutputChanges | None:
        """Run the first recorded batch in a forward's modes; return how far outputs moved since the last run."""
        if self._first_batch is None or not self._first_batch.outputs.is_of(self._model):
            self._first_batch = FirstBatch(self._model, forward, self._ranks, self._folder, self._resumes)
        return self._first_batch.run(forward.modes)

    def _call_again(self, call: Call, has_slope: bool = False) -> tuple[Tensor, Tensor]:
        """Run a forward and its backward again; return two tensors, float64 [2].

        The first is the change of the loss, and the loss, nan where the outputs are none. The other one is what
        changes_along returns, of a step's first call (``has_slope``), as weights have its gradients alone; else 0.
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
        change = loss - sum(noted[place].product for place in grads)
        others = [whole(grads[place]).any() for place, y in outputs.items() if y.numel() > 1]  # if the loss is not all
        sums = torch.stack([change, loss.masked_fill(torch.stack(others).any(), math.nan) if others else loss])
        return sums, self._slope(call, outputs, grads, loss) if has_slope else torch.zeros_like(sums)

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
