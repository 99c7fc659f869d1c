"""The twin of a recorded step: its batches once more in high precision, with the same weights and random numbers.

A step's forwards of the model are noted with their arguments, random states and autocast, and the gradients that their
outputs get. Before the optimizer's update they run again with every layer in high precision, and backward begins with
the same gradients of the outputs. So weights' gradients can be compared however the loss is computed. Of a model that
returns its loss the twin has the loss itself; of others it has it to first order, by the change of the outputs times
their gradients.

That gives a step's gradients only if all that reaches the weights goes through the model's outputs, and nothing changes
a gradient before the update. So the first recorded step runs once more in FP8 too: if that gives far other gradients
than the step had, there is no twin. So do all recorded steps after one where a layer's gradient differed from the
twin's, as numbers arrive later, and all where the first one's loss was not that run's, as of weights that are moved for
the forward alone. Then that run is compared with the twin: an error of FP8 is in it, a change after backward, or of
weights, is not.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo.distributed.checkpoint import PlainModel
from octavo.distributed.ranks import Ranks
from octavo.errors import first_line
from octavo.inspect.first_batch import FirstBatch
from octavo.inspect.forwards import Forward, device_of, map_tensors, without_trace
from octavo.inspect.module_outputs import OutputChanges
from octavo.inspect.remedies import own_recipes
from octavo.inspect.rows import RecordedLayer, observe
from octavo.inspect.slope import aimed_change, changes_along, dot
from octavo.nn.convert import using
from octavo.private import hooks_after_gradients
from octavo.weights.fsdp2 import forget_failed_pass, on_this_rank, whole

LOSS = "twin_loss"  # a scalar of the record: the loss in high precision
OTHERS = "twin_cosine"  # the same: the cosine of Comparison.others
NO_TWIN = "no twin"  # the kind of an event: why no step was computed in high precision
LEFT = "left_gradient"  # the same: Comparison.left
CONTROL = "twin_control"  # the same: Comparison.control
SLOPE = "twin_slope"  # the same: Comparison.slope

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
IN_BACKWARD = "hooks take gradients as backward makes them, such as an optimizer's update in backward"
NO_OUTPUT = (
    "no gradient came through the outputs of the model that octavo.inspect.record has: give it the module that the "
    "training calls (what torch.compile returned, not the module inside; a model.compile() cannot be noted), which "
    "returns tensors, or lists, dicts or dataclasses of them"
)
OTHER_GRADIENTS = (
    "gradients reach the weights by another way than the model's outputs, or are changed before the update: its "
    "forwards run once more in FP8 have gradients whose cosine with the step's is {:.2f}"
)
WRITTEN_WEIGHTS = (
    "weights were written between the forward and the update of the optimizer that octavo.inspect.record has, such as "
    "by another optimizer: give it the one that updates first"
)
OTHER_RANK = "it failed on another rank"


class Comparison(NamedTuple):
    """The comparison of a step's gradients and loss with its twin's, on the device; losses are times the loss scale.

    Attributes:
        products: [layers, 3] float64: of a layer's weight gradients g and the twin's t, <g, t>, <g, g> and <t, t>;
            summed over ranks; 0 where a gradient of an earlier step was left, as g is then not this step's alone. Where
            the step ran once more in FP8 g is that run's.
        others: the same of all other weights together, [3], where no layer's has a gradient, as of adapters; else None.
        loss_change: the twin's loss less the step's, float64, or less that of the step's run once more in FP8; nan
            where an output was overwritten.
        loss: the twin's loss; nan where a model returns another tensor than a number.
        is_float16: whether gradients were computed in float16, where losses have a scale.
        control: in the first recorded step the cosine of all gradients with those of a run in FP8. Where it is below
            CONTROL_COSINE the numbers above are nan, in later steps too; where a layer's is, those of the layer. In
            later steps that run once more in FP8 the lowest one of a layer.
        left: the norm of gradients from before the step's first backward, of weights that the optimizer has, over the
            norm of all weights' gradients after the last.
        moved: by how much the step's run once more in FP8 changes its loss, over the change by the twin; else 0.
        slope: of the twin's first forward, see slope.py.
        outputs: by how far modules' outputs of the first recorded batch moved since the last recorded step.
    """

    products: Tensor
    others: Tensor | None
    loss_change: Tensor
    loss: Tensor
    is_float16: bool
    control: Tensor | None
    left: Tensor
    moved: Tensor
    slope: Tensor
    outputs: OutputChanges | None

    def scalars(self, loss: float | Tensor | None, loss_scale: float | Tensor | None) -> dict[str, Tensor | None]:
        """Return the record's scalars by name; ``loss``, ``loss_scale``: of the step."""
        scalars = {CONTROL: self.control, LEFT: self.left, SLOPE: self.slope}
        if self.others is not None:
            gt, gg, tt = self.others
            scalars[OTHERS] = torch.where(gg == 0, 0.0, gt / (gg * tt).sqrt())
        return scalars if loss is None else scalars | {LOSS: self._loss_beside(loss, loss_scale)}

    def _loss_beside(self, loss: float | Tensor, loss_scale: float | Tensor | None) -> Tensor:
        """Return the twin's loss beside a step's loss; nan where it needs a loss scale that is None.

        A loss that the model returns is compared by its ratio, which no scale, mean over batches or rank changes.
        """
        ratio = self.loss / (self.loss - self.loss_change)
        scale = (math.nan if self.is_float16 else 1.0) if loss_scale is None else loss_scale
        exact = torch.where((loss * ratio).isfinite(), loss * ratio, self.loss / scale)
        return torch.where(self.loss.isnan(), loss + self.loss_change / scale, exact)


