"""The fourth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Each fault has the truth: whether FP8 is its cause, the recorded step where it begins, the kinds of quantity that change
first, and the kinds of finding that say it. A fault that only changes the forward pass changes the loss, gradients and
inputs of later layers in one step, so each of them is right. A fault that is there from the first step on has no
departure. Faults of FP8 alone compute in high precision what the training computed without them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training.causes import (
    ALL,
    BEFORE,
    CHECKPOINT,
    DATA,
    DELAYED,
    INNER,
    SCALER,
    SIZES,
    STEPS,
    Fault,
    Training,
    at,
    batches,
    having,
    times,
    with_recipe,
)
from octavo import E4M3, E5M2, Cast, PerTensor, recipes
from octavo.distributed.ranks import Ranks
from octavo.nn import rotary_table
from octavo.train.model import balance
from octavo.train.trainer import build_model

FORWARD, OF_DATA, OUTPUTS = ("loss", "gradients", "inputs"), ("batch", "labels", "jump"), ("jump", "logits")
CASTS = ("Cast(", "recipes.", "None")
ROW, DYNAMIC = 2.0**18, recipes.dynamic()


def short_waves(run: Training) -> None:
    """Compute rotary angles with a base of 10, as from a configuration of another model."""
    run.model.cos, run.model.sin = rotary_table(SIZES["context"], SIZES["width"] // SIZES["heads"], base=10.0)


def attending(attend: Callable[..., Tensor]) -> Callable[[Training], None]:
    """Return a change of all attention: ``attend`` of queries and keys, which rotary angles have turned, and values."""

    def forward(attention: Any, x: Tensor, rotary: Any) -> Tensor:
        attended = attend(*attention._turned(x, rotary))
        return attention.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def change(run: Training) -> None:
        for block in run.model.blocks:
            block.attention.forward = functools.partial(forward, block.attention)

    return change


def without_residual(run: Training) -> None:
    """Leave out the addition of an MLP's input to its output."""
    block = run.model.blocks[1]
    block.forward = lambda x, rotary=None: block.mlp(x + block.attention(x, rotary))


def output_of(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Training], Any]:
    """Return a change of a module's output from the fault's step on, by its input and output."""
    return lambda run: run.model.get_submodule(name).register_forward_hook(
        lambda _, inputs, output: change(inputs[0], output) if run.begun else None
    )


