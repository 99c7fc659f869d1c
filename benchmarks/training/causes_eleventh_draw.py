"""The eleventh draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, of
which five change the forward pass and three the backward pass alone. Six of FP8's are of a kernel: hooks change what
layers in FP8 compute, and no others; three of them change gradients alone. Truth is stated and measured as the tenth
draw's, for seeds 0 to 2; no kind lies between "FP8 is the cause" and "FP8 is not", and FP8's have no damage at all in
high precision. ``python -m benchmarks.training.causes_eleventh_draw`` measures it again, for the seeds that are drawn.
Nine kinds worsen the loss by 2.8 to 26 % in each run. The other fifteen do so by less than 2 % in some runs, but turn
gradients by 0.1 or more: amaxes reduced over roles by 0.13 to 0.72 (the loss is 0.0 to 1.2 % worse), the mask that
hides the token itself by 0.15 to 0.42 (0.1 to 0.7 %), norms of parts by 0.18 to 0.44 (0.2 to 0.7 %), the rotary's
gradient by 0.35 to 0.57 (0.0 to 0.4 %), attention's dropout by 0.41 to 0.80 (1.4 to 3.3 %), the others by 0.46 or more.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, BEFORE, CHECKPOINT, DATA, SIZES, Fault, Training, at, batches, trained
from benchmarks.training.causes_ninth_draw import of_fast_step
from benchmarks.training.causes_parts import (
    ALWAYS,
    BY_TENSOR,
    FAST,
    FORWARD,
    GRADIENTS,
    MLPS,
    OF_DATA,
    OUT,
    OUTPUTS,
    PLAIN,
    WRITTEN,
    attend,
    attending,
    keep_logits,
    main,
    of_fp8,
    states,
)
from benchmarks.training.causes_tenth_draw import PLACES, ROWS, of_gradients, of_kernel
from octavo import E4M3, E5M2, Cast, PerRow, RecipeMap, recipes
from octavo.nn.transformer import rotate
from octavo.train.model import next_byte_loss

ENDS = (OUT, *MLPS, "head")  # of branches and of the model
TILE = 64  # rows of one expert that a kernel computes together
FORMAT = recipes.delayed(3).output[0]
THREE_STEPS = dataclasses.replace(recipes.delayed(3), grad_input=(FORMAT,) * 2, grad_weight=(FORMAT,) * 2)
HIDES_ITSELF = (PLACES < PLACES[:, None]) | (PLACES[:, None] == 0)  # the first position, which has none, sees all
SAVED = {"recipe": dataclasses.replace(recipes.dynamic(), saved=Cast(E4M3, PerRow()))}


def with_backward(y: Tensor, same: Tensor) -> Tensor:
    """Return y, with the gradient of ``same``."""
    return same + (y - same).detach()


def returned(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a change of the gradient of a layer's result."""
    return lambda _, __, y: [y.requires_grad and y.register_hook(change), y][-1]


def read_as_e4m3(grad: Tensor) -> Tensor:
    """Cast a gradient to E5M2 and read its bytes as E4M3, by a scale that leaves the largest number what it is."""
    amax = grad.abs().max().clamp(min=2.0**-60)
    codes = (grad / amax * E5M2.limit).to(torch.float8_e5m2).view(torch.float8_e4m3fn).to(grad.dtype)
    return codes * amax / codes.abs().max().clamp(min=2.0**-9)


def below_largest(x: Tensor) -> Tensor:
    """Saturate what is below minus the largest number of its row."""
    return with_backward(torch.maximum(x, -x.amax(-1, keepdim=True).clamp(min=0.0)), x)