class _NotedOutput:
    """A tensor that a forward returned: the gradient that it gets, and their product."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self.begins = begins  # to be called before backward changes a gradient
        self.grad: Tensor | None = None
        self.product: Tensor | float = 0.0


class _NotesGradient(torch.autograd.Function):
    """Return a tensor as it is, and note the gradient that it gets: of outside alone, as outputs may need each other.

    Not by a hook of a view: that one is left out where the view is written in place.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, output: _NotedOutput) -> Tensor:
        ctx.output = output
        ctx.save_for_backward(y.detach())  # freed with the graph
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        output, noted = ctx.output, grad.detach()
        output.begins()
        try:
            (y,) = ctx.saved_tensors
            output.product = output.product + dot(whole(y), whole(noted))
        except RuntimeError:  # it was overwritten meanwhile, perhaps by its gradient
            output.product = math.nan
        output.grad = noted if output.grad is None else output.grad + noted  # more than one backward of a graph
        return grad, None


class _Call(NamedTuple):
    """A forward of the model, and its outputs that need a gradient."""

    forward: Forward
    versions: dict[nn.Parameter, int]  # how often each was written; gathered ones by FSDP2, which are gone later
    outputs: list[_NotedOutput]


class _CallAgain(NamedTuple):
    """A call that ran again: its outputs that get a gradient, and these gradients, by place.

    ``loss``: the sum of their products, float64, which is the loss where the outputs are; ``change``: of the loss.
    """

    outputs: dict[int, Tensor]
    grads: dict[int, Tensor]
    loss: Tensor
    change: Tensor

    @property
    def sums(self) -> Tensor:
        """The change of the loss, and the loss, nan where the outputs are none: float64 [2]."""
        is_loss = all(y.numel() == 1 for y in self.outputs.values())
        return torch.stack([self.change, self.loss if is_loss else self.loss + math.nan])


_StepAndTwin = tuple[Tensor | None, Tensor | None]  # a weight's gradient of the step, and of the twin


