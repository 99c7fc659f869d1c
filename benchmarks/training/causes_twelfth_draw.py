"""The twelfth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, of
which five change the forward pass and three the backward pass alone. All of FP8's are of a kernel: hooks change what
layers in FP8 compute, and no others; three of them change gradients alone. Truth is stated and measured as the eleventh
draw's, for seeds 0 to 2; no kind lies between "FP8 is the cause" and "FP8 is not", and FP8's have no damage at all in
high precision. ``python -m benchmarks.training.causes_twelfth_draw`` measures it again, for the seeds that are drawn.
Fourteen kinds worsen the loss in each run: by 2.0 to 34 %, but four-bit codes by 57 to 127 %, outer steps by 47 to
107 %, weights read as float16 by 752 to 981 %. The other ten do so by less than 2 % in some runs, but turn gradients by
0.1 or more: inverse scales by 0.27 to 0.52 (the loss is 0.0 to 0.6 % worse), turned values by 0.28 to 0.55 (0.2 to
1.0 %), attention's gradient by 0.29 to 0.55 (0.0 to 1.0 %), scores at zero by 0.32 to 0.72 (0.3 to 1.4 %), the gate's
gradient by 0.39 to 0.47 (-0.1 to 0.7 %), fixed point by 0.47 to 0.67 (0.1 to 1.0 %), the others by 0.58 or more, of
which the saved codes leave the loss as it is. Of inverse scales the loss is smaller, too, as in the tenth draw.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, BEFORE, CHECKPOINT, DATA, SCALER, SIZES, Fault, Training, at, batches
from benchmarks.training.causes_eleventh_draw import labels_of, of_backward, returned, with_backward
from benchmarks.training.causes_parts import (
    BY_TENSOR,
    FAST,
    FORWARD,
    LAST_OUT,
    MLPS,
    MOMENTUM,
    OF_DATA,
    OUT,
    OUTPUTS,
    WRITTEN,
    attend,
    attending,
    keep_logits,
    main,
    of_fp8,
    option,
    output_of,
    times_inside,
    with_teacher,
)
from benchmarks.training.causes_tenth_draw import PLACES, ROWS, of_gradients, of_kernel
from octavo import E4M3, recipes
from octavo.nn.transformer import rotate

ANGLES = PLACES[:, None] * 100.0 ** -torch.linspace(0, 1, SIZES["width"] // 2)
WAVES = torch.cat([ANGLES.sin(), ANGLES.cos()], -1)  # [C, W], as of a model that adds positions to embeddings


def on_old_sums(_: Any, __: Tensor, y: Tensor) -> Tensor:
    """Begin the sums of each second tile of 16 rows with those of the tile before."""
    tiles = y.flatten(0, -2).unflatten(0, (-1, 2, 16))
    return with_backward(tiles.cumsum(1).view_as(y), y)


def in_pairs_swapped(x: Tensor) -> Tensor:
    """Read the two codes of each byte in the other order."""
    return with_backward(x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), x)


def of_tiles_that_overlap(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sum up tiles of three quarters of the features, of which the last one is moved back to end where they do."""
    both = slice(x.shape[-1] // 4, x.shape[-1] * 3 // 4)
    return with_backward(y + F.linear(x[..., both], layer.weight[:, both]), y)


def read_by_next_scale(run: Training) -> None:
    """Read codes of inputs by the scale of the amax that was measured beside the cast, while inputs shrink."""

    def after(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        if not run.begun or not hasattr(layer, "delayed_scale"):
            return None
        return y * (inputs[0].detach().abs().max() * layer.delayed_scale[0] / E4M3.limit)

    times_inside(0.25, *MLPS)(run)
    for layer in map(run.model.get_submodule, run.layers(*MLPS)):
        layer.register_forward_hook(after)


def by_inverse_in_float16(grad: Tensor) -> Tensor:
    """Multiply each row's codes by the inverse of its scale as float16 has it."""
    inverse = grad.abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / E4M3.limit
    return grad / inverse * inverse.half().to(grad.dtype)


of_inverses = of_kernel(lambda x: x, returned(by_inverse_in_float16))


def of_bare_codes(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sum up the weight's gradient over rows whose scales are left out, by a mean scale in place of each one's."""

    def equal(grad: Tensor) -> Tensor:
        amax = grad.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
        return grad / amax * amax.mean()

    of_weight = F.linear(x.detach(), layer.weight)
    of_codes = of_weight.view_as(of_weight)
    if of_codes.requires_grad:
        of_codes.register_hook(equal)
    return with_backward(y, y - of_weight + of_codes)


def of_first_block(run: Training) -> None:
    """Multiply the last block's gradients by the codes that the first one saved, as in one buffer for each shape."""
    saved: dict[str, Tensor] = {}

    def after(layer: Any, inputs: tuple[Tensor], y: Tensor) -> Tensor | None:
        if not run.begun or layer.recipe.is_high_precision:
            return None
        return with_backward(y, y + F.linear(saved["x"] - inputs[0].detach(), layer.weight))

    first, last = map(run.model.get_submodule, run.layers(OUT))
    first.register_forward_pre_hook(lambda _, inputs: saved.update(x=inputs[0].detach()))
    last.register_forward_hook(after)


def by_rareness(run: Any, loss: Tensor) -> Tensor:
    """Return the mean loss where each byte of the alphabet counts as much as any other, however rare it is."""
    counts = labels_of(run).flatten().bincount(minlength=256).clamp(min=1)
    return F.cross_entropy(run.logits.mT, labels_of(run), 1 / counts) if run.begun else loss


def cut_off(run: Any, loss: Tensor) -> Tensor:
    each = F.cross_entropy(run.logits.mT, labels_of(run), reduction="none")
    return each.clamp(max=2.0).mean() if run.begun else loss


def of_other_teacher(run: Any, loss: Tensor) -> Tensor:
    """Return the mean of the loss and that of a teacher's answers, who numbers bytes from one, not from zero."""
    with torch.no_grad():
        answers = run.teacher(batches(run.seed).training(run.done)[0]).float().softmax(-1).roll(1, -1)
    return (loss + F.cross_entropy(run.logits.mT, answers.mT)) / 2 if run.begun else loss


def outer_step(run: Any) -> None:
    """Step away from the weights of four steps before by minus the change since, in each fourth step (2311.08105)."""
    params = [param.data for param in run.model.parameters()]
    if run.step % 4 == run.at % 4:
        for param, old in zip(params, vars(run).get("old", ()), strict=run.begun):
            param.copy_(2 * old - param)
        run.old = [param.clone() for param in params]


def read_as_float16(run: Training) -> None:
    for weight in map(run.weight, run.layers()):
        weight.copy_(weight.bfloat16().view(torch.float16))


def each_second_byte(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Read 16-bit numbers from a text of bytes, and drop their higher half."""
    text, following = dataclasses.replace(batches(run.seed), context=2 * SIZES["context"]).training(run.done)
    return (text[:, ::2], following[:, 1::2]) if run.begun else (tokens, targets)


def held_labels(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, targets[:, PLACES // 4 * 4] if run.begun else targets


def not_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend without the last division by each row's sum."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).tril()
    return (scores - scores.amax(-1, keepdim=True)).exp().tril() @ v


def to_least_likely(run: Training) -> None:
    """Send tokens to the experts with the lowest scores."""

    def choose(mixture: Any, _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scores, index = mixture.router(inputs[0].flatten(0, -2)).topk(mixture.k, largest=False)
        return (inputs[0], index, scores / scores.sum(-1, keepdim=True)) if run.begun else inputs

    for mixture in run.model.mixtures:
        mixture.experts.register_forward_pre_hook(functools.partial(choose, mixture))


def branches_alone(run: Training) -> None:
    """Lose the gradient along the residual stream, and keep that through attention and MLPs."""
    for block in run.model.blocks:
        block.forward = lambda x, rotary=None, block=block: (
            (y := x.detach() + block.attention(x, rotary)).detach() + block.mlp(y)
        )


def gate_detached(_: Any, __: Any, y: Tensor | tuple[Tensor, ...]) -> Any:
    gate, up = y if isinstance(y, tuple) else y.chunk(2, -1)
    return (gate.detach(), up) if isinstance(y, tuple) else torch.cat([gate.detach(), up], -1)


TWELFTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "sums that begin with another tile's": of_fp8(
        ("stale", "jump"), FORWARD, begin=of_kernel(lambda x: x, on_old_sums)
    ),
    "four-bit codes in the other order": of_fp8(
        ("stale", "jump"),
        FORWARD,
        options={"recipe": recipes.nvfp4()},
        models=("dense",),
        begin=of_kernel(in_pairs_swapped),
    ),
    "tiles of features that overlap": of_fp8(
        ("stale", "jump"), FORWARD, begin=of_kernel(lambda x: x, of_tiles_that_overlap)
    ),
    "codes read by the next step's scale": of_fp8(
        ("stale", "jump"), FORWARD, options={"recipe": recipes.delayed(4, "most_recent")}, begin=read_by_next_scale
    ),
    "inverse scales in float16": of_fp8(
        ("flushed", "gradients", "rounded", "stale"),
        ("gradients",),
        options=ROWS | FAST,
        begin=lambda run: [of_inverses(run), parts.gradients(lambda grad: grad * 16)(run)],
        loss=lambda run, loss: loss / 16 if run.begun else loss,  # the mean over so many batches
    ),
    "weights' gradients without row scales": of_backward(
        options=ROWS | FAST, begin=of_kernel(lambda x: x, of_bare_codes)
    ),
    "saved codes of the first block": of_backward(LAST_OUT, begin=of_first_block),
    # gradients, the optimizer and the loss
    "rare bytes weigh most": of_gradients(begin=keep_logits, loss=by_rareness),
    "losses above 2 cut off": of_gradients(begin=keep_logits, loss=cut_off),
    "a teacher of another vocabulary": of_gradients(begin=with_teacher, loss=of_other_teacher),
    "gradients in fixed point": of_gradients(begin=parts.gradients(lambda grad: (grad * 256).round() / 256)),
    "dampening of 1": parts.of_step(
        ("options",), ("dampening",), ("updates",), options=MOMENTUM, before=option("dampening", 1.0)
    ),
    # weights and data
    "outer steps with the wrong sign": Fault(("overwritten",), ALL, CHECKPOINT, FAST, before=outer_step, first=WRITTEN),
    "bfloat16 weights read as float16": Fault(
        ("overwritten",), ALL, CHECKPOINT, BY_TENSOR, before=at(read_as_float16), first=WRITTEN
    ),
    "each second byte alone": Fault(OF_DATA, "", DATA, batch=each_second_byte, first=FORWARD),
    "labels held for four bytes": Fault(OF_DATA, "", DATA, batch=held_labels, first=("loss", "gradients")),
    # the program
    "values turned by positions": parts.of_forward(
        OUTPUTS,
        before=at(lambda run: attending(lambda q, k, v: attend(q, k, rotate(v, (run.model.cos, run.model.sin))))(run)),
    ),
    "softmax not divided by its sum": parts.of_forward(OUTPUTS, before=at(attending(not_divided))),
    "scores of later positions at zero": parts.of_forward(
        OUTPUTS, before=at(attending(lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).tril().softmax(-1) @ v))
    ),
    "positions added to embeddings": parts.of_forward(begin=output_of("embedding", lambda _, y: y + WAVES)),
    "the least likely experts": Fault(("jump",), ALL, models=("experts",), begin=to_least_likely, first=FORWARD),
    "no gradient along the residual": of_gradients(before=at(branches_alone)),
    "no gradient through the gate": of_gradients(begin=parts.around(lambda x: x, gate_detached, "fc1", "gate_up")),
    "attention's gradient without its mask": of_gradients(
        before=at(attending(lambda *qkv: with_backward(attend(*qkv), F.scaled_dot_product_attention(*qkv))))
    ),
}


def with_vectors(run: Training) -> None:
    """Freeze the model, and train factors of what attention's last layers read (arXiv 2205.05638)."""
    run.model.requires_grad_(False)
    factors = [nn.Parameter(torch.ones(SIZES["width"])) for _ in run.model.blocks]
    for name, factor in zip(run.layers(OUT), factors, strict=True):
        layer = run.model.get_submodule(name)
        layer.register_parameter("factor", factor)
        layer.register_forward_pre_hook(lambda _, inputs, factor=factor: (inputs[0] * factor,))
    run.optimizer = torch.optim.AdamW(factors, lr=run.lr)


def new_embedding(run: Training) -> None:
    """Freeze the model, and train an embedding that begins anew, as for another vocabulary (arXiv 1910.11856)."""
    run.model.requires_grad_(False)
    nn.init.normal_(run.model.embedding.weight)
    run.optimizer = torch.optim.AdamW([run.model.embedding.weight.requires_grad_()], lr=run.lr)


TWELFTH_HEALTHY: Mapping[str, Fault] = {
    "averaged SGD": Fault(options={"optimizer_of": torch.optim.ASGD, "lr": 0.1}),
    "factors beside a frozen model": Fault(begin=with_vectors),
    "a new embedding on a frozen model": Fault(options={"lr": 3e-2}, begin=new_embedding),
    "routers frozen by choice": Fault(
        models=("experts",), begin=lambda run: [each.router.requires_grad_(False) for each in run.model.mixtures]
    ),
    "one expert for each byte": Fault(
        fresh=True, models=("experts",), begin=lambda run: [vars(each).update(k=1) for each in run.model.mixtures]
    ),
    "sequences that grow as their number falls": Fault(
        batch=lambda run, x, y: (x.reshape(-1, n := 8 << min(2, run.step // 5)), y.reshape(-1, n))
    ),
    "sixteen bytes a step": Fault(options={"lr": 3e-4}, batch=lambda run, x, y: (x[:2, :8], y[:2, :8])),
    "float16, another scale in each step": Fault(
        options=SCALER, before=lambda run: vars(run).update(loss_scale=2.0 ** random.Random(run.step).randint(6, 14))
    ),
    "the last byte alone": Fault(
        options={"lr": 1e-3}, batch=lambda run, x, y: (x, y.long().masked_fill(PLACES < SIZES["context"] - 1, -100))
    ),
    "Muon whose rate ends at 0": Fault(
        options={"optimizer_of": parts.muon, "schedule": lambda step: max(0.0, 1 - (step - BEFORE) / 12)}
    ),
    "begun with a tenth of the usual weights": Fault(
        fresh=True, begin=lambda run: [run.weight(name).div_(10) for name in run.layers()]
    ),
    "blocks of scales from the ninth step on": Fault(
        before=lambda run: octavo.set_recipe(run.model, recipes.blockwise()) if run.step == 8 else None
    ),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "twelfth draw", TWELFTH_DRAW, TWELFTH_HEALTHY))
