"""The sixth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Eight faults are FP8's own, eight are of the optimizer, the schedule or the data, eight of the program, of which seven
change the forward pass alone. Their truth is stated and measured as the fifth draw's, without octavo.inspect: no kind
lies between "FP8 is the cause" and "FP8 is not". ``python -m benchmarks.training.causes_sixth_draw`` measures it again.
Ten steps with wrong gradients hardly change the loss of a model at the rate of 3e-3, so those faults have a rate of
1e-2 in all recorded steps, as has their twin.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import octavo
from benchmarks.training.causes import ALL, BEFORE, DATA, DELAYED, SIZES, Do, Fault, Training, at, batches, having
from benchmarks.training.causes_fifth_draw import LONG, MLPS, STEPPED, main, of_fp8
from benchmarks.training.causes_fourth_draw import DYNAMIC, FORWARD, OF_DATA, OUTPUTS, attending, option, output_of
from octavo import E4M3, E5M2, Cast, PerBlock, PerTensor, RecipeMap, recipes
from octavo.nn.transformer import rotate
from octavo.scaling.recipe import Recipe
from octavo.train.config import ModelConfig
from octavo.train.model import next_byte_loss
from octavo.train.trainer import build_model

OUT, LAST_OUT, HUGE, SMALL = "attention.out", "blocks.1.attention.out", 2.0**24, 2.0**-36
FAST, BY_TENSOR = {"lr": 1e-2}, {"recipe": DYNAMIC}
MOMENTUM = {"optimizer_of": functools.partial(torch.optim.SGD, momentum=0.9), "lr": 0.03}
CONSTANT, GRADIENTS = 2.0**11, ("gradients", *STEPPED)
SQUARE = (Cast(E4M3, PerBlock(128, 128), power_of_two=True),) * 2
SQUARES = Recipe(SQUARE, SQUARE, SQUARE, name="squares")
DROPPED = Cast(E4M3, PerTensor(), margin=24)  # so far below E4M3's numbers that all of an operand is 0


def around(before: Callable[[Tensor], Tensor], after: Callable[..., Tensor], *ends: str) -> Do:
    """Return a change of layers' inputs and, of (layer, changed input, output), of their outputs, from the fault on."""

    def begin(run: Training) -> None:
        for layer in map(run.model.get_submodule, run.layers(*ends)):
            layer.register_forward_pre_hook(lambda _, inputs: (before(inputs[0]), *inputs[1:]) if run.begun else None)
            layer.register_forward_hook(lambda layer, inputs, y: after(layer, inputs[0], y) if run.begun else None)

    return begin