def summed_in_three_bits(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Add up products of eight features each, and round each sum towards zero to three bits."""
    total = torch.zeros_like(y)
    for part, weight in zip(x.split(8, -1), layer.weight.split(8, -1), strict=True):
        fraction, exponent = torch.frexp(total + F.linear(part, weight).detach())
        total = torch.ldexp((fraction * 8).trunc() / 8, exponent)
    return with_backward(total, y)


def in_whole_tiles(run: Training) -> None:
    """Let each expert in FP8 end at the end of a tile."""

    def begin(layer: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        rows, ends = inputs
        whole = ((ends + TILE - 1) // TILE * TILE).clamp(max=len(rows)).to(ends.dtype)
        return (rows, whole) if run.begun and not layer.recipe.is_high_precision else None

    for layer in map(run.model.get_submodule, run.layers("gate_up", "down")):
        layer.register_forward_pre_hook(begin)


def of_last_split(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Leave the last quarter of sequences in the weight's gradient, as if each split overwrote those before."""
    is_lost = (torch.arange(len(x)) < len(x) * 3 // 4)[:, None, None]
    return with_backward(y, y - F.linear((x * is_lost).detach(), layer.weight))


def in_other_layout(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Multiply the gradient of a square layer's result by the weight's transpose."""
    weight = layer.weight.detach()
    return with_backward(y, y + F.linear(x, weight.t() - weight)) if y.shape == x.shape else y


def labels_of(run: Training) -> Tensor:
    return batches(run.seed).training(run.done)[1].long()


def of_guesses(run: Training, loss: Tensor) -> Tensor:
    """Return the mean of the loss and that of the bytes that the model thinks likeliest."""
    return loss.lerp(next_byte_loss(run.logits, run.logits.argmax(-1)), 0.5) if run.begun else loss


def with_penalty(run: Training, loss: Tensor) -> Tensor:
    return loss + sum(weight.abs().sum() for weight in run.model.parameters()) / 1000 if run.begun else loss


def of_rank_one(grad: Tensor) -> Tensor:
    """Return the row times a column that is nearest to a matrix (arXiv 1905.13727), and vectors as they are."""
    columns, factors, rows = torch.linalg.svd(grad if grad.ndim > 1 else grad[None], full_matrices=False)
    return (columns[..., :1] * factors[..., None, :1] @ rows[..., :1, :]).view_as(grad)


def older(run: Training) -> None:
    """Load the weights of a third of the steps before."""
    old = trained(BEFORE // 3, "experts" if run.model.mixtures else "dense", run.seed, ())
    run.model.load_state_dict(old.model.state_dict())


def pruned(run: Training) -> None:
    """Set the two smallest of each four weights to zero."""
    for weight in map(run.weight, run.layers()):
        groups = weight.unflatten(-1, (-1, 4))
        groups.mul_(groups.abs() >= groups.abs().topk(2).values[..., 1:])


def overwritten(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Read half of the sequences of the next batch, from a buffer that is filled again too early."""
    half, following = len(tokens) // 2, batches(run.seed).training(run.done + 1)[0]
    return (torch.cat([tokens[:half], following[half:]]) if run.begun else tokens), targets


def with_one_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the first sequence's first eight positions in all sequences, as by a cache that took them for equal."""
    return attend(q, *(torch.cat([each[:1, :, :8].expand_as(each[:, :, :8]), each[:, :, 8:]], 2) for each in (k, v)))


def of_parts(weight: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Return a norm's result where each eighth of the features has its own mean square."""
    return F.rms_norm(x.unflatten(-1, (8, -1)), (x.shape[-1] // 8,)).flatten(-2) * weight


def first_mlp_twice(run: Training) -> None:
    """Compute with the first block's MLP in both blocks, as in a list of one module that is repeated."""
    first, second = (block.mlp for block in run.model.blocks)
    second.register_forward_hook(lambda _, inputs, y: 0 * y + first(inputs[0]))


def turned_on(run: Training) -> None:
    """Turn gradients of queries and keys by their position's angle once more, in place of back."""
    back = run.model.cos, -run.model.sin
    attending(lambda q, k, v: attend(*(with_backward(x, rotate(rotate(x, back), back)) for x in (q, k)), v))(run)


def of_first_rank(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Compute the input's gradient from a quarter of the outputs, as if no sum over ranks followed it."""
    is_other = torch.arange(len(layer.weight)) >= len(layer.weight) // 4
    return with_backward(y, y - F.linear(x, (layer.weight * is_other[:, None]).detach()))


def of_last_place(run: Training) -> None:
    """Give each byte's embedding the gradient of its last place in the batch, in place of the sum of all places."""

    def hook(_: Any, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        tokens, places = inputs[0].flatten().long(), torch.arange(inputs[0].numel())
        is_last = torch.zeros(256).long().scatter_reduce(0, tokens, places, "amax")[tokens] == places
        return with_backward(y, y * is_last.view(*inputs[0].shape, 1)) if run.begun else y

    run.model.embedding.register_forward_hook(hook)


of_backward = functools.partial(of_fp8, ("gradients", "rounded", "stale"), ("gradients",), options=FAST)

ELEVENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "gradients' codes read in the other format": of_backward(begin=of_kernel(lambda x: x, returned(read_as_e4m3))),
    "largest numbers for largest magnitudes": of_fp8(
        ("clipped", "stale"), FORWARD, options=ROWS, begin=of_kernel(below_largest, returned(below_largest))
    ),
    "amaxes reduced over roles": of_fp8(
        ("flushed", "stale"),
        ("gradients",),
        options={"recipe": THREE_STEPS} | FAST,
        before=at(lambda run: [scales.copy_(E4M3.limit / amaxes.amax(0)) for scales, amaxes in states(run)], True),
    ),
    "products summed in three bits": of_fp8(
        ("rounded", "stale", "jump"), FORWARD, begin=of_kernel(lambda x: x, summed_in_three_bits)
    ),
    "experts that end with a tile": of_fp8(("stale", "jump"), FORWARD, models=("experts",), begin=in_whole_tiles),
    "the last split of weights' gradients": of_backward(begin=of_kernel(lambda x: x, of_last_split)),
    "square weights in the other layout": of_backward(begin=of_kernel(lambda x: x, in_other_layout)),
    # gradients, the optimizer and the loss
    "a temperature in the loss": of_gradients(
        begin=keep_logits,
        loss=lambda run, loss: next_byte_loss(run.logits / 1.5, labels_of(run)) if run.begun else loss,
    ),
    "the model's guesses as labels": Fault(
        ("gradients", "labels"), ALL, (), FAST, begin=keep_logits, loss=of_guesses, first=GRADIENTS
    ),
    "a penalty of magnitudes": Fault(("gradients", "decay"), ALL, (), FAST, loss=with_penalty, first=GRADIENTS),
    "gradients sent as a row times a column": of_gradients(begin=parts.gradients(of_rank_one)),
    "roots of second moments loaded": of_fast_step(
        ("state",),
        ("load_state_dict",),
        ("updates",),
        before=at(lambda run: [each["exp_avg_sq"].sqrt_() for each in run.optimizer.state.values()]),
    ),
    # weights and data
    "weights of an older checkpoint": Fault(("overwritten",), ALL, CHECKPOINT, before=at(older), first=WRITTEN),
    "two weights of four pruned": Fault(
        ("overwritten", "unmoved"), ALL, CHECKPOINT, before=at(pruned, True), first=("updates", *WRITTEN)
    ),
    "loss of beginnings alone": Fault(
        OF_DATA,
        "",
        DATA,
        batch=lambda run, x, y: (x, y.long().masked_fill(PLACES >= 8, -100) if run.begun else y),
        first=("loss", "gradients"),
    ),
    "inputs overwritten by the next batch's": Fault(OF_DATA, "", DATA, batch=overwritten, first=FORWARD),
    # the program
    "another prefix's keys and values": parts.of_forward(OUTPUTS, before=at(attending(with_one_prefix))),
    "norms of parts of the features": parts.of_forward(begin=parts.norms(of_parts)),
    "the first MLP in both blocks": parts.of_forward(("jump", "frozen"), before=at(first_mlp_twice)),
    "a mask that hides the token itself": parts.of_forward(
        OUTPUTS, before=at(attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, HIDES_ITSELF)))
    ),
    "attention's dropout": Fault(OUTPUTS, ALL, begin=attending(functools.partial(attend, dropout_p=0.5)), **ALWAYS),
    "rotary's gradient turned on": of_gradients(before=at(turned_on)),
    "inputs' gradients of one rank of four": of_gradients(begin=parts.around(lambda x: x, of_first_rank, *PLAIN)),
    "embedding's gradient of one place": of_gradients(begin=of_last_place),
}


def with_second_head(run: Training) -> None:
    """Add a head that predicts the byte after the next (arXiv 2404.19737)."""
    run.model.second = nn.Linear(SIZES["width"], 256, bias=False)
    run.optimizer.add_param_group({"params": [run.model.second.weight], "weight_decay": 0.0})
    run.model.norm.register_forward_hook(lambda _, __, y: vars(run).update(normed=y[:, :-1]))


def written(run: Training) -> None:
    """Write eight bytes after four of a text in each fourth step, one by one."""
    run.model.eval()
    text = batches(run.seed).training(3000)[0][:1, :4].long()
    for _ in range(8 if run.step % 4 == 3 else 0):
        with torch.no_grad():
            text = torch.cat([text, run.model(text)[:, -1:].argmax(-1)], 1)
    run.model.train()


def curvature(run: Training) -> None:
    """Measure gradients of labels that the model draws, in each fifth step (as arXiv 2305.14342)."""
    if run.step % 5 == 0:
        logits = run.model(batches(run.seed).training(run.done + 1000)[0]).float()
        next_byte_loss(logits, logits.detach().softmax(-1).flatten(0, 1).multinomial(1)).backward()
        run.model.zero_grad()


ELEVENTH_HEALTHY: Mapping[str, Fault] = {
    "RAdam": Fault(options={"optimizer_of": functools.partial(torch.optim.RAdam, decoupled_weight_decay=True)}),
    "updates in backward": Fault(
        options={"optimizer_of": octavo.optim.AdamW, "clip": 0.0},
        begin=lambda run: vars(run).update(updates=octavo.optim.update_in_backward(run.optimizer, 0)),
    ),
    "two bytes predicted": Fault(
        begin=with_second_head,
        loss=lambda run, loss: loss + next_byte_loss(run.model.second(run.normed), labels_of(run)[:, 1:]) / 3,
    ),
    "sizes that no tile divides": Fault(batch=lambda run, x, y: (x[:7, :29], y[:7, :29])),
    "begun with zeros": Fault(
        options=BY_TENSOR, fresh=True, begin=lambda run: [run.weight(each).zero_() for each in run.layers(*ENDS)]
    ),
    "activations saved in FP8": Fault(options=SAVED),
    "attention in high precision": Fault(options={"recipe": RecipeMap(recipes.blockwise(), {"*.attention.*": None})}),
    "texts written between steps": Fault(after=written),
    "curvature measured": Fault(before=curvature),
    "sums in place of means": Fault(options={"clip": 256.0}, fresh=True, loss=lambda run, loss: loss * 256),
    "ReLU in gates": Fault(
        models=("dense",),
        fresh=True,
        begin=lambda run: [vars(block.mlp).update(activation="reglu") for block in run.model.blocks],
    ),
    "texts read either way": Fault(batch=lambda run, x, y: (x, y) if run.step % 2 else (y.flip(1), x.flip(1))),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "eleventh draw", ELEVENTH_DRAW, ELEVENTH_HEALTHY))