class _RunAgain(NamedTuple):
    """The calls of a step run once more: both gradients of each layer's weight, the loss and its change.

    ``slope``: what changes_along returned; ``outputs``: what FirstBatch.run returned.
    """

    pairs: list[_StepAndTwin]
    loss_change: Tensor
    loss: Tensor
    slope: Tensor
    outputs: OutputChanges | None


class Twin:
    """Notes a recorded step's forwards, and runs them again before the optimizer's update.

    Of a step ``begin`` is called first. Then hooks of the model note its forwards, its first backward the gradients
    that are left, and a hook of the optimizer compares. ``take`` returns that at the step's end.

    Args:
        model: whose forwards are noted; they run again without DistributedDataParallel and torch.compile around it.
        optimizer: before whose update the twin runs.
        ranks: that train together.
        folder, resumes: of the record, where the first batch lies, and whether a run goes on that has one there.

    Attributes:
        reason: why there is no twin; empty if there is one.
        runs_in_fp8: whether a recorded step runs once more in FP8 too, and that run's gradients are compared.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: Ranks, folder: Path, resumes: bool) -> None:
        self.reason, self.runs_in_fp8 = "", False
        self._comparison: Comparison | None = None
        self._model, self._wrapped, self._ranks = PlainModel(model).module, model, ranks
        self._layers: Sequence[RecordedLayer] = ()
        self._calls: list[_Call] = []
        self._left: Tensor | None = None  # [layers], squares of the norms of gradients from before the first backward
        self._running: list[_Call | None] = []  # the call of each forward that runs, as one may call another
        self._hooks: list[Any] = []
        self._hooks_of_optimizer: list[Any] = []
        # cosines of the first recorded step's gradients with those of its run in FP8: layers', others', and of all
        self._control: Tensor | None = None
        self._first: FirstBatch | None = None
        self._folder, self._resumes = folder, resumes
        self._are_replicated: list[bool] | None = None  # whether all ranks have a layer's gradient, found once
        self._optimizer = hooked = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
        if not isinstance(hooked, torch.optim.Optimizer):
            self.reason = NO_OPTIMIZER
        else:
            self._hooks_of_optimizer = [hooked.register_step_pre_hook(lambda *_: self._before_update())]

    def begin(self, layers: Sequence[RecordedLayer]) -> None:
        """Note the forwards of a recorded step, from now on."""
        self.end()
        if not self.reason:
            self._layers = layers
            before = self._wrapped.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            after = self._wrapped.register_forward_hook(self._after_forward, always_call=True)
            self._hooks = [before, after]

    def arrived(self, products: Tensor, moved: Tensor) -> None:
        """Run later steps in FP8 too where a layer's gradient is unlike its twin's, or the loss not its run's in FP8.

        ``products``, ``moved``: Comparison's, on the CPU.
        """
        self.runs_in_fp8 |= bool((_cosines(products) < DIFFERING_COSINE).any()) or float(moved) > MOVED_LOSS

    def take(self) -> Comparison | None:
        """End a step; return what its twin found, or None where none ran."""
        self.end()
        comparison, self._comparison = self._comparison, None
        return comparison

    def end(self) -> None:
        """Note no more forwards, and forget those that were noted."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._calls, self._running, self._layers, self._left = [], [], [], (), None

    def close(self) -> None:
        """Leave model and optimizer alone."""
        self.end()
        for hook in self._hooks_of_optimizer:
            hook.remove()

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        call, model = None, self._model
        if torch.is_grad_enabled() and hooks_after_gradients(()) is not None and not self._running:
            with self._or_reason():
                call = _Call(Forward.of(model, args, kwargs), _versions(model), [])
        self._running.append(call)

    def _after_forward(self, _: nn.Module, args: Any, result: Any) -> Any:
        if torch.compiler.is_compiling() or not self._running or (call := self._running.pop()) is None:
            return None
        self._calls.append(call)

        def noted(y: Tensor) -> Tensor:
            if not _is_noted(y):
                return y
            call.outputs.append(output := _NotedOutput(self._note_left))
            return cast(Tensor, _NotesGradient.apply(y, output))

        with self._or_reason():
            return map_tensors(noted, result)
        return None

    @contextlib.contextmanager
    def _or_reason(self) -> Iterator[None]:
        """Note an error of the twin as the reason why there is none: the training goes on."""
        try:
            yield
        except Exception as error:
            if not forget_failed_pass(self._model):
                raise
            self.reason = f"the twin failed: {type(error).__name__}: {first_line(error)}"

    def _note_left(self) -> None:
        """Note the gradients that are there before the step's first backward."""
        if self._left is None:
            self._left = self._squares([module.weight_parameter.grad for module, _ in self._layers])

    def _before_update(self) -> None:
        """Compare the step with its twin before the optimizer's update, and note the comparison for ``take``."""
        if torch.compiler.is_compiling() or not self._hooks:
            return
        if device_of(self._model).type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        calls = [call for call in self._calls if any(output.grad is not None for output in call.outputs)]
        left, layers = self._left, self._layers
        if not (trained := [p for p in self._model.parameters() if p.grad is not None]):
            if calls:
                self.reason = self.reason or IN_BACKWARD
            return  # such as an update before the first step that makes the optimizer's state
        self.end()
        self.reason = self._reason_against(calls, trained)
        if not self._has_reason():
            self._comparison = self._compared(calls, layers, trained, left)

    def _compared(
        self, calls: list[_Call], layers: Sequence[RecordedLayer], trained: Sequence[Tensor], left: Tensor | None
    ) -> Comparison | None:
        """Run a step's twin, and its control where one is needed; return the comparison, None where a run failed."""
        weights: list[Tensor] = [module.weight_parameter for module, _ in layers]
        has_others = all(weight.grad is None for weight in weights)
        weights += trained if has_others else []
        if (twin := self._run(calls, weights, recipes.high_precision(), is_twin=True)) is None:
            return None
        products, loss_change = self._products(twin.pairs, len(layers)), twin.loss_change
        squares_left = torch.zeros_like(products[:-1, 1]) if left is None else self._ranks.sum(left)
        share_left = self._share_left(squares_left, products, layers)
        lowest, moved = None, torch.zeros_like(loss_change)
        if self._ranks.any(self._control is None or self.runs_in_fp8):
            with _not_counted(layers):
                control = self._run(calls, weights, own_recipes(self._model))
            if control is None:
                return None
            lowest = self._lowest_cosine(self._products(control.pairs, len(layers)))
            products = self._products(_run_pairs(control, twin), len(layers), are_runs=True)
            moved = (control.loss_change / loss_change).abs()
            loss_change = loss_change - control.loss_change
        assert self._control is not None
        is_unlike = self._control < CONTROL_COSINE  # where the runs do not give the step's gradients nothing is known
        products[:-1].masked_fill_(squares_left.unsqueeze(1) != 0, 0.0)
        products.masked_fill_((is_unlike[:-1] | is_unlike[-1]).unsqueeze(1), math.nan)
        loss_change, loss = (self._ranks.mean(x).masked_fill(is_unlike[-1], math.nan) for x in (loss_change, twin.loss))
        change_along, predicted = self._ranks.sum(twin.slope)
        return Comparison(
            products=products[:-1],
            others=products[-1] if has_others else None,
            loss_change=loss_change,
            loss=loss,
            is_float16=any(call.forward.is_float16 for call in calls),
            control=lowest,
            left=share_left,
            moved=moved,
            slope=change_along / predicted,
            outputs=twin.outputs,
        )

    def _reason_against(self, calls: Sequence[_Call], trained: Sequence[Tensor]) -> str:
        """Return why this step has no twin; empty if it has one."""
        if any(type(on_this_rank(p.grad)) is not Tensor for p in trained if p.grad is not None):
            return IN_BACKWARD
        if not calls:
            return self.reason or NO_OUTPUT
        versions = _versions(self._model)
        is_written = any(versions.get(parameter, count) != count for parameter, count in calls[0].versions.items())
        return WRITTEN_WEIGHTS if is_written else self.reason

    def _lowest_cosine(self, products: Tensor) -> Tensor:
        """Return Comparison.control, from the products of gradients with those of the step's run once more in FP8."""
        cosines = _cosines(torch.cat([products, products.sum(0, keepdim=True)]))
        if self._control is None:
            self._control = cosines
            return cosines[-1]
        return cosines.masked_fill(self._control < REPRODUCED_COSINE, 1.0).min()

    def _share_left(self, squares: Tensor, products: Tensor, layers: Sequence[RecordedLayer]) -> Tensor:
        """Return Comparison.left, of the squares of the norms of gradients from before the step's first backward."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        places = [place for place, (module, _) in enumerate(layers) if id(module.weight_parameter) in trained]
        left_of_trained = sum((squares[place] for place in places), torch.zeros_like(squares[0]))
        return torch.where(left_of_trained == 0, 0.0, (left_of_trained / products[:, 1].sum()).sqrt())

    def _has_reason(self) -> bool:
        """Return whether a rank has a reason for no twin; then all have one."""
        if self._ranks.any(bool(self.reason)):
            self.reason = self.reason or OTHER_RANK
        return bool(self.reason)

    def _run(self, calls: list[_Call], weights: list[Tensor], recipe: Any, is_twin: bool = False) -> _RunAgain | None:
        """Run forwards and their backwards again under a recipe; return None where that failed on a rank.

        Before the twin's the first recorded batch runs: their backwards reshard what FSDP2 gathers for it.
        """
        run = None
        with self._or_reason():
            with without_trace(self._model) as gradients, using(self._model, recipe):
                outputs = self._run_first_batch(calls[0].forward) if is_twin else None
                first = self._call_again(calls[0])
                slope = self._slope(calls[0], first) if is_twin else first.loss.new_zeros(2)
                sums = first.sums
                del first  # its outputs are not held while other calls run
                for call in calls[1:]:
                    sums = sums + self._call_again(call).sums
                pairs = [(gradients.get(weight), weight.grad) for weight in weights]
            run = _RunAgain(pairs, sums[0], sums[1], slope, outputs)
        return None if self._has_reason() else run

    def _run_first_batch(self, forward: Forward) -> OutputChanges | None:
        """Run the first recorded batch in a forward's modes; return how far outputs moved since the last run."""
        if self._first is None or not self._first.is_of(self._model):
            self._first = FirstBatch(self._model, forward, self._ranks, self._folder, self._resumes)
        return self._first.run(forward.modes)

    def _call_again(self, call: _Call) -> _CallAgain:
        """Run a forward and its backward again."""
        with torch.enable_grad():
            outputs = call.forward.again(self._model)
        places = [place for place, y in enumerate(outputs) if _is_noted(y)]
        noted = dict(zip(places, call.outputs, strict=True))
        grads = {place: output.grad for place, output in noted.items() if output.grad is not None}
        torch.autograd.backward([outputs[place] for place in grads], [*grads.values()])
        loss = _loss(outputs, grads)
        change = loss - sum(noted[place].product for place in grads)
        return _CallAgain({place: outputs[place].detach() for place in grads}, grads, loss, change)

    def _slope(self, call: _Call, again: _CallAgain) -> Tensor:
        """Return changes_along of a call that ran again, and whose weights have their gradients."""
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        is_float32 = dtypes == {torch.float32} and not (call.forward.autocast and call.forward.autocast.enabled)
        pairs = [(whole(y), whole(again.grads[place])) for place, y in again.outputs.items()]
        aim = torch.stack([aimed_change(y, grad, is_float32) for y, grad in pairs]).sum()
        return changes_along(
            self._model, self._ranks, aim, lambda: _loss(call.forward.again(self._model), again.grads) - again.loss
        )

    def _products(self, pairs: Sequence[_StepAndTwin], layers: int, are_runs: bool = False) -> Tensor:
        """Return <g, t>, <g, g> and <t, t>, summed over ranks: of layers' gradients, and of all others together.

        float64 [layers + 1, 3]; ``are_runs``: g is of a run again too.
        """
        replicated_pairs = zip(pairs, self._replicated(pairs), strict=True)
        products = self._ranks.sum(torch.stack([self._products_of(*each, are_runs) for each in replicated_pairs]))
        return torch.cat([products[:layers], products[layers:].sum(0, keepdim=True)])

    def _replicated(self, pairs: Sequence[_StepAndTwin]) -> list[bool]:
        """Return whether all ranks have the same gradient of a weight, as under DDP, found once: it is a mean then."""
        if self._ranks.size == 1:
            return [False] * len(pairs)
        if self._are_replicated is None or len(self._are_replicated) != len(pairs):
            squares = self._squares([grad for grad, _ in pairs])
            largest, least = self._ranks.largest(squares), -self._ranks.largest(-squares)
            self._are_replicated = [bool(each) for each in ((largest == least) & (largest > 0)).tolist()]
        return self._are_replicated

    def _squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the squares of the norms of this rank's gradients, 0 where there is none: float64 [gradients]."""
        zero = torch.zeros((), dtype=torch.float64, device=device_of(self._model))
        local = [None if grad is None else on_this_rank(grad) for grad in gradients]
        return torch.stack([zero if grad is None else dot(grad, grad) for grad in local])

    def _products_of(self, pair: _StepAndTwin, is_replicated: bool, are_runs: bool) -> Tensor:
        """Return <g, t>, <g, g> and <t, t> of a weight's gradients, float64 [3]."""
        grad, twin = pair
        if grad is None or twin is None:
            return torch.zeros(3, dtype=torch.float64, device=device_of(self._model))
        g, t = on_this_rank(grad).float(), on_this_rank(twin).float()
        t = self._ranks.mean(t) if is_replicated else t
        g = self._ranks.mean(g) if is_replicated and are_runs else g
        return torch.stack([dot(g, t), dot(g, g), dot(t, t)])