def one_in(count: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Return factors [B, 1, 1] for sequences: ``factor`` for one in so many, else 1."""
    return lambda x: torch.where(torch.arange(len(x)) % count == 0, factor, 1.0)[:, None, None]


def rows_larger(factors: Callable[[Tensor], Tensor], *ends: str) -> Do:
    """Return a change that multiplies some rows of layers' inputs, and divides their outputs by as much."""
    return around(lambda x: x * factors(x), lambda _, __, y: y / factors(y), *ends)


def amax_of_half(run: Training) -> None:
    """Set inputs' scales as if amaxes were those of the half whose inputs are not 64 times as large."""
    for layer in map(run.model.get_submodule, run.layers(OUT)):
        if hasattr(layer, "delayed_scale"):
            layer.delayed_scale[0] *= 64


def weights_with_a_mean(run: Training) -> None:
    """Add 2 to all weights of some layers, whose casts are E5M2 from now on."""
    names = run.layers(OUT, *MLPS)
    casts = {"output": (run.recipe.output[0], Cast(E5M2, PerTensor()))}
    octavo.set_recipe(run.model, RecipeMap(run.recipe, dict.fromkeys(names, casts)))
    for name in names:
        run.weight(name).add_(2.0)


def queries_beside_values(run: Training) -> None:
    """Store queries and keys in other units than the values of the same matrix, and divide them again in attention."""
    for name in run.layers("qkv.linear"):
        run.weight(name)[: 2 * SIZES["width"]] *= HUGE
    attending(lambda q, k, v: attend(q / HUGE, k / HUGE, v))(run)


def without_weight_gradients(run: Training) -> None:
    recipe = run.recipe
    octavo.set_recipe(run.model, dataclasses.replace(recipe, grad_weight=(recipe.grad_weight[0], DROPPED)))


def gradients(change: Callable[[Tensor], Tensor]) -> Do:
    """Return a change of each parameter's gradient, before clipping, from the fault's step on."""

    def begin(run: Training) -> None:
        def hook(param: Tensor) -> None:
            if run.begun and param.grad is not None:
                param.grad.copy_(change(param.grad))

        for param in run.model.parameters():
            param.register_post_accumulate_grad_hook(hook)

    return begin


def noisy(grad: Tensor) -> Tensor:
    return grad + 100 * grad.std(correction=0) * torch.randn_like(grad)


def of_blocks_swapped(run: Training) -> None:
    """Give each block the gradients of the other one, as buckets that are unpacked in another order."""

    def swap(*_: object) -> None:
        first, second = ([*block.parameters()] for block in run.model.blocks)
        for one, other in zip(first, second, strict=True) if run.begun else ():
            one.grad, other.grad = other.grad, one.grad

    run.optimizer.register_step_pre_hook(swap)


def second_moments_lost(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].zero_()


def drawn_rate(step: int) -> float:
    """Return a schedule's factor that is drawn for each step from the fault's on, as in a search of rates."""
    return random.Random(step).choice((0.1, 10.0, 30.0)) if step >= BEFORE + 6 else 1.0


def masked(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace 30 % of the tokens that the model reads by random ones, as for training by filling gaps."""
    is_hidden = torch.rand(tokens.shape) < (0.3 if run.begun else 0)
    return torch.randint_like(tokens, 256).where(is_hidden, tokens), targets


attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def heads_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return heads as if [H, C, D] were read as [C, H, D], without moving them back."""
    y = attend(q, k, v)
    return y.reshape(len(y), y.shape[2], y.shape[1], -1).transpose(1, 2)


def keys_turned_back(run: Training) -> None:
    """Turn keys by minus their position's angle."""
    back = run.model.cos, -run.model.sin
    attending(lambda q, k, v: attend(q, rotate(rotate(k, back), back), v))(run)


def norms(change: Callable[..., Tensor]) -> Do:
    """Return a change of all norms' outputs, by weight, input and output."""

    def begin(run: Training) -> None:
        for name, norm in run.model.named_modules():
            if isinstance(norm, nn.RMSNorm):
                output_of(name, functools.partial(change, norm.weight))(run)

    return begin


def over_positions(weight: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return x * x.square().mean(1, keepdim=True).rsqrt() * weight


def residuals_twice(run: Training) -> None:
    for name in (f"blocks.{block}.{part}" for block in range(SIZES["layers"]) for part in ("attention", "mlp")):
        output_of(name, torch.add)(run)


def of_step(causes: tuple[str, ...], remedies: tuple[str, ...], first: tuple[str, ...], **does: Any) -> Fault:
    """Return a fault of gradients or of the optimizer's step."""
    return Fault(causes, "", remedies, first=first, **does)


def of_text(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault of data that changes the text [B, C + 1] of each batch."""

    def batch(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        whole = change(torch.cat([tokens, targets[:, -1:]], 1))
        return (whole[:, :-1], whole[:, 1:]) if run.begun else (tokens, targets)

    return Fault(OF_DATA, "", DATA, batch=batch, first=FORWARD)


def of_forward(causes: tuple[str, ...] = ("jump",), **does: Do) -> Fault:
    """Return a fault of the forward pass alone."""
    return Fault(causes, ALL, first=FORWARD, **does)


SIXTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "loss scale that falls": of_fp8(
        ("flushed", "stale"),
        ("gradients",),
        options=LONG | FAST,
        begin=gradients(lambda g: g / SMALL),
        loss=lambda run, loss: loss * (SMALL if run.begun else 1),
    ),
    "garbage in padded rows": of_fp8(
        ("outliers", "flushed"),
        FORWARD,
        options=BY_TENSOR,
        begin=around(lambda x: torch.cat([x, torch.full_like(x[:1], HUGE)]), lambda _, __, y: y[:-1], OUT),
    ),
    "blocks that span sequences": of_fp8(
        ("outliers", "flushed"), FORWARD, options={"recipe": SQUARES}, begin=rows_larger(one_in(4, HUGE), OUT)
    ),
    # feature 5 of each block of 32 has a constant, which the output loses again
    "constant features in blocks": of_fp8(
        ("outliers", "rounded"),
        FORWARD,
        LAST_OUT,
        options={"recipe": recipes.mx()},
        begin=around(
            lambda x: x + CONSTANT * (torch.arange(x.shape[-1]) % 32 == 5),
            lambda layer, _, y: y - CONSTANT * layer.weight[:, 5::32].sum(1),
            LAST_OUT,
        ),
    ),
    "E5M2 weights with a mean": of_fp8(
        ("rounded", "overwritten"),
        ("weights", *FORWARD),
        begin=around(lambda x: x, lambda _, x, y: y - 2 * x.sum(-1, keepdim=True), OUT, *MLPS),
        before=at(weights_with_a_mean),
    ),
    "queries in other units than values": of_fp8(
        ("flushed", "outliers", "overwritten"),
        ("weights", *FORWARD),
        options=BY_TENSOR,
        before=at(queries_beside_values),
    ),
    "amax of half of the ranks": of_fp8(
        ("clipped", "stale", "ranks"),
        FORWARD,
        options=DELAYED,
        begin=rows_larger(one_in(2, 64.0), OUT),
        after=at(amax_of_half, True),
    ),
    "weights' gradients with a margin": of_fp8(
        ("flushed",), ("gradients",), options=BY_TENSOR | FAST, before=at(without_weight_gradients)
    ),
    # the optimizer and the schedule
    "second moments lost": of_step(
        ("state",), ("load_state_dict",), ("updates",), options=BY_TENSOR | {"lr": 1e-3}, before=at(second_moments_lost)
    ),
    "momentum of 1.3": of_step(
        ("options",), ("momentum",), ("updates",), options=MOMENTUM, before=option("momentum", 1.3)
    ),
    "noise in gradients": of_step(("gradients",), (), GRADIENTS, options=FAST, begin=gradients(noisy)),
    "clipped to 1e-9": of_step(
        ("gradients",), ("clip_grad_norm_",), GRADIENTS, options=FAST, before=at(having(clip=(1e-9,)))
    ),
    "rates drawn at random": of_step(
        ("learning rate",), ("lr",), ("learning rate", "updates"), begin=having(schedule=(drawn_rate,))
    ),
    # data
    "text reversed": of_text(lambda text: text.flip(1)),
    "text in capitals": of_text(lambda text: text - 32 * ((text >= ord("a")) & (text <= ord("z")))),
    "tokens masked": Fault(OF_DATA, "", DATA, batch=masked, first=FORWARD),
    # the program
    "attention to itself alone": of_forward(OUTPUTS, before=at(attending(lambda q, k, v: v))),
    "heads not moved back": of_forward(OUTPUTS, before=at(attending(heads_left))),
    "keys turned back": of_forward(OUTPUTS, before=at(keys_turned_back)),
    # as in models that store gains less one
    "gains of one plus the weight": of_forward(begin=norms(lambda _, x, y: y + F.rms_norm(x, x.shape[-1:]))),
    "norms over positions": of_forward(begin=norms(over_positions)),
    "residuals added twice": of_forward(begin=residuals_twice),
    "logits capped at 2": of_forward(begin=output_of("head", lambda _, y: 2 * torch.tanh(y / 2))),
    "gradients of blocks swapped": Fault(("gradients",), ALL, (), FAST, begin=of_blocks_swapped, first=GRADIENTS),
}


def rates_by_depth(run: Training) -> None:
    """Train by an optimizer whose rate is 0.7 times as large in each part before the head."""
    model = run.model
    parts = [[model.norm, model.head], [model.blocks[1]], [model.blocks[0]], [model.embedding]]
    groups = [{"params": [param for each in part for param in each.parameters()]} for part in parts]
    run.optimizer = torch.optim.AdamW(groups, lr=run.lr)

    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for depth, group in enumerate(optimizer.param_groups):
            group["lr"] *= 0.7**depth

    run.optimizer.register_step_pre_hook(scale)


def checkpointed(run: Training) -> None:
    for block in run.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def with_early_exit(run: Training) -> None:
    run.model.blocks[0].register_forward_hook(lambda _, __, x: vars(run).update(early=x))


def early_loss(run: Training, loss: Tensor) -> Tensor:
    """Return the loss and a third of the first block's, whose output the same head reads."""
    _, targets = batches(run.seed).training(run.done)
    return loss + next_byte_loss(run.model.head(run.model.norm(run.early)), targets) / 3


def counting(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes that count on from each sequence's first."""
    numbers = (tokens[:, :1].long() + torch.arange(SIZES["context"] + 1)) % 256
    return (numbers[:, :-1], numbers[:, 1:]) if run.step >= 0 else (tokens, targets)


def padded(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """End sequences after 4 to 32 bytes, and leave out of the loss what follows."""
    lengths = torch.randint(4, SIZES["context"] + 1, (len(tokens), 1))
    is_text = torch.arange(SIZES["context"]) < lengths
    return tokens * is_text, targets.long().masked_fill(~is_text, -100)


def deep(run: Training) -> None:
    """Replace the model by one of six blocks of width 32, which begins its training."""
    run.model = build_model(ModelConfig(**{**SIZES, "width": 32, "layers": 6}), "float32", run.seed)
    octavo.convert(run.model, run.recipe)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr)


def looks_ahead(run: Training) -> None:
    """Return to the mean of the weights and those of five steps before, in each fifth step (arXiv 1907.08610)."""
    params = [param.data for param in run.model.parameters()]
    slow = vars(run).setdefault("slow", [param.clone() for param in params])
    if run.step % 5 == 4:
        torch._foreach_lerp_(slow, params, 0.5)
        torch._foreach_copy_(params, slow)


def pruned(run: Training) -> None:
    """Hold the smaller half of the MLPs' weights at zero."""
    weights = [run.weight(name) for name in run.layers("fc1", "gate_up", *MLPS)]
    masks = vars(run).setdefault("masks", [weight.abs() > weight.abs().median() for weight in weights])
    for weight, mask in zip(weights, masks, strict=True):
        weight.mul_(mask)


BY_LAYER = {"head": recipes.dynamic_with_output_hp(), "blocks.0.*": recipes.delayed(history_length=4)}

SIXTH_HEALTHY: Mapping[str, Fault] = {
    "Adafactor": Fault(options={"optimizer_of": torch.optim.Adafactor, "lr": 1e-2}),
    "rates by depth": Fault(begin=rates_by_depth),
    "activation checkpointing": Fault(begin=checkpointed),
    "an early exit": Fault(begin=with_early_exit, loss=early_loss),
    "a new task from the first step": Fault(batch=counting),
    "padded sequences": Fault(batch=padded),
    "six blocks of width 32": Fault(fresh=True, models=("dense",), begin=deep),
    "Lookahead": Fault(after=looks_ahead),
    "half of the MLPs pruned": Fault(begin=pruned, after=pruned),
    "recipes by layer": Fault(options={"recipe": RecipeMap(recipes.rowwise_with_gw_hp(), BY_LAYER)}),
    "high precision at the end": Fault(
        before=lambda run: octavo.set_recipe(run.model, recipes.high_precision()) if run.step == 11 else None
    ),
    "a rate that rises again": Fault(options={"schedule": lambda step: min(1.0, max(1, step - BEFORE + 1) / 8)}),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "sixth draw", SIXTH_DRAW, SIXTH_HEALTHY))
