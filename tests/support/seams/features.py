"""The features, each with its smallest model: two parts of WIDTH to WIDTH, and an optimizer.

A feature says what differs from the plain one: what it is made of, how it is converted, its optimizer, and what it does
before a backward and after a step; and the same for a twin, which keeps nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.nn.known_forwards import LeanRMSNorm, OfLlama
from octavo.schedule import Phase, PrecisionSchedule
from tests.support.helpers import every_layer
from tests.support.regions import region_by_hand
from tests.support.seams.made import WIDTH, Made
from tests.support.seams.situations import Documented, Verdict
from tests.support.seams.twins import casts_of
from tests.support.trained import by_hand

LR = 1e-3
KNOWN = ("convert(fuse=True)", "convert(fuse=True), delayed")
SWITCHES_AT = 2  # steps, of the schedule


class Part(nn.Module):
    """A linear layer and tanh."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        return torch.tanh(self.linear(x))


class Feature:
    """A recipe, plain: two linear layers and torch's AdamW.

    Attributes:
        name: in tests and in the page's rows of exceptions.
        heading: the table's, short.
        alone: a verdict for all situations of one process, in the place of theirs.
    """

    dtype = torch.float32
    alone: Verdict | None = None

    def __init__(self, name: str, recipe: octavo.Recipe, heading: str = "") -> None:
        self.name, self.recipe, self.heading = name, recipe, heading or name

    @property
    def is_delayed(self) -> bool:
        """Whether there is delayed state."""
        return self.recipe.delayed is not None

    def plain(self) -> nn.Module:
        """The model before octavo."""
        return nn.Sequential(Part(), Part()).to(self.dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        """The model with octavo."""
        return octavo.convert(model, self.recipe, every_layer)

    def optimizer(self, made: Made, parameters: Any) -> Any:
        """An optimizer of some parameters."""
        return torch.optim.AdamW(parameters, lr=LR)

    def begin(self, made: Made) -> None:
        """Once the optimizers are made."""

    def accumulating(self, made: Made) -> Any:
        """Around a backward that others of its step follow; the library's only."""
        return contextlib.nullcontext()

    def wrapped(self, made: Made) -> None:
        """Once a program has put the model under DDP or FSDP2, ``made.call``."""

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        """(a parameter, which of it stay) for a last layer of half as many rows."""
        return [(p, slice(WIDTH // 2)) for p in model[1].linear.parameters()]

    def mean(self, grads: Sequence[Tensor]) -> Tensor:
        """A twin's mean of the ranks' gradients, added up as replicas of shards are."""
        parts = list(grads)
        while len(parts) > 1:
            parts = [parts[at] + parts[at + 1] for at in range(0, len(parts), 2)]
        return parts[0] / len(grads)

    def rounded(self, made: Made) -> None:
        """A twin's gradients are complete."""

    def stepped(self, made: Made, step: int) -> None:
        """After the optimizers' step of this number."""


class StoredWeights(Feature):
    """Weights in FP8, masters of 12 bits. A twin's products read the codes as they are then."""

    moments: Any = "fp32"

    def plain(self) -> nn.Module:
        """Without biases: vectors that ranks share have other blocks."""
        return nn.Sequential(Part(bias=False), Part(bias=False)).to(self.dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        return octavo.convert(model, self.recipe, every_layer, weight_storage="fp8")

    def optimizer(self, made: Made, parameters: Any) -> Any:
        """The only kind that can."""
        if made.role == "float64":
            return super().optimizer(made, parameters)
        return octavo.optim.AdamW(parameters, lr=LR, moments=self.moments)


class ByMuon(StoredWeights):
    """Weights in FP8 that Muon moves, its momentum in FP8 too. Few iterations: torch's bf16 products take seconds."""

    options: ClassVar[dict[str, Any]] = {"lr": LR, "ns_steps": 2}

    def optimizer(self, made: Made, parameters: Any) -> Any:
        """Float64's is torch's."""
        if made.role == "float64":
            return torch.optim.Muon(parameters, **self.options)
        return octavo.optim.Muon(parameters, **self.options)


class StoredGradients(Feature):
    """Gradients that wait in FP8; a twin's are rounded by hand."""

    def optimizer(self, made: Made, parameters: Any) -> Any:
        """With storage, but a twin's."""
        if made.role == "float64":
            return super().optimizer(made, parameters)
        return octavo.optim.AdamW(
            parameters, lr=LR, moments="fp32", gradient_storage="fp8" if made.is_library else None
        )

    def accumulating(self, made: Made) -> Any:
        stack = contextlib.ExitStack()
        for optimizer in made.optimizers:
            stack.enter_context(optimizer.accumulate())
        return stack

    def rounded(self, made: Made) -> None:
        """To codes and back."""
        for parameter in made.model.parameters():
            if parameter.grad is not None:
                by_hand(parameter)


class InBackward(Feature):
    """Updates in backward; a twin steps after it."""

    def optimizer(self, made: Made, parameters: Any) -> Any:
        if made.role == "float64":
            return super().optimizer(made, parameters)
        return octavo.optim.AdamW(parameters, lr=LR, moments="fp32")

    def begin(self, made: Made) -> None:
        """Each gradient is used at once."""
        for handle in getattr(made, "handles", []):
            handle.remove()
        if made.is_library:
            made.handles = [octavo.optim.update_in_backward(optimizer, 0) for optimizer in made.optimizers]  # type: ignore[attr-defined]

    def accumulating(self, made: Made) -> Any:
        stack = contextlib.ExitStack()
        for handle in made.handles:  # type: ignore[attr-defined]
            stack.enter_context(handle.accumulate())
        return stack


class Kept(Feature):
    """KeptWeights, cast after each step; a twin keeps none."""

    def begin(self, made: Made) -> None:
        """Of the model as it is now."""
        if made.is_library:
            made.kept = octavo.nn.KeptWeights(made.model)  # type: ignore[attr-defined]
            made.kept.cast()  # type: ignore[attr-defined]

    def stepped(self, made: Made, step: int) -> None:
        if made.is_library:
            made.kept.cast()  # type: ignore[attr-defined]


class Fused(Feature):
    """RMSNormMLPs; a twin computes their parts one after the other."""

    def plain(self) -> nn.Module:
        parts = [octavo.nn.RMSNormMLP(WIDTH, WIDTH, activation="relu", recipe=self.recipe) for _ in range(2)]
        return nn.Sequential(*parts).to(self.dtype)

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        """Of the second product."""
        return [(p, slice(WIDTH // 2)) for p in model[1].fc2.parameters()]


class MixturePart(nn.Module):
    """Four experts, two a token by a rule that leaves one of them without any."""

    def __init__(self, recipe: octavo.Recipe) -> None:
        super().__init__()
        self.first_token = 0  # of those that a rank has
        self.experts = octavo.nn.Experts(4, WIDTH, WIDTH // 2, "relu", bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        token = torch.arange(x.shape[0]) + self.first_token
        index = torch.stack([token % 3, (token + 1) % 3], 1)
        return x + self.experts(x, index, torch.full((x.shape[0], 2), 0.5, dtype=x.dtype))  # type: ignore[no-any-return]


class Experts(Feature):
    """Mixtures of experts, of GroupedLinear; a twin is a loop over experts."""

    def plain(self) -> nn.Module:
        return nn.Sequential(MixturePart(self.recipe), MixturePart(self.recipe)).to(self.dtype)

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        experts, kept = model[1].experts, slice(WIDTH // 4)
        return [(experts.gate_up.weight, (slice(None), kept)), (experts.down.weight, (slice(None), slice(None), kept))]


class SharedPart(Part):
    """Two layers that read one input, as gate and up do, and a third that reads twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        return torch.tanh(super().forward(x) * self.gate(x) + self.twice(2 * x))


class Shared(Feature):
    """Layers that share the cast of their input; a twin's cast it each."""

    def plain(self) -> nn.Module:
        return nn.Sequential(SharedPart(), SharedPart()).to(self.dtype)

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        return [(p, slice(WIDTH // 2)) for p in model[1].parameters()]


class KnownNorm(nn.RMSNorm):
    """Llama's."""

    forward = LeanRMSNorm.known

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.variance_epsilon = 1e-6


class KnownMLP(nn.Module):
    """Llama's."""

    forward = OfLlama.known

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act_fn = nn.ReLU()


class KnownPart(nn.Module):
    """A norm and a feed-forward whose forwards octavo knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = KnownNorm(), KnownMLP()

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        return self.mlp(self.norm(x))  # type: ignore[no-any-return]


class Known(Feature):
    """Feed-forwards and norms as models have them, fused; a twin computes one part after the other."""

    def plain(self) -> nn.Module:
        return nn.Sequential(KnownPart(), KnownPart()).to(self.dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        return octavo.convert(model, self.recipe, every_layer, fuse=True)

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        return [(model[1].mlp.down_proj.weight, slice(WIDTH // 2))]


class AdaptedPart(nn.Module):
    """LoRA, as PEFT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        return torch.tanh(self.linear(x) + 2 * self.lora_b(self.lora_a(x)))


class Lora(Feature):
    """Adapters over a frozen base in FP8."""

    def plain(self) -> nn.Module:
        return nn.Sequential(AdaptedPart(), AdaptedPart()).to(self.dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        return octavo.convert(model, self.recipe, lambda module, name: name.endswith("linear"), weight_storage="fp8")


class CompactState(Feature):
    """Moments in FP8, bf16 weights with split masters."""

    dtype = torch.bfloat16
    plain = StoredWeights.plain

    def optimizer(self, made: Made, parameters: Any) -> Any:
        if made.role == "float64":
            return super().optimizer(made, parameters)
        return octavo.optim.AdamW(parameters, lr=LR, moments="fp8", master="split24")


class Scheduled(Feature):
    """A schedule that goes from blocks to one scale a tensor; a twin's recipe is set by hand."""

    def begin(self, made: Made) -> None:
        if made.role == "twin":
            self._set(made, self.recipe)
        elif made.is_library:
            phases = [Phase(self.recipe), Phase(recipes.delayed(2), from_step=SWITCHES_AT)]
            made.schedule = PrecisionSchedule(made.model, made.optimizers[0], phases)  # type: ignore[attr-defined]

    def stepped(self, made: Made, step: int) -> None:
        if made.is_library:
            made.schedule.step()  # type: ignore[attr-defined]
        elif made.role == "twin" and step + 1 - made.begun_at == SWITCHES_AT:
            self._set(made, recipes.delayed(2))

    def _set(self, made: Made, recipe: octavo.Recipe) -> None:
        for casts in casts_of(made.model):
            casts.set(recipe)


class Reduced(Feature):
    """Gradients averaged over ranks in FP8."""

    alone = Documented("communication.md#gradients-in-fp8", "one process has no gradients to average")

    def wrapped(self, made: Made) -> None:
        """DDP's hook, FSDP2's reduce-scatter."""
        from torch.distributed.fsdp import FSDPModule

        from octavo.distributed import Fp8ReduceScatter, Fp8Reduction, fp8_reduce_hook

        if not made.is_library:
            return
        if isinstance(made.call, nn.parallel.DistributedDataParallel):
            made.call.register_comm_hook(Fp8Reduction(group=made.mesh.get_group()), fp8_reduce_hook)
        for module in made.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Fp8ReduceScatter(Fp8Reduction()))


class RegionPart(Part):
    """Computed again from its input in FP8; a twin's is rounded by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] to the same."""
        region = octavo.checkpoint_in_fp8 if isinstance(self.linear, octavo.nn.Linear) else region_by_hand
        return region(super().forward, x)  # type: ignore[no-any-return]


class Regions(Feature):
    """Checkpointed parts whose inputs are kept in FP8."""

    def plain(self) -> nn.Module:
        return nn.Sequential(RegionPart(), RegionPart()).to(self.dtype)


class Recorded(Feature):
    """A recorder that looks at every step."""

    def begin(self, made: Made) -> None:
        """Into a folder of its own."""
        if made.is_library:
            folder = made.closing.enter_context(tempfile.TemporaryDirectory())
            group = made.mesh.get_group() if made.mesh is not None and made.mesh.ndim == 1 else None
            recorder = octavo.inspect.record(
                made.model, f"{folder}/record", every=1, optimizer=made.optimizers[0], group=group
            )
            made.recorder = made.closing.enter_context(recorder)  # type: ignore[attr-defined]

    def stepped(self, made: Made, step: int) -> None:
        """The step is over."""
        if made.is_library:
            made.recorder.step(loss=torch.zeros(()))  # type: ignore[attr-defined]


FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("dynamic", recipes.dynamic()),
        Feature("delayed", recipes.delayed(2)),
        Feature("rowwise", recipes.rowwise()),
        Feature("rowwise_with_gw_hp", recipes.rowwise_with_gw_hp(), "gw_hp"),
        Feature("blockwise", recipes.blockwise()),
        Feature("mx", recipes.mx()),
        Feature("batch_invariant", recipes.batch_invariant(), "invariant"),
        StoredWeights("FP8 weights", recipes.dynamic(power_of_two=True)),
        StoredWeights("FP8 weights in blocks", recipes.blockwise(), "... blocks"),
        ByMuon("Muon", recipes.blockwise()),
        StoredGradients("FP8 gradients", recipes.dynamic()),
        InBackward("updates in backward", recipes.dynamic(), "in backward"),
        Kept("KeptWeights", recipes.dynamic(), "kept"),
        Fused("fused modules", recipes.dynamic(), "fused"),
        Experts("experts", recipes.dynamic()),
        Shared("shared inputs", recipes.blockwise(), "shared"),
        Shared("shared inputs, delayed", recipes.delayed(2), "... delayed"),
        Known(KNOWN[0], recipes.blockwise(), "fuse=True"),
        Known(KNOWN[1], recipes.delayed(2), "... delayed"),
        Lora("LoRA over FP8", recipes.dynamic(power_of_two=True), "LoRA"),
        CompactState("FP8 moments", recipes.dynamic(), "moments"),
        Scheduled("schedule", recipes.blockwise()),
        Reduced("FP8 reduction", recipes.dynamic(), "reduction"),
        Recorded("recording", recipes.delayed(2)),
        Regions("checkpoint_in_fp8", recipes.blockwise(), "regions"),
    )
}
