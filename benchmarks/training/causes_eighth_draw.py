"""The eighth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, which
change the forward pass alone. Their truth is stated as the fifth draw's and measured without octavo.inspect; no kind
lies between "FP8 is the cause" and "FP8 is not". ``python -m benchmarks.training.causes_eighth_draw`` measures it
again. Eleven kinds creep in or are small: they worsen the loss of ten steps by less than 2 % in some runs, but turn
gradients by more than 0.1 (truth_by_gradients): the kept codes by 0.3 to 0.4, with a loss 1.0 to 1.2 % worse; the
MLPs' saved activations by 0.6 to 0.9 (0.1 to 0.8 %); the huge sequence by 1.0 (0.2 to 0.8 %); three bits by 0.2 to 0.6
(0.8 to 1.4 %); the tied weight by 0.4 to 0.5 (-0.1 to 0.9 %).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training import causes_sixth_draw as sixth
from benchmarks.training.causes import ALL, CHECKPOINT, DATA, DELAYED, SIZES, Fault, Training, at, batches
from benchmarks.training.causes_fifth_draw import LONG, MLPS, keep_logits, main, of_fp8, states, truth_by_gradients
from benchmarks.training.causes_fourth_draw import FORWARD, OF_DATA, OUTPUTS, attending, output_of, times_inside
from benchmarks.training.causes_seventh_draw import ALWAYS, PLAIN, WRITTEN, steps_since
from benchmarks.training.causes_sixth_draw import BY_TENSOR, FAST, GRADIENTS, OUT, attend
from octavo import E4M3, Cast, PerTensor, RecipeMap, recipes
from octavo.train.model import next_byte_loss

ROWS, NARROW = {"recipe": recipes.rowwise(power_of_two=True)}, Cast(E4M3, PerTensor(), margin=18)
FORMAT = recipes.delayed().output[0]
IN_E4M3 = dataclasses.replace(recipes.delayed(), grad_input=(FORMAT, FORMAT), grad_weight=(FORMAT, FORMAT))


def kept(run: Training) -> None:
    """Keep codes of the weights, and leave the flag of later micro-batches set from the fault's step on."""
    run.cast = lambda: None
    with contextlib.suppress(ValueError):  # in high precision there are no codes to keep
        weights, is_later = octavo.nn.KeptWeights(run.model), torch.zeros(1, dtype=torch.int32)
        run.cast = lambda: weights.cast(skip=is_later.fill_(run.begun))


def in_four_bits(run: Training) -> None:
    """Cast some layers to E2M1, whose blocks' scales underflow."""
    four = recipes.nvfp4(history_length=16, margin=16)
    octavo.set_recipe(run.model, RecipeMap(run.recipe, {f"*{OUT}": four, "head": four}))


def mean_of_amaxes(run: Training) -> None:
    """Scale inputs by a moving average of amaxes in place of the largest, while inputs grow."""
    newest = [history[0, 0].clone() for _, history in states(run)]
    means = vars(run).setdefault("means", newest)
    for (scales, _), mean, amax in zip(states(run), means, newest, strict=True):
        mean.lerp_(amax, 0.1)
        scales[0] = E4M3.limit / mean if run.begun else scales[0]


def another_loss(run: Training) -> None:
    """Measure gradients of a loss that grows, by a backward pass whose gradients are thrown away."""
    tokens, targets = batches(run.seed).training(run.done + 1000)
    (next_byte_loss(run.model(tokens), targets) * 2.0 ** (20 + 3 * steps_since(run))).backward()
    run.model.zero_grad()


def of_last_sequence(run: Training, loss: Tensor) -> Tensor:
    """Return the loss of the last micro-batch of eight, as if the others' gradients were overwritten."""
    targets = batches(run.seed).training(run.done)[1]
    return next_byte_loss(run.logits[-1:], targets[-1:]) if run.begun else loss


def without_its_gradient(head: Any, x: Tensor, y: Tensor) -> Tensor:
    same = F.linear(x, head.weight.detach())
    return y.detach() + same - same.detach()


def adapter_merged(run: Training) -> None:
    """Add to each weight the product of two thin matrices, half as large: another model's adapter."""
    for weight in map(run.weight, run.layers()):
        thin = torch.randn(*weight.shape[:-1], 4) @ torch.randn(*weight.shape[:-2], 4, weight.shape[-1])
        weight.add_(thin * weight.std() / thin.std() / 2)


