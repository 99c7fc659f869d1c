"""A feature's model in training, or a twin of it; what happened to it is its trace.

A situation's program is written once, for the library and for the twins: what only the library meets (a wrapper,
recomputation, a pipeline) it does under ``if made.is_library``. A twin on ranks has the whole model on each: where each
has a batch of its own, with delayed state of its own, gradients are averaged by hand; else each rank is a twin alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import octavo
from octavo.tensor.fsdp2 import like_sharded
from octavo.tensor.stored_weight import StoredWeight, local_stored
from tests.support.seams.twins import TwinLinear, casts_of, twin_of

if TYPE_CHECKING:
    from tests.support.seams.features import Feature

Role = Literal["library", "twin", "float64"]
TOKENS, WIDTH, STEPS = 16, 256, 3


class Made:
    """A model, its optimizer and their trace.

    Attributes:
        model: the feature's; its parts are ``model[0]`` and ``model[1]``, each [T, WIDTH] to [T, WIDTH].
        call: what computes: the model, or what a program has wrapped it in.
        mesh: of a situation on ranks.
        tokens: of a batch.
        trace: outputs, inputs' gradients, weights by name; see ``note``.
        batch: which batch of a step is this rank's; see ``divide``.
        scale: of the loss, for its gradients.
    """

    def __init__(self, feature: Feature, role: Role, mesh: Any = None) -> None:
        self.feature, self.role, self.mesh = feature, role, mesh
        self.trace: dict[str, Tensor] = {}
        self.closing = contextlib.ExitStack()
        self.optimizers: list[Any] = []
        self.step_number = self.begun_at = 0
        self.divide(mesh)
        self.scale, self.tokens = 1.0, TOKENS
        self.take(self.converted(self.plain()))

    # --- making -------------------------------------------------------------------------------------------------------

    @property
    def is_library(self) -> bool:
        """Whether this is octavo, and no twin."""
        return self.role == "library"

    def plain(self) -> nn.Module:
        """The feature's model before octavo, with the same values each time."""
        torch.manual_seed(0)
        return self.feature.plain()

    def set_recipe(self, recipe: octavo.Recipe) -> None:
        """From the next forward on."""
        if self.is_library:
            octavo.set_recipe(self.model, recipe)
        elif self.role == "twin":
            for casts in casts_of(self.model):
                casts.set(recipe)

    @contextlib.contextmanager
    def using(self, recipe: octavo.Recipe) -> Iterator[None]:
        """A block under another recipe, after which all is as before it."""
        with contextlib.ExitStack() as stack:
            if self.is_library:
                stack.enter_context(octavo.using(self.model, recipe))
            for casts in casts_of(self.model) if self.role == "twin" else ():
                stack.enter_context(casts.using(recipe))
            yield

    def converted(self, plain: nn.Module) -> nn.Module:
        """What the feature makes of its plain model; a twin of that."""
        model = self.feature.convert(plain)
        return model if self.is_library else twin_of(model, exact=self.role == "float64")

    def take(self, model: nn.Module) -> None:
        """Go on with this model, which has no optimizer yet."""
        self.model: Any = model
        self.call: Any = model
        self.optimizers = []

    def begin(self, optimizers: Callable[[Any], list[Any]] | None = None) -> None:
        """Make the optimizer and what else the feature has; a program may give several optimizers, of the groups.

        ``optimizers`` is called with a function that makes the feature's optimizer of parameters.
        """

        def make(parameters: Any) -> Any:
            return self.feature.optimizer(self, [p for p in parameters if p.requires_grad])

        self.begun_at = self.step_number
        self.optimizers = [make(self.model.parameters())] if optimizers is None else optimizers(make)
        self.feature.begin(self)

    # --- ranks --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else torch.distributed.get_rank()

    def divide(self, mesh: Any) -> None:
        """Each rank of this mesh has a batch of its own; None: all have the same."""
        self.data_mesh, self.group = mesh, None
        if mesh is not None:
            self.group = mesh.get_group() if mesh.ndim == 1 else torch.distributed.group.WORLD
        self.batch = 0 if mesh is None else mesh.get_rank() if mesh.ndim > 1 else mesh.get_local_rank()

    def average(self) -> None:
        """A twin's gradients become their mean over ranks."""
        for p in self.model.parameters() if self.data_mesh is not None else ():
            if p.grad is not None:
                parts = [torch.empty_like(p.grad) for _ in range(self.data_mesh.size())]
                torch.distributed.all_gather(parts, p.grad, group=self.group)
                p.grad = self.feature.mean(parts)

    # --- training -----------------------------------------------------------------------------------------------------

    def data(self, step: int, micro: int = 0, rank: int = 0) -> Tensor:
        """A batch [T, WIDTH]; the second rank's is larger."""
        seed = 1000 * step + 10 * micro + rank
        x = torch.randn(self.tokens, WIDTH, generator=torch.Generator().manual_seed(seed)) * (1 + 3 * rank)
        return x.to(torch.float64 if self.role == "float64" else self.feature.dtype)

    def loss(self, y: Tensor) -> Tensor:
        return (y.to(torch.float64 if self.role == "float64" else torch.float32)).square().mean()

    def note(self, name: str, tensor: Tensor | None) -> None:
        """Put a tensor into the trace."""
        if tensor is not None:
            self.trace[name] = tensor.detach().clone()

    def forward(self, name: str, x: Tensor, call: Any = None) -> tuple[Tensor, Tensor]:
        """(the input as a leaf, the output), noted under ``name``."""
        x = x.clone().requires_grad_()
        y = (self.call if call is None else call)(x)
        self.note(f"output {name}", y)
        return x, y

    def forward_backward(self, name: str, x: Tensor, call: Any = None, factor: float = 1.0) -> None:
        """A forward and its backward; ``factor`` multiplies the loss."""
        leaf, y = self.forward(name, x, call)
        (self.loss(y) * (factor * self.scale)).backward()
        self.note(f"input's gradient {name}", leaf.grad)

    def accumulating(self, more: bool) -> Any:
        """Around a backward; ``more``: others of its step follow."""
        return self.feature.accumulating(self) if more and self.is_library else contextlib.nullcontext()

    def gradients(
        self,
        step: int,
        micro: int = 1,
        call: Any = None,
        before: Callable[[int], None] | None = None,
        first: int = 0,
        rounds: bool = True,
    ) -> None:
        """A step's gradients, averaged over ranks.

        Args:
            micro: the number of micro-batches, of which those before ``first`` are left out.
            before: called with each one's number.
            rounds: whether they are complete then.
        """
        for number in range(first, micro):
            if before is not None:
                before(number)
            name = f"{step}.{number}" + (f" of rank {self.batch}" if self.mesh is not None else "")
            with self.accumulating(more=number < micro - 1):
                self.forward_backward(name, self.data(step, number, self.batch), call)
        if not self.is_library:
            self.average()
        if self.role == "twin" and rounds:
            self.feature.rounded(self)

    def update(self, zero_to_none: bool = True, by: Any = None) -> None:
        """The optimizers' step, ``by`` a GradScaler's or their own; what the feature does after it, and zero_grad."""
        for optimizer in self.optimizers:
            optimizer.step() if by is None else by(optimizer)
        self.feature.stepped(self, self.step_number)
        self.step_number += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=zero_to_none)

    def train(self, steps: int = STEPS, micro: int = 1, call: Any = None, before: Any = None) -> None:
        """Some steps, the optimizer made before the first."""
        if not self.optimizers:
            self.begin()
        for _ in range(steps):
            self.gradients(self.step_number, micro, call, before)
            self.update()

    def wrote(self) -> None:
        """A weight was written by hand, and something can see it: a twin forgets its history, as is documented."""
        for module in self.model.modules():
            if not self.is_library and isinstance(module, TwinLinear):
                module.casts.forget(1)

    # --- the trace ----------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Tensor]:
        """The trace, with the weights as they are now; of sharded ones all ranks' parts."""
        for name, parameter in self.model.named_parameters():
            self.note(f"weight {name}", whole(parameter))
        self.closing.close()
        return self.trace


def whole(parameter: Tensor) -> Tensor:
    """The values of a weight, of all ranks that have parts of it."""
    part = local_stored(parameter)
    if part is not None and part is not parameter:
        codes = like_sharded(part.qdata.detach().view(torch.uint8), parameter, parameter.shape).full_tensor()  # type: ignore[attr-defined]
        scales = part.scale_inv
        if scales.numel() > 1:  # of blocks
            shape = part.granularity.of_matrices(parameter.shape).scale_shape(parameter.shape)
            scales = like_sharded(scales.detach(), parameter, torch.Size(shape)).full_tensor()  # type: ignore[attr-defined]
        part = StoredWeight(codes.view(part.qdata.dtype), scales, part.dtype, part.granularity)
    if part is not None:
        return part.dequantize().detach()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[no-any-return,operator]


@contextlib.contextmanager
def evaluating(made: Made) -> Iterator[None]:
    """The model in evaluation."""
    made.call.eval()
    yield
    made.call.train()
