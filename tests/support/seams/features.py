"""The features, each with its smallest model: two parts of WIDTH to WIDTH, and an optimizer.

A feature says what differs from the plain one: what it is made of, how it is converted, its optimizer, and what it does
before a backward and after a step; and the same for a twin, which keeps nothing.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import octavo
from octavo import recipes
from octavo.nn.known_forwards import (
    Attention,
    DecoderLayer,
    LeanRMSNorm,
    LlamaFeedForward,
    apply_rotary_pos_emb,
    rotate_half,
)
from octavo.schedule import Phase, PrecisionSchedule
from tests.support.helpers import every_layer
from tests.support.regions import region_by_hand
from tests.support.seams.situations import Documented, Verdict
from tests.support.seams.training_run import WIDTH, TrainingRun
from tests.support.seams.twins import TwinLinear, cross_entropy_by_hand
from tests.support.trained import by_hand

LR = 1e-3
KNOWN = ("convert(fuse=True)", "convert(fuse=True), delayed")
LLAMA = ("fused decoder layer", "fused decoder layer, delayed")
HEADS_LOSS = ("linear_cross_entropy", "linear_cross_entropy, delayed")
HEADS, KV_HEADS = 4, 2
LORA = ("LoRA over FP8", "LoRA over FP8 by rows", "LoRA over FP8 in 1x32")
SWITCHES_AT = 2  # steps, of the schedule


class Part(nn.Module):
    """A linear layer and tanh: [T, WIDTH] to the same, as every part."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class MixturePart(nn.Module):
    """A mixture of four experts, two a token by a rule that leaves one expert without tokens."""

    def __init__(self, recipe: octavo.Recipe) -> None:
        super().__init__()
        self.first_token = 0  # of those that a rank has
        self.experts = octavo.nn.Experts(4, WIDTH, WIDTH // 2, "relu", bias=False, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        token = torch.arange(x.shape[0], device=x.device) + self.first_token
        return x + self.experts(x, torch.stack([token % 3, (token + 1) % 3], 1), x.new_full((x.shape[0], 2), 0.5))


class SharedPart(Part):
    """A part with two layers that read one input, as gate and up do, and a third that reads twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.gate(x) + self.twice(2 * x))


class KnownNorm(nn.RMSNorm):
    """Llama's."""

    forward = LeanRMSNorm.library_forward

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.variance_epsilon = 1e-6


class KnownMLP(nn.Module):
    """Llama's."""

    forward = LlamaFeedForward.library_forward

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
        return self.mlp(self.norm(x))


def targets(x: Tensor) -> Tensor:
    """Return a column for each token, among half of a layer's; the first token has none."""
    token = torch.arange(x.shape[0], device=x.device)
    return torch.where(token > 0, 7 * token % (WIDTH // 2), -100)


class LossPart(Part):
    """A head and its cross entropy, which is added to the head's input, as parts return [T, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, WIDTH]."""
        of_twin = isinstance(self.linear, TwinLinear)
        loss = cross_entropy_by_hand if of_twin else octavo.nn.cross_entropy
        return x + loss(self.linear(x), targets(x))


class HeadPart(LossPart):
    """The same in chunks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, WIDTH]."""
        if isinstance(self.linear, TwinLinear):
            return x + self.linear(x, target=targets(x))
        return x + octavo.nn.linear_cross_entropy(x, self.linear, targets(x))


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """The attention that transformers calls "sdpa": queries [B, H, S, D] see the keys up to their own; result [B, S, H,
    D].
    """
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2), None


class KnownAttention(nn.Module):
    """Llama's; importing transformers' would take each rank seconds."""

    forward = FunctionType(
        Attention.library_forward.__code__,
        {
            "ALL_ATTENTION_FUNCTIONS": SimpleNamespace(get_interface=lambda name, eager: causal_attention),
            "Callable": Callable,
            "apply_rotary_pos_emb": apply_rotary_pos_emb,
            "eager_attention_forward": None,
            "rotate_half": rotate_half,
        },
    )

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.attention_dropout, self.layer_idx = WIDTH // HEADS, 0.0, 0
        self.scaling, self.config = self.head_dim**-0.5, SimpleNamespace(_attn_implementation="sdpa")
        shared = KV_HEADS * self.head_dim
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, shared, bias=False), nn.Linear(WIDTH, shared, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)


class KnownDecoderLayer(nn.Module):
    """Llama's."""

    forward = DecoderLayer.library_forward

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = KnownAttention(), KnownMLP()
        self.input_layernorm, self.post_attention_layernorm = KnownNorm(), KnownNorm()


class DecoderPart(nn.Module):
    """A decoder layer whose forward octavo knows; its tokens are one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = KnownDecoderLayer()
        self.ranks = 1  # that a sequence is divided over

    def forward(self, x: Tensor) -> Tensor:
        width = WIDTH // HEADS
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
        positions = torch.arange(x.shape[0] * self.ranks, dtype=torch.float32, device=x.device)
        angles = (positions[:, None] / 10_000.0**exponents).repeat(1, 2)[None]  # [1, T, D]
        both = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        how = dict.fromkeys(("attention_mask", "position_ids", "cache"))
        y: Tensor = self.layer(x[None], use_cache=False, position_embeddings=both, **how)
        return y[0].clone()  # pipelines detach a stage's output in place, which torch refuses for a view


class AdaptedPart(Part):
    """LoRA, as PEFT writes it."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.linear.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + 2 * self.lora_b(self.lora_a(x)))


@dataclass(eq=False)
class Feature:
    """A recipe, plain: two linear layers and torch's AdamW.

    Attributes:
        name: in tests and in the page's rows of exceptions.
        heading: the table's, short; or else the name.
        part: makes a part of the model before octavo.
        last: the name of the last part's last layer.
        dtype: of the model and of its data.
        adamw: options of octavo's AdamW, which stores weights, moments or gradients otherwise; None: torch's.
        how: options of convert, if not of every layer alone.
        alone: a verdict for all situations of one process, in the place of theirs.
        by_chance: the beginnings of names in the trace of what has the error of one number.
    """

    name: str
    recipe: octavo.Recipe
    heading: str = ""
    part: Callable[[], nn.Module] = Part
    last: str = "linear"
    adamw: Any = None
    dtype: torch.dtype = torch.float32
    how: Any = None
    alone: ClassVar[Verdict | None] = None
    by_chance: ClassVar[tuple[str, ...]] = ()

    @property
    def has_history(self) -> bool:
        """Whether the recipe casts by earlier passes' amaxes."""
        return self.recipe.delayed is not None

    def plain(self) -> nn.Module:
        """The model before octavo."""
        return nn.Sequential(self.part(), self.part()).to(self.dtype)

    def convert(self, model: nn.Module) -> nn.Module:
        """The model with octavo."""
        return octavo.convert(model, self.recipe, **{"select": every_layer, **(self.how or {})})

    def optimizer(self, run: TrainingRun, parameters: Any) -> Any:
        """An optimizer of some parameters; float64's is torch's."""
        if self.adamw is None or run.role == "float64":
            return torch.optim.AdamW(parameters, lr=LR)
        return octavo.optim.AdamW(parameters, lr=LR, **self.adamw)

    def begin(self, run: TrainingRun) -> None:
        """Begin, once the library's optimizers exist."""

    def accumulate(self, run: TrainingRun) -> list[Any]:
        """Return objects with an ``accumulate()`` that goes around each of a step's backwards but the last."""
        return []

    def wrapped(self, run: TrainingRun) -> None:
        """Set up ``run.call``, once a program has put the model under DDP or FSDP2."""

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        """Return (a parameter, the part of it that stays) for a last layer of half as many rows."""
        return [(p, slice(WIDTH // 2)) for p in model[1].get_submodule(self.last).parameters()]

    def rounded(self, run: TrainingRun) -> None:
        """A twin's gradients are complete."""

    def stepped(self, run: TrainingRun) -> None:
        """Follow a step of the library's optimizers."""

    def twin_stepped(self, run: TrainingRun, steps: int) -> None:
        """Follow so many steps of a twin since it began."""


class ByMuon(Feature):
    """Weights that Muon moves, its momentum in FP8 too. One iteration: torch's bf16 products take seconds."""

    def optimizer(self, run: TrainingRun, parameters: Any) -> Any:
        if run.role == "float64":
            return torch.optim.Muon(parameters, lr=LR, ns_steps=1)
        return octavo.optim.Muon(parameters, lr=LR, ns_steps=1, adamw={"lr": LR})


class StoredGradients(Feature):
    """Gradients that wait in FP8; a twin's are rounded by hand."""

    def optimizer(self, run: TrainingRun, parameters: Any) -> Any:
        if run.is_library:
            return octavo.optim.AdamW(parameters, lr=LR, moments="fp32", gradient_storage="fp8")
        return super().optimizer(run, parameters)

    def accumulate(self, run: TrainingRun) -> list[Any]:
        return run.optimizers

    def rounded(self, run: TrainingRun) -> None:
        for parameter in run.with_gradients():
            by_hand(parameter)


class InBackward(Feature):
    """Updates in backward; a twin steps after it."""

    def begin(self, run: TrainingRun) -> None:
        for handle in run.extra or ():
            handle.remove()
        run.extra = [octavo.optim.update_in_backward(optimizer, 0) for optimizer in run.optimizers]

    def accumulate(self, run: TrainingRun) -> list[Any]:
        return run.extra


class WithKeptWeights(Feature):
    """KeptWeights, cast after each step; a twin keeps none."""

    def begin(self, run: TrainingRun) -> None:
        run.extra = octavo.nn.KeptWeights(run.model)
        run.extra.cast()

    def stepped(self, run: TrainingRun) -> None:
        run.extra.cast()


class Experts(Feature):
    """Mixtures of experts, of GroupedLinear; a twin is a loop over experts."""

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        experts, whole, part = model[1].experts, slice(None), slice(WIDTH // 4)
        return [(experts.gate_up.weight, (whole, part)), (experts.down.weight, (whole, whole, part))]


class Decoder(Feature):
    """A decoder layer: half of its features are a feed-forward's, as the residual has all rows of its last layer."""

    def half(self, model: Any) -> list[tuple[Tensor, Any]]:
        mlp, half = model[1].layer.mlp, slice(WIDTH // 2)
        return [(mlp.gate_proj.weight, half), (mlp.up_proj.weight, half), (mlp.down_proj.weight, (slice(None), half))]


class HeadsLoss(Feature):
    """A head and its loss; a part's output is as far from float64's as the loss is."""

    by_chance = ("output", "evaluation")


class Scheduled(Feature):
    """A schedule that goes from blocks to one scale a tensor; a twin's recipe is set by hand."""

    has_history = True

    def begin(self, run: TrainingRun) -> None:
        phases = [Phase(self.recipe), Phase(DELAYED, from_step=SWITCHES_AT)]
        run.extra = PrecisionSchedule(run.model, run.optimizers[0], phases)

    def stepped(self, run: TrainingRun) -> None:
        run.extra.step()

    def twin_stepped(self, run: TrainingRun, steps: int) -> None:
        if steps in (0, SWITCHES_AT):
            run.set_recipe(DELAYED if steps else self.recipe)


class Reduced(Feature):
    """Gradients averaged over ranks in FP8: by DDP's hook, or by FSDP2's reduce-scatter."""

    alone = Documented("communication.md#gradients-in-fp8", "one process has no gradients to average")

    def wrapped(self, run: TrainingRun) -> None:
        from octavo.distributed import Fp8Reduction, fp8_reduce_hook

        if isinstance(run.call, nn.parallel.DistributedDataParallel):
            run.call.register_comm_hook(Fp8Reduction(group=run.mesh.get_group()), fp8_reduce_hook)
        for module in run.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(Fp8Reduction())


class RegionPart(Part):
    """Computed again from its input in FP8; a twin's is rounded by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, WIDTH]."""
        region = octavo.checkpoint_in_fp8 if isinstance(self.linear, octavo.nn.Linear) else region_by_hand
        return region(super().forward, x)  # type: ignore[no-any-return]


class Recorded(Feature):
    """A recorder that looks at every step, into a folder of its own."""

    def begin(self, run: TrainingRun) -> None:
        path = f"{run.closing.enter_context(tempfile.TemporaryDirectory())}/record"
        group = run.mesh.get_group() if run.mesh is not None and run.mesh.ndim == 1 else None
        recorder = octavo.inspect.record(run.model, path, every=1, optimizer=run.optimizers[0], group=group)
        run.extra = run.closing.enter_context(recorder)

    def stepped(self, run: TrainingRun) -> None:
        run.extra.step(loss=torch.zeros((), device="cpu"))


DYNAMIC, BY_POWERS, DELAYED = recipes.dynamic(), recipes.dynamic(power_of_two=True), recipes.delayed(2)
BLOCKS = recipes.blockwise()
FP32: Any = {"adamw": {"moments": "fp32"}}
WITHOUT_BIAS = functools.partial(Part, bias=False)  # vectors that ranks share have other blocks
# masters of 12 bits; a twin reads the codes
STORED: Any = FP32 | {"part": WITHOUT_BIAS, "how": {"weight_storage": "fp8"}}
MLP = functools.partial(octavo.nn.RMSNormMLP, WIDTH, WIDTH, activation="relu", recipe=DYNAMIC)
IN_PLACE: Any = {"part": KnownPart, "last": "mlp.down_proj", "how": {"fuse": True}}
LAYER: Any = {"part": DecoderPart, "last": "layer.mlp.down_proj", "how": {"fuse": True}}
BASE: Any = {"how": {"select": lambda module, name: name.endswith("linear"), "weight_storage": "fp8"}}
COMPACT: Any = {"part": WITHOUT_BIAS, "adamw": {"moments": "fp8", "master": "split24"}, "dtype": torch.bfloat16}
HEADINGS = {"dynamic_with_output_hp": "output_hp", "rowwise_with_gw_hp": "gw_hp", "batch_invariant": "invariant"}
NAMED = [name for name in recipes.NAMED if name != "high_precision"]
OF_RECIPES = {name: DELAYED if name == "delayed" else getattr(recipes, name)() for name in NAMED}
FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        *(Feature(name, recipe, HEADINGS.get(name, "")) for name, recipe in OF_RECIPES.items()),
        Feature("nvfp4, delayed", recipes.nvfp4(history_length=4), "... delayed"),
        Feature("FP8 weights", BY_POWERS, **STORED),
        Feature("FP8 weights in blocks", BLOCKS, "... blocks", **STORED),
        ByMuon("Muon", BLOCKS, **STORED),
        StoredGradients("FP8 gradients", DYNAMIC, **FP32),
        InBackward("updates in backward", DYNAMIC, "in backward", **FP32),
        WithKeptWeights("KeptWeights", DYNAMIC, "kept"),
        Feature("fused modules", DYNAMIC, "fused", MLP, "fc2"),
        Experts("experts", DYNAMIC, part=functools.partial(MixturePart, DYNAMIC)),
        Feature("shared inputs", BLOCKS, "shared", SharedPart, ""),
        Feature("shared inputs, delayed", DELAYED, "... delayed", SharedPart, ""),
        Feature(KNOWN[0], BLOCKS, "fuse=True", **IN_PLACE),
        Feature(KNOWN[1], DELAYED, "... delayed", **IN_PLACE),
        Decoder(LLAMA[0], BLOCKS, "decoder layer", **LAYER),
        Decoder(LLAMA[1], DELAYED, "... delayed", **LAYER),
        Feature("cross_entropy", DYNAMIC, part=LossPart),
        HeadsLoss(HEADS_LOSS[0], BLOCKS, "head's loss", HeadPart),
        HeadsLoss(HEADS_LOSS[1], DELAYED, "... delayed", HeadPart),
        Feature(LORA[0], BY_POWERS, "LoRA", AdaptedPart, **BASE),
        Feature(LORA[1], recipes.rowwise(), "... rows", AdaptedPart, **BASE),
        Feature(LORA[2], recipes.mx(), "... 1x32", AdaptedPart, **BASE),
        Feature("FP8 moments", DYNAMIC, "moments", **COMPACT),
        Scheduled("schedule", BLOCKS),
        Reduced("FP8 reduction", DYNAMIC, "reduction"),
        Recorded("recording", DELAYED),
        Feature("checkpoint_in_fp8", BLOCKS, "regions", RegionPart),
    )
}