def _loss(outputs: Sequence[Tensor] | dict[int, Tensor], grads: dict[int, Tensor]) -> Tensor:
    """Return the sum of products of outputs and their gradients, float64: the loss, to first order."""
    return torch.stack([dot(whole(outputs[place].detach()), whole(grad)) for place, grad in grads.items()]).sum()


@contextlib.contextmanager
def _not_counted(layers: Sequence[RecordedLayer]) -> Iterator[None]:
    """Run a block whose casts are not recorded."""
    for module, _ in layers:
        observe(module, counts=None)
    try:
        yield
    finally:
        for module, counts in layers:
            observe(module, counts=counts)


def _run_pairs(control: _RunAgain, twin: _RunAgain) -> list[_StepAndTwin]:
    """Return the gradients of both runs, of each weight that has one of the step."""
    each = zip(control.pairs, twin.pairs, strict=True)
    return [(None if of_step is None else again, exact) for (of_step, again), (_, exact) in each]


def _cosines(products: Tensor) -> Tensor:
    """Return cosines by <g, t>, <g, g> and <t, t> [pairs, 3]; 0 where one is 0; 1 of two zeros, inf or NaN."""
    gt, gg, tt = products.unbind(1)
    return (gt / (gg * tt).sqrt()).nan_to_num(1.0).masked_fill((gg == 0) != (tt == 0), 0.0)


def _is_noted(y: Tensor) -> bool:
    return y.requires_grad and not y.is_leaf


def _versions(model: nn.Module) -> dict[nn.Parameter, int]:
    return {parameter: parameter._version for parameter in model.parameters()}
