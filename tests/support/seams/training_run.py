"""A feature's model in training, or a twin of it, and its trace.

A situation's program is written once, for the library and for the twins: what only the library meets (a wrapper,
recomputation) it does under ``if run.is_library``. A twin on ranks has the whole model on each, but for a pipeline's:
where each has a batch of its own, with delayed state of its own, gradients are averaged by hand; else each is alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import octavo
from octavo.weights.stored import StoredWeight, local_stored
from tests.support.seams.twins import TwinLinear, casts_of, twin_of
from tests.support.sharded_weights import whole_stored

if TYPE_CHECKING:
    from tests.support.seams.features import Feature

Role = Literal["library", "twin", "twin that forgets", "float64"]
TOKENS, WIDTH, STEPS = 16, 256, 3


def nothing(*_: Any) -> None:
    """A hook that does nothing."""


class TrainingRun:
    """A model, its optimizer and their trace.

    Attributes:
        model: the feature's; its parts are ``model[0]`` and ``model[1]``, each [T, WIDTH] to [T, WIDTH].
        call: what computes: the model, or what a program has wrapped it in.
        mesh: of a situation on ranks.
        tokens: of a batch.
        trace: outputs, inputs' gradients, weights by name; see ``note``.
        batch: which batch of a step is this rank's; see ``divide``.
        scale: of the loss, for its gradients.
        extra: what the feature has besides, once training has begun.
    """

    def __init__(self, feature: Feature, role: Role, mesh: Any = None) -> None:
        self.feature, self.role, self.mesh = feature, role, mesh
        self.is_library, self.is_twin = role == "library", role in ("twin", "twin that forgets")
        self.trace: dict[str, Tensor] = {}
        self.closing = contextlib.ExitStack()
        self.step_number = self.begun_at = 0
        self.divide(mesh)
        self.scale, self.tokens, self.extra = 1.0, TOKENS, None
        self.take(self.converted(self.plain()))

    # --- making -------------------------------------------------------------------------------------------------------

    def plain(self) -> nn.Module:
        """The feature's model before octavo, with the same values each time."""
        torch.manual_seed(0)
        return self.feature.plain()

    def set_recipe(self, recipe: octavo.Recipe) -> None:
        """Set another recipe from the next forward on."""
        if self.is_library:
            octavo.set_recipe(self.model, recipe)
        for casts in casts_of(self.model) if self.is_twin else ():
            casts.set(recipe)

    @contextlib.contextmanager
    def using(self, recipe: octavo.Recipe) -> Iterator[None]:
        """A block under another recipe, after which all is as before it."""
        with contextlib.ExitStack() as stack:
            if self.is_library:
                stack.enter_context(octavo.using(self.model, recipe))
            for casts in casts_of(self.model) if self.is_twin else ():
                stack.enter_context(casts.using(recipe))
            yield

    def converted(self, plain: nn.Module) -> nn.Module:
        """Return the feature's conversion of its plain model, or a twin of it."""
        model = self.feature.convert(plain)
        return model if self.is_library else twin_of(model, exact=self.role == "float64")

    def take(self, model: nn.Module) -> None:
        """Go on with this model, which has no optimizer yet."""
        self.model: Any = model
        self.call: Any = model
        for casts in casts_of(model):
            casts.forgets = self.role == "twin that forgets"
        self.optimizers: list[Any] = []

    def begin(self, optimizers: Callable[[Any], list[Any]] | None = None) -> None:
        """Make the optimizer and the feature's other objects; a program may give several optimizers, of the groups.

        ``optimizers`` is called with a function that makes the feature's optimizer of parameters.
        """

        def make(parameters: Any) -> Any:
            return self.feature.optimizer(self, [p for p in parameters if p.requires_grad])

        self.begun_at = self.step_number
        self.optimizers = [make(self.model.parameters())] if optimizers is None else optimizers(make)
        if self.is_library:
            self.feature.begin(self)
        elif self.is_twin:
            self.feature.twin_stepped(self, 0)

    # --- ranks --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else torch.distributed.get_rank()

    def divide(self, mesh: Any) -> None:
        """Give each rank of this mesh a batch of its own; None: all have the same."""
        self.data_mesh, self.group = mesh, None
        if mesh is not None:
            self.group = mesh.get_group() if mesh.ndim == 1 else torch.distributed.group.WORLD
        self.batch = 0 if mesh is None else mesh.get_rank() if mesh.ndim > 1 else mesh.get_local_rank()

    def average(self) -> None:
        """A twin's gradients become their mean over ranks, added up as replicas of shards are."""
        for p in self.with_gradients() if self.data_mesh is not None and not self.is_library else ():
            parts = [torch.empty_like(p.grad) for _ in range(self.data_mesh.size())]
            torch.distributed.all_gather(parts, p.grad, group=self.group)
            while len(parts) > 1:
                parts = [parts[at] + parts[at + 1] for at in range(0, len(parts), 2)]
            p.grad = parts[0] / self.data_mesh.size()

    # --- training -----------------------------------------------------------------------------------------------------

    def with_gradients(self) -> list[Any]:
        """The parameters that have one."""
        return [p for p in self.model.parameters() if p.grad is not None]

    def data(self, step: int, micro: int = 0, rank: int = 0) -> Tensor:
        """A batch [T, WIDTH]; the second rank's is larger."""
        generator = torch.Generator("cpu").manual_seed(1000 * step + 10 * micro + rank)
        x = torch.randn(self.tokens, WIDTH, generator=generator, dtype=torch.float32, device="cpu")
        x *= 1 + 3 * rank
        return x.to(torch.float64 if self.role == "float64" else self.feature.dtype)

    def loss(self, y: Tensor) -> Tensor:
        return (y.to(torch.float64 if self.role == "float64" else torch.float32)).square().mean() * self.scale

    def note(self, name: str, tensor: Tensor | None) -> None:
        """Put a tensor into the trace."""
        if tensor is not None:
            self.trace[name] = tensor.detach().clone()

    def forward(self, name: str, x: Tensor, call: Any = None) -> tuple[Tensor, Tensor]:
        """Return (the input as a leaf, the output), noted under ``name``."""
        x = x.clone().requires_grad_()
        y = (self.call if call is None else call)(x)
        self.note(f"output {name}", y)
        return x, y

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        """Accumulate around a backward; ``more``: others of its step follow."""
        with contextlib.ExitStack() as stack:
            for one in self.feature.accumulate(self) if more and self.is_library else ():
                stack.enter_context(one.accumulate())
            yield

    def gradients(
        self,
        micro: int = 1,
        call: Any = None,
        backward: Callable[[Tensor], Any] | None = None,
        before: Callable[[int], Any] = nothing,
        after: Callable[[int], Any] = nothing,
        complete: Callable[[], Any] = nothing,
        seed: int | None = None,
    ) -> None:
        """A step's gradients, averaged over ranks.

        Args:
            micro: the number of micro-batches.
            backward: called with each output, in place of the loss's.
            before: called with each micro-batch's number, as ``after`` is.
            complete: called when they are averaged.
            seed: of the batches, or else the step's number.
        """
        step = self.step_number if seed is None else seed
        for number in range(micro):
            before(number)
            name = f"{step}.{number}" + (f" of rank {self.batch}" if self.mesh is not None else "")
            with self.accumulating(more=number < micro - 1):
                x, y = self.forward(name, self.data(step, number, self.batch), call)
                self.loss(y).backward() if backward is None else backward(y)
            self.note(f"input's gradient {name}", x.grad)
            after(number)
        self.average()
        complete()
        self.round()

    def round(self) -> None:
        """A twin's gradients are as the feature stores them."""
        if self.is_twin:
            self.feature.rounded(self)

    def update(self, zero_to_none: bool = True, by: Any = None) -> None:
        """Step the optimizers, ``by`` a GradScaler or themselves; then let the feature follow, and zero_grad."""
        for optimizer in self.optimizers:
            optimizer.step() if by is None else by(optimizer)
        self.step_number += 1
        for casts in () if self.is_library else casts_of(self.model):
            casts.end_step()
        if self.is_library:
            self.feature.stepped(self)
        elif self.is_twin:
            self.feature.twin_stepped(self, self.step_number - self.begun_at)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=zero_to_none)

    def train(self, steps: int = STEPS, zero_to_none: bool = True, by: Any = None, **how: Any) -> None:
        """Train some steps, with the optimizer made before the first; ``how``: see ``gradients``."""
        if not self.optimizers:
            self.begin()
        for _ in range(steps):
            self.gradients(**how)
            self.update(zero_to_none, by)

    def train_scaled(self, overflows: bool = False) -> None:
        """Train by a GradScaler; a twin's gradients are divided by hand. ``overflows``: a first step, which is
        skipped.
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.scale = scaler.scale(torch.ones(()))

        def divide() -> None:
            for p in () if self.is_library else self.with_gradients():
                p.grad /= self.scale

        def step(optimizer: Any) -> None:
            scaler.step(optimizer)
            scaler.update()

        if overflows:
            self.begin()
            (self.loss(self.call(self.data(9))) * torch.inf).backward()
            for optimizer in self.optimizers if self.is_library else ():
                step(optimizer)
            self.model.zero_grad()
            self.scale = self.scale / 2
        self.train(by=step if self.is_library else None, complete=divide)

    def train_clipped(self) -> None:
        """Train with gradients clipped by their global norm."""
        self.train(complete=lambda: nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3))

    def wrote(self) -> None:
        """A weight was written by hand, and something can see it: a twin forgets its history, as is documented."""
        for module in self.model.modules():
            if not self.is_library and isinstance(module, TwinLinear):
                module.casts.forget(1)

    def finish(self) -> dict[str, Tensor]:
        """The trace, with the weights as they are now; of sharded ones all ranks' parts."""
        for name, parameter in self.model.named_parameters():
            self.note(f"weight {name}", whole(parameter))
        self.closing.close()
        return self.trace


def whole(parameter: Any) -> Tensor:
    """The values of a weight, of all ranks that have parts of it."""
    part = local_stored(parameter)
    if part is not None:
        return values_of(part if part is parameter else whole_stored(part, parameter))
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def values_of(weight: Any) -> Tensor:
    """Return a weight's values as a plain tensor: of one in FP8, its codes' values."""
    return weight.dequantize().detach() if isinstance(weight, StoredWeight) else weight.detach()


@contextlib.contextmanager
def evaluating(run: TrainingRun) -> Iterator[None]:
    """The model in evaluation."""
    run.call.eval()
    yield
    run.call.train()