def other_vocabulary(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Number the bytes in another order, as another tokenizer does."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(7))
    return (order[tokens.long()], order[targets.long()]) if run.begun else (tokens, targets)


def labels_of(every: int, begins: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a batch that has one label in so many, from a step on."""
    ignored = (torch.arange(SIZES["context"]) + 1) % every != 0
    return lambda run, x, y: (x, y.long().masked_fill(ignored, -100) if run.step >= begins else y)


def one_shard(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Give all rows the same sequence, as to ranks that seed their data alike."""
    return (tokens[:1].expand_as(tokens), targets[:1].expand_as(targets)) if run.begun else (tokens, targets)


def option(name: str, value: Any) -> Callable[[Training], None]:
    """Return a change of an option of all groups in the fault's step."""
    return at(lambda run: [group.update({name: value}) for group in run.optimizer.param_groups])


def averaged_twice(run: Training) -> None:
    """Divide gradients by 4 ranks once more than their mean does."""

    def divide(param: Tensor) -> None:
        if run.begun and param.grad is not None:
            param.grad /= 4

    for param in run.model.parameters():
        param.register_post_accumulate_grad_hook(divide)


def average_left_in(run: Training) -> None:
    """Keep the mean of past weights, and leave it in the model after an evaluation."""
    params = [*run.model.parameters()]
    means = vars(run).setdefault("means", [p.detach().clone() for p in params])
    for param, mean in zip(params, means, strict=True):
        mean.lerp_(param.detach(), 0.1)
        if run.step == run.at:
            param.data.copy_(mean)


def clears_vectors_only(run: Training) -> None:
    """Leave gradients of matrices as they are, as a second optimizer whose zero_grad nobody calls."""
    clear = run.optimizer.zero_grad

    def zero_grad() -> None:
        params = run.optimizer.param_groups[1]["params"]
        clear() if not run.begun else [setattr(param, "grad", None) for param in params]

    run.optimizer.zero_grad = zero_grad


def rate_of_norms(run: Training) -> None:
    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[1]["lr"] *= 100 if run.begun else 1

    run.optimizer.register_step_pre_hook(scale)


def rank_without_weights(run: Training) -> None:
    """Compute half of the batch with initial weights in some layers, as a rank that loaded no checkpoint."""
    initial = build_model(run.model.config, "float32", run.seed)
    for name in run.layers("attention.out", "head"):
        old, layer = initial.get_submodule(name).weight.detach(), run.model.get_submodule(name)

        def change(x: Tensor, y: Tensor, old: Tensor = old, layer: Any = layer) -> Tensor:
            half = len(x) // 2
            return torch.cat([y[:half], y[half:] + F.linear(x[half:], old - layer.weight.detach())])

        output_of(name, change)(run)


def times_inside(base: float, last: int = STEPS, all_of: tuple[str, ...] = ()) -> Callable[[Training], Any]:
    """Return a change of a layer's input, ``base`` times as large in each of some steps, and its output as much less.

    In high precision neither the output nor a gradient of the weight or of the layer before it changes. ``all_of``:
    ends of names of layers, of which each is changed, in place of one that is drawn.
    """

    def change(run: Training) -> None:
        def factor() -> float:
            return base ** min(last, max(0, run.step - run.at + 1))

        def smaller(_: Any, __: Any, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            return tuple(y / factor() for y in output) if isinstance(output, tuple) else output / factor()

        for name in run.layers(*all_of) if all_of else [run.layer(*INNER)]:
            layer = run.model.get_submodule(name)
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factor(), *inputs[1:]))
            layer.register_forward_hook(smaller)

    return change


def outlier_token(run: Training) -> None:
    """Give the first position a huge input, and its output from the true one in high precision."""
    layer, inputs = run.model.get_submodule(run.layer("attention.out")), []

    def before(_: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
        inputs[:] = arguments
        x = arguments[0]
        return (torch.cat([torch.full_like(x[:, :1], ROW * float(x.detach().abs().max())), x[:, 1:]], 1),)

    layer.register_forward_pre_hook(lambda _, arguments: before(_, arguments) if run.begun else None)
    layer.register_forward_hook(
        lambda _, __, y: torch.cat([F.linear(inputs[0][:, :1], layer.weight), y[:, 1:]], 1) if run.begun else None
    )


def scales_rounded_up(run: Training) -> None:
    for name in run.layers():
        run.model.get_submodule(name).delayed_scale.mul_(2)


E4M3_GRADIENTS = dataclasses.replace(
    DYNAMIC,
    grad_input=(Cast(E4M3, PerTensor()), Cast(E4M3, PerTensor())),
    grad_weight=(Cast(E4M3, PerTensor()), Cast(E4M3, PerTensor())),
    name="e4m3_gradients",
)

FOURTH_DRAW: Mapping[str, Fault] = {
    # the forward pass alone
    "rotary base of 10": Fault(OUTPUTS, ALL, before=at(short_waves), first=FORWARD),
    "no causal mask": Fault(OUTPUTS, ALL, before=at(attending(F.scaled_dot_product_attention)), first=FORWARD),
    "dropout left on": Fault(
        ("jump",), ALL, begin=output_of("embedding", lambda _, y: F.dropout(y, 0.5)), first=FORWARD
    ),
    "residual forgotten": Fault(("jump",), ALL, before=at(without_residual), first=FORWARD),
    "logits x 8": Fault(("jump", "gradients"), ALL, begin=output_of("head", lambda _, y: y * 8), first=FORWARD),
    "final norm left out": Fault(
        ("jump", "dead units"),
        ALL,
        (),
        {"recipe": DYNAMIC},  # delayed scales would clip the head's input, and so take part
        begin=output_of("norm", lambda x, _: x),
        first=FORWARD,
    ),
    # data
    "another vocabulary": Fault(OF_DATA, "", DATA, batch=other_vocabulary, first=FORWARD),
    "one label in 16": Fault(OF_DATA, "", DATA, batch=labels_of(16, 6), first=("loss", "gradients")),
    "ranks read one shard": Fault((*OF_DATA, "repeats"), "", DATA, batch=one_shard, first=("loss", "gradients")),
    # the optimizer
    "betas swapped": Fault(("options",), "", ("betas",), before=option("betas", (0.999, 0.9)), first=("updates",)),
    "eps of 1": Fault(("options",), "", ("eps",), before=option("eps", 1.0), first=("updates",)),
    "averaged twice": Fault(("gradients",), "", ("divide", "mean"), begin=averaged_twice, first=("gradients",)),
    "mean weights left in": Fault(
        ("overwritten",), ALL, CHECKPOINT, before=average_left_in, first=("weights", "updates")
    ),
    "zero_grad of one group forgotten": Fault(
        ("gradients",), "", ("zero_grad",), begin=clears_vectors_only, begins=7, first=("gradients",)
    ),
    "rate of norms x 100": Fault(
        ("options", "learning rate"), "", ("lr",), begin=rate_of_norms, first=("updates", "learning rate")
    ),
    "warm-up begins again": Fault(
        ("learning rate", "warm-up"),
        "",
        ("lr",),
        begin=having(schedule=(lambda step: 1.0 if step < BEFORE + 6 else (step - BEFORE - 5) / 100,)),
        first=("learning rate", "updates"),
    ),
    # ranks
    "a rank without the checkpoint": Fault(
        ("ranks", "jump", *OF_DATA), ALL, CHECKPOINT, begin=rank_without_weights, first=FORWARD
    ),
    # FP8
    "history of 1, drifting amax": Fault(
        ("stale", "clipped"),
        INNER,
        CASTS,
        {"recipe": recipes.delayed(history_length=1)},
        begin=times_inside(32.0),
        fp8="yes",
        first=("inputs",),
    ),
    "outlier token": Fault(
        ("outliers", "flushed", "rounded"),
        ("attention.out",),
        CASTS,
        {"recipe": DYNAMIC},
        begin=outlier_token,
        fp8="yes",
        first=("inputs",),
    ),
    "head's weight with a margin": Fault(
        ("flushed", "rounded"),
        "head",
        CASTS,
        before=at(with_recipe("head", weight=Cast(E5M2, PerTensor(), margin=30))),
        fp8="yes",
        first=("loss", "gradients"),
    ),
    "E4M3 gradients": Fault(
        ("flushed", "rounded", "outliers"), ALL, CASTS, {"recipe": E4M3_GRADIENTS}, fp8="yes", begins=0
    ),
    "scales rounded up": Fault(
        ("clipped", "stale"), ALL, CASTS, DELAYED, before=scales_rounded_up, fp8="yes", begins=1
    ),
    "gradient's spike in a long history": Fault(
        ("flushed", "gradients"),
        ALL,
        CASTS,
        {"recipe": recipes.delayed(history_length=1024)},
        loss=times(2.0**34),
        fp8="yes",
        first=("gradients",),
    ),
    "margin of 17 in all casts": Fault(
        ("flushed", "rounded"),
        ALL,
        CASTS,
        DELAYED,
        before=at(lambda run: octavo.set_recipe(run.model, recipes.delayed(margin=17))),
        fp8="yes",
        begins=7,  # by the scales that follow
        first=FORWARD,
    ),
}


def with_adapters(run: Training) -> None:
    """Freeze the model, and train two thin matrices beside each layer (LoRA, arXiv 2106.09685)."""
    run.model.requires_grad_(False)
    adapters = []
    for name in run.layers("attention.out", "fc2"):
        layer = run.model.get_submodule(name)
        down = nn.Parameter(torch.randn(4, layer.in_features) * layer.in_features**-0.5)
        up = nn.Parameter(torch.zeros(layer.out_features, 4))
        layer.register_parameter("adapter_down", down)
        layer.register_parameter("adapter_up", up)
        layer.register_forward_hook(lambda _, inputs, y, down=down, up=up: y + F.linear(F.linear(inputs[0], down), up))
        adapters += [down, up]
    run.optimizer = torch.optim.AdamW(adapters, lr=run.lr)


def muon(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices of blocks, and its AdamW for embedding, head and vectors."""
    params = [param for group in groups for param in group["params"]]
    others = [param for param in params if param.ndim < 2 or 256 in param.shape or param.shape[0] == 4]
    matrices = [param for param in params if all(param is not each for each in others)]
    both = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return octavo.optim.Muon(both, lr=lr, adamw={"lr": lr}, moments="fp32")


def shorter(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences of 8, 16 and then 32 bytes: a curriculum by length."""
    length = 8 * 2 ** min(2, run.step // 5) if run.step >= 0 else SIZES["context"]
    return tokens[:, :length], targets[:, :length]


def scale_found(run: Training) -> None:
    """Set the loss scale as a GradScaler does: too high at first, and once more after it grew."""
    run.loss_scale = {0: 2.0**40, 1: 2.0**39, 9: 2.0**40}.get(run.step, 2.0**16)


def frozen_by_choice(run: Training) -> None:
    run.model.embedding.requires_grad_(False)
    run.model.blocks[0].requires_grad_(False)


FOURTH_HEALTHY: Mapping[str, Fault] = {
    "LoRA": Fault(begin=with_adapters),
    "a block frozen by choice": Fault(begin=frozen_by_choice),
    "a rate that ends at 0": Fault(
        options={"schedule": lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1, max(0, step - BEFORE) / (STEPS - 3)))}
    ),
    "one sequence a batch": Fault(options={"lr": 1e-3}, batch=lambda run, x, y: (x[:1], y[:1])),
    "a curriculum by length": Fault(batch=shorter),
    "a second epoch": Fault(batch=lambda run, *_: batches(run.seed).training(run.done % BEFORE)),
    "Muon": Fault(options={"optimizer_of": muon, "lr": 3e-3}),
    "experts that are balanced": Fault(
        models=("experts",), after=lambda run: balance(run.model.mixtures, Ranks()) if run.model.mixtures else None
    ),
    "float16, steps skipped for its scale": Fault(options=SCALER, before=scale_found),
    "a batch that grows": Fault(batch=lambda run, x, y: (x[: 2 + run.step // 2], y[: 2 + run.step // 2])),
    "a quarter of labels": Fault(batch=labels_of(4, 0)),
    "dropout": Fault(begin=lambda run: run.model.embedding.register_forward_hook(lambda _, __, y: F.dropout(y, 0.1))),
}