def slipped(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Give the second half of one more sequence in each step labels that are one byte late."""
    half, is_hit = SIZES["context"] // 2, torch.arange(len(targets)) < steps_since(run)
    late = torch.cat([targets[:, :half], targets[:, half - 1 : -1]], 1)
    return tokens, late.where(is_hit[:, None], targets)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by a softmax over the wrong dimension."""
    is_later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(is_later, -torch.inf).softmax(-2) @ v


def to_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by a mask that is read the other way round, but for each position itself."""
    return F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], q.shape[-2]).triu().bool())


def halves_swapped(_: Any, __: Any, y: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return y[::-1] if isinstance(y, tuple) else y.roll(y.shape[-1] // 2, -1)


def in_three_bits(x: Tensor) -> Tensor:
    """Return integers times a unit, with the gradient of x."""
    unit = x.detach().abs().amax() / 3
    return x + ((x / unit).round() * unit - x).detach()


def over_capacity(run: Training) -> None:
    """Drop what is beyond an eighth of all choices for one of four experts."""

    def drop(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, index, weights = inputs
        chosen = F.one_hot(index.flatten(), 4)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        return (x, index, weights * (place <= index.numel() // 8)) if run.begun else inputs

    for mixture in run.model.mixtures:
        mixture.experts.register_forward_pre_hook(drop)


def fading(run: Training) -> None:
    """Multiply what attention and MLPs compute by 0.85 once more in each step."""
    for part in (f"blocks.{block}.{part}" for block in range(SIZES["layers"]) for part in ("attention", "mlp")):
        output_of(part, lambda _, y: y * 0.85 ** steps_since(run))(run)


EIGHTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "codes of before": of_fp8(
        ("stale", "rounded"), FORWARD, options=BY_TENSOR, models=("dense",), begin=kept, before=lambda run: run.cast()
    ),
    "a floor under amaxes": of_fp8(
        ("flushed", "stale"),
        ("gradients",),
        options={"recipe": IN_E4M3} | FAST,
        before=at(lambda run: [scales[2].clamp_(max=E4M3.limit / 256) for scales, _ in states(run)], True),
    ),
    "saved activations lost": of_fp8(
        ("flushed", "dead units"),
        ("gradients",),
        options=FAST,
        before=at(lambda run: octavo.set_recipe(run.model, dataclasses.replace(run.recipe, saved=NARROW))),
    ),
    "one huge sequence by rows": of_fp8(
        ("outliers", "flushed"),
        ("inputs", "gradients"),
        options=ROWS | FAST,
        begin=sixth.rows_larger(sixth.one_in(8, sixth.HUGE), *PLAIN),
    ),
    "scales of four-bit blocks lost": of_fp8(("flushed", "rounded"), FORWARD, before=at(in_four_bits)),
    "a mean of amaxes that grow": of_fp8(
        ("clipped", "stale"), FORWARD, options=DELAYED, begin=times_inside(4.0, all_of=MLPS), before=mean_of_amaxes
    ),
    "gradients of another loss measured": of_fp8(
        ("flushed", "stale"), ("gradients",), options=LONG | FAST, before=at(another_loss, True)
    ),
    # gradients, the optimizer and the loss
    "the last micro-batch alone": sixth.of_step(
        ("gradients",), (), GRADIENTS, options=FAST, begin=keep_logits, loss=of_last_sequence
    ),
    "a hundredth of gradients sent": sixth.of_step(
        ("gradients",),
        (),
        GRADIENTS,
        options=FAST,
        begin=sixth.gradients(lambda grad: grad * (grad.abs() >= grad.abs().flatten().quantile(0.99))),
    ),
    "second moments in float16": sixth.of_step(
        ("state",),
        ("load_state_dict",),
        ("updates",),
        options=BY_TENSOR | {"lr": 1e-3},
        before=at(
            lambda run: [each["exp_avg_sq"].copy_(each["exp_avg_sq"].half()) for each in run.optimizer.state.values()],
            True,
        ),
    ),
    "labels smoothed by nine tenths": sixth.of_step(
        ("gradients",),
        (),
        GRADIENTS,
        begin=keep_logits,
        loss=lambda run, loss: 0.1 * loss - 0.9 * run.logits.log_softmax(-1).mean() if run.begun else loss,
    ),
    "tied without the head's gradient": Fault(
        ("gradients", "untied"),
        ALL,
        (),
        {"tied": True} | FAST,
        begin=sixth.around(lambda x: x, without_its_gradient, "head"),
        first=GRADIENTS,
    ),
    # weights
    "adapter of another model": sixth.of_step(("overwritten",), CHECKPOINT, WRITTEN, before=at(adapter_merged)),
    "begun with a variance of 1": Fault(
        ("logits", "jump", "gradients"),
        ALL,
        fresh=True,
        begin=lambda run: [weight.div_(weight.std()) for weight in map(run.weight, run.layers())],
        **ALWAYS,
    ),
    # data
    "spaces lost": sixth.of_text(lambda text: text[text != ord(" ")].repeat(2)[: text.numel()].view_as(text)),
    "labels that slip": Fault(OF_DATA, "", DATA, batch=slipped, first=("loss", "gradients")),
    # the program
    "softmax over queries": sixth.of_forward(OUTPUTS, before=at(attending(over_queries))),
    "mask read the other way": sixth.of_forward(OUTPUTS, before=at(attending(to_later))),
    "keys and values of the next head": Fault(
        OUTPUTS, ALL, begin=attending(lambda q, k, v: attend(q, k.roll(1, 1), v.roll(1, 1))), **ALWAYS
    ),
    "positions that begin again": sixth.of_forward(
        OUTPUTS,
        before=at(
            lambda run: [setattr(run.model, name, getattr(run.model, name)[:8].repeat(4, 1)) for name in ("cos", "sin")]
        ),
    ),
    "gate and up swapped": sixth.of_forward(begin=sixth.around(lambda x: x, halves_swapped, "fc1", "gate_up")),
    "residual stream in three bits": sixth.of_forward(begin=output_of("blocks.0", lambda _, y: in_three_bits(y))),
    "tokens over the experts' capacity": Fault(("jump",), ALL, models=("experts",), begin=over_capacity, first=FORWARD),
    "branches that fade": sixth.of_forward(begin=fading),
}


def clipped(run: Training) -> None:
    """Hold weights between -0.3 and 0.3, about 2.4 standard deviations of their first values."""
    for weight in map(run.weight, run.layers()):
        weight.clamp_(-0.3, 0.3)


def with_prompt(run: Training) -> None:
    """Freeze the model, and train a vector that all embeddings are moved by (arXiv 2104.08691)."""
    run.model.requires_grad_(False)
    prompt = nn.Parameter(torch.zeros(SIZES["width"]))
    run.model.embedding.register_parameter("prompt", prompt)
    run.model.embedding.register_forward_hook(lambda _, __, y: y + prompt)
    run.optimizer = torch.optim.AdamW([prompt], lr=run.lr)


def middle_last(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Move the middle of each sequence to its end (arXiv 2207.14255)."""
    first, second = sorted(random.Random(run.done).sample(range(1, SIZES["context"]), 2))
    text = torch.cat([tokens, targets[:, -1:]], 1)
    text = torch.cat([text[:, :first], text[:, second:], text[:, first:second]], 1)
    return text[:, :-1], text[:, 1:]


def of_hardest(run: Training, loss: Tensor) -> Tensor:
    """Return the mean of the loss and that of the half of all bytes where it is largest."""
    targets = batches(run.seed).training(run.done)[1].flatten().long()
    each = F.cross_entropy(run.logits.flatten(0, 1), targets, reduction="none")
    return (loss + each.topk(len(each) // 2).values.mean()) / 2


def one_step_in_four(run: Training) -> None:
    """Add up the gradients of four batches before each step."""
    step, clear = run.optimizer.step, run.optimizer.zero_grad
    run.optimizer.step = lambda: step() if run.step % 4 == 3 else None
    run.optimizer.zero_grad = lambda: clear() if run.step % 4 == 3 else None


EIGHTH_HEALTHY: Mapping[str, Fault] = {
    "RMSprop": Fault(options={"optimizer_of": torch.optim.RMSprop, "lr": 1e-3}),
    "weights held in bounds": Fault(begin=clipped, after=clipped),
    "confidence penalized": Fault(  # arXiv 1701.06548
        begin=keep_logits,
        loss=lambda run, loss: loss + (run.logits.softmax(-1) * run.logits.log_softmax(-1)).sum(-1).mean() / 10,
    ),
    "a soft prompt": Fault(begin=with_prompt),
    "the middle filled in": Fault(batch=middle_last),
    "FP8 forward alone": Fault(
        options={"recipe": dataclasses.replace(recipes.dynamic(), grad_input=None, grad_weight=None)}
    ),
    "newest amax with a margin": Fault(options={"recipe": recipes.delayed(4, "most_recent", margin=2)}),
    "the harder half counts more": Fault(begin=keep_logits, loss=of_hardest),
    "one step for four batches": Fault(begin=one_step_in_four, loss=lambda run, loss: loss / 4),
    "one block trained at a time": Fault(
        before=lambda run: [
            block.requires_grad_(run.step // 2 % 2 == place) for place, block in enumerate(run.model.blocks)
        ]
    ),
    "noise in embeddings": Fault(
        begin=lambda run: run.model.embedding.register_forward_hook(lambda _, __, y: y + torch.rand_like(y) / 5 - 0.1)
    ),
    "batches of any size": Fault(
        batch=lambda run, x, y: (x[: (count := random.Random(run.step).randint(1, 8))], y[:count])
    ),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "eighth draw", EIGHTH_DRAW, EIGHTH_HEALTHY, truth_by_gradients))
