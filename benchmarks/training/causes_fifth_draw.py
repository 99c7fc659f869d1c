"""The fifth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Eight faults are FP8's own, eight are of the optimizer, the schedule or the data, eight of the program. Each has the
truth as the fourth draw has it. Whether FP8 is the cause was measured, without octavo.inspect, for each kind, model and
seed: the training with the fault, its healthy twin (same recipe, batches and weights, no fault), and the training with
the fault where all products are in high precision. A fault's size is such that it worsens the loss in every run
by WORSE or more, as a mean of the steps from its first. FP8 is the cause ("yes") where the loss in high precision is
worse by less than a tenth of that in all runs, and is not ("no") where it is worse by more than two thirds of it. No
kind of this draw lies between. ``python -m benchmarks.training.causes_fifth_draw`` measures it again, and fails where a
kind's truth is another; it also prints how each healthy run's loss went.

What changes first follows from where a fault is put in. A change of the forward pass or of data changes the loss,
gradients and inputs of layers in one step; one of an optimizer's step changes that step's updates, and the loss at the
next one; a gradient's sign changes no norm in its step, and so updates or the loss come first.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

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
    E5M2_INPUT,
    MODELS,
    SCALER,
    SIZES,
    Fault,
    Training,
    at,
    batches,
    having,
    prepared,
    seeds,
    with_recipe,
)
from benchmarks.training.causes_fourth_draw import (
    CASTS,
    DYNAMIC,
    FORWARD,
    OF_DATA,
    OUTPUTS,
    attending,
    option,
    output_of,
    times_inside,
)
from octavo import E4M3, Cast, PerTensor, recipes
from octavo.train.config import ModelConfig
from octavo.train.trainer import build_model

WORSE, TURNED, STEPPED, MARGIN = 0.02, 0.1, ("updates", "loss"), Cast(E4M3, PerTensor(), margin=18)
MLPS, LONG = ("fc2", "down"), {"recipe": recipes.delayed(history_length=1024)}


def states(run: Training) -> list[tuple[Tensor, Tensor]]:
    """Return scales [3] and histories [3, H] of the layers that have delayed scales."""
    layers = [run.model.get_submodule(name) for name in run.layers()]
    return [(each.delayed_scale, each.delayed_amax_history) for each in layers if hasattr(each, "delayed_scale")]


def roles_mixed_up(run: Training) -> None:
    """Cast inputs by the gradient's scale, weights by the input's, gradients by the weight's."""
    for scales, _ in states(run):
        scales.copy_(scales.roll(1))


def calibrated(run: Training) -> None:
    """Keep the scales that the fault's step begins with, while inputs grow."""
    scales_then = vars(run).setdefault("calibrated", [scales.clone() for scales, _ in states(run)])
    for (scales, _), before in zip(states(run), scales_then, strict=True):
        scales.copy_(before)


def history_of_another(run: Training) -> None:
    """Load amaxes that are 2^20 times as large, as from a checkpoint of before a norm was added."""
    for scales, history in states(run):
        history.mul_(2.0**20)
        scales.div_(2.0**20)


def outlier_channels(run: Training) -> None:
    """Multiply a column of some weights by 2^22 in the fault's step, and divide their inputs by that from then on."""
    factors = torch.ones(SIZES["width"])
    factors[run.place % SIZES["width"]] = 2.0**22
    run.widen = lambda: [run.weight(name).mul_(factors) for name in run.layers("attention.out")]
    for name in run.layers("attention.out"):
        run.model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs: (inputs[0] / factors,) if run.begun else None
        )


def outlier_gradient(run: Training) -> None:
    """Give the first position's logits a huge gradient in the head, which multiplies zeros there and is left out after.

    Its logits are computed beside the head in high precision, and give no gradient.
    """
    head, inputs = run.model.head, []
    later = (torch.arange(SIZES["context"]) > 0)[:, None]

    def before(_: Any, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        inputs[:] = arguments
        return (arguments[0] * later,) if run.begun else None

    def after(_: Any, __: Any, logits: Tensor) -> Tensor | None:
        if not run.begun:
            return None
        if logits.requires_grad:
            logits.register_hook(lambda g: torch.where(later, g, 2.0**30 * g.abs().max()))
        return torch.cat([F.linear(inputs[0][:, :1], head.weight).detach(), logits[:, 1:]], 1)

    head.register_forward_pre_hook(before)
    head.register_forward_hook(after)


def offset(run: Training) -> None:
    """Add a constant to the input of a layer in E5M2, and take the layer's output for it away, in high precision."""
    ends = ("attention.out", "head")
    with_recipe(*ends, input=E5M2_INPUT)(run)
    layer = run.model.get_submodule(run.layer(*ends))
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 64.0,) if run.begun else None)
    layer.register_forward_hook(lambda _, __, y: y - 64.0 * layer.weight.sum(1) if run.begun else None)


def late_gradients(run: Training) -> None:
    """Step with the gradients of eight steps ago, as workers that don't wait for each other."""
    params, queue = [*run.model.parameters()], collections.deque[list[Tensor]](maxlen=9)

    def replace(*_: object) -> None:
        queue.append([param.grad.clone() for param in params])
        for param, grad in zip(params, queue[0], strict=True) if run.begun else ():
            param.grad.copy_(grad)

    run.optimizer.register_step_pre_hook(replace)


def scaled_moments(run: Training) -> None:
    """Load first moments as they were under a loss scale of 64."""
    for state in run.optimizer.state.values():
        state["exp_avg"].mul_(64)


def swapped_bytes(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Read pairs of bytes in the other order, as 16-bit numbers of another machine."""
    text = torch.cat([tokens.unflatten(1, (-1, 2)).flip(2).flatten(1), targets[:, -1:]], 1)
    return (text[:, :-1], text[:, 1:]) if run.begun else (tokens, targets)


def noisy_labels(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a quarter of the labels by random bytes."""
    is_noise = torch.rand(targets.shape) < (0.25 if run.begun else 0)
    return tokens, torch.randint_like(targets, 256).where(is_noise, targets)


def transposed(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Read a batch that was stored position by position as if it were row by row."""
    text = torch.cat([tokens.t().reshape_as(tokens), targets[:, -1:]], 1)
    return (text[:, :-1], text[:, 1:]) if run.begun else (tokens, targets)


def of_next_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).roll(-1, 0)


def keys_as_values(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def blocks_in_other_order(run: Training) -> None:
    """Compute the last block first, as stages of a pipeline that were numbered from the other end."""
    model = run.model

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens.int())
        for block in reversed(model.blocks):
            x = block(x, (model.cos, model.sin))
        return model.head(model.norm(x))  # type: ignore[no-any-return]

    model.forward = forward


def gradient_of(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Training], Any]:
    """Return a change of the gradient that a module's backward gets, from the fault's step on."""

    def hook(run: Training, output: Tensor) -> None:
        if run.begun and output.requires_grad:
            output.register_hook(change)

    return lambda run: run.model.get_submodule(name).register_forward_hook(lambda _, __, output: hook(run, output))


def large_eps(run: Training) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 30.0


def experts_of_next_rank(run: Training) -> None:
    """Send tokens to the expert after the one that was chosen."""
    for mixture in run.model.mixtures:
        mixture.experts.register_forward_pre_hook(
            lambda _, inputs: (inputs[0], (inputs[1] + run.begun) % MODELS["experts"].experts, *inputs[2:])
        )


def peaks(step: int) -> float:
    """Return a schedule's factor that is 30 in each fourth step from the fault's on: restarts with a peak too high."""
    return 30.0 if step >= BEFORE + 6 and (step - BEFORE - 6) % 4 == 0 else 1.0


def of_fp8(causes: tuple[str, ...], first: tuple[str, ...], layer: Any = ALL, **does: Any) -> Fault:
    """Return a fault of FP8 alone."""
    return Fault(causes, layer, does.pop("remedies", CASTS), fp8="yes", first=first, **does)


FIFTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "scales of roles mixed up": of_fp8(
        ("clipped", "stale", "flushed"), FORWARD, options=DELAYED, before=at(roles_mixed_up, True)
    ),
    "calibrated once": of_fp8(
        ("stale", "clipped"),
        FORWARD,
        options=DELAYED,
        begin=times_inside(8.0, all_of=MLPS),
        before=at(calibrated, True),
    ),
    "history of another checkpoint": of_fp8(
        ("stale", "flushed"), FORWARD, remedies=CASTS + CHECKPOINT, options=DELAYED, before=at(history_of_another)
    ),
    "inputs that shrink in a long history": of_fp8(
        ("flushed", "stale"), FORWARD, options=LONG, begin=times_inside(2.0**-24, 1, ("attention.out", *MLPS))
    ),
    "outlier channel of weights": of_fp8(
        ("outliers", "flushed", "overwritten"),
        ("weights", *FORWARD),
        options={"recipe": DYNAMIC},
        begin=outlier_channels,
        before=at(lambda run: run.widen()),
    ),
    "head's gradients with a margin": of_fp8(
        ("flushed",), ("gradients",), "head", before=at(with_recipe("head", grad_output=MARGIN))
    ),
    "outlier in the head's gradient": of_fp8(
        ("outliers", "flushed"), ("gradients",), "head", options={"recipe": DYNAMIC}, begin=outlier_gradient
    ),
    "E5M2 input with an offset": of_fp8(("rounded", "outliers"), FORWARD, ("attention.out", "head"), begin=offset),
    # the optimizer and the schedule
    "ascent": Fault(("options",), "", ("maximize",), before=option("maximize", True), first=STEPPED),
    "gradients of eight steps ago": Fault(("gradients",), "", (), begin=late_gradients, first=("gradients", *STEPPED)),
    "decay with the wrong sign": Fault(
        ("options", "decay"), "", ("weight_decay",), before=option("weight_decay", -60.0), first=("updates", "weights")
    ),
    "first moments x 64": Fault(("state",), "", ("load_state_dict",), before=at(scaled_moments), first=("updates",)),
    "peaks of the rate": Fault(
        ("learning rate",), "", ("lr",), begin=having(schedule=(peaks,)), first=("learning rate", "updates")
    ),
    # data
    "pairs of bytes swapped": Fault(OF_DATA, "", DATA, batch=swapped_bytes, first=FORWARD),
    "a quarter of labels random": Fault(OF_DATA, "", DATA, batch=noisy_labels, first=("loss", "gradients")),
    "batch transposed": Fault(OF_DATA, "", DATA, batch=transposed, first=FORWARD),
    # the program
    "attention of the next row": Fault(OUTPUTS, ALL, before=at(attending(of_next_row)), first=FORWARD),
    "keys as values": Fault(OUTPUTS, ALL, before=at(attending(keys_as_values)), first=FORWARD),
    "blocks in the other order": Fault(("jump",), ALL, CHECKPOINT, before=at(blocks_in_other_order), first=FORWARD),
    # the last block's backward begins with minus its gradient
    "gradient with the wrong sign": Fault(
        ("gradients",), ALL, (), begin=gradient_of("blocks.1", torch.neg), first=("gradients", *STEPPED)
    ),
    # the part that lowers other bytes' logits is lost, and that which raises the label's is left
    "loss's gradient of labels alone": Fault(
        ("gradients",), ALL, (), begin=gradient_of("head", lambda g: g.clamp(max=0)), first=("gradients", *STEPPED)
    ),
    "norms with eps of 30": Fault(("jump",), ALL, (), before=at(large_eps), first=FORWARD),
    "embedding x 8": Fault(("jump",), ALL, (), begin=output_of("embedding", lambda _, y: y * 8), first=FORWARD),
    "experts in another rank's order": Fault(
        ("jump", "ranks"), ALL, CHECKPOINT, models=("experts",), begin=experts_of_next_rank, first=FORWARD
    ),
}


def narrow(run: Training) -> None:
    """Replace the model by one of width 16, which begins its training."""
    run.model = build_model(ModelConfig(**{**SIZES, "width": 16}), "float32", run.seed)
    octavo.convert(run.model, run.recipe)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr)


def keep_logits(run: Training) -> None:
    run.model.head.register_forward_hook(lambda _, __, logits: vars(run).update(logits=logits.float()))


def smoothed(run: Training, loss: Tensor) -> Tensor:
    """Return the loss with a tenth of each label spread over all bytes."""
    return 0.9 * loss - 0.1 * run.logits.log_softmax(-1).mean() if run.step >= 0 else loss


def with_z_loss(run: Training, loss: Tensor) -> Tensor:
    """Return the loss with PaLM's term that holds the logits' normalizer at 1 (arXiv 2204.02311)."""
    return loss + 1e-3 * run.logits.logsumexp(-1).square().mean() if run.step >= 0 else loss


def micro_batch(run: Training) -> None:
    """Add the gradients of a first micro-batch, of one to six sequences, to those of a second one of two."""
    if run.step >= 0:
        count = 1 + run.step * 5 % 6
        tokens, targets = batches(run.seed).training(run.done + 1000)
        loss = F.cross_entropy(run.model(tokens[:count]).flatten(0, 1), targets[:count].flatten().long())
        (loss * count / (count + 2)).backward()
        run.share = 2 / (count + 2)


def unfrozen_in_turn(run: Training) -> None:
    """Train the head and the last block at first, the first block from the fifth step on, then the embedding."""
    run.model.blocks[0].requires_grad_(run.step >= 5)
    run.model.embedding.requires_grad_(run.step >= 10)


def evaluated_mean(run: Training) -> None:
    """Keep a mean of the weights, and evaluate it in each fourth step in place of the weights."""
    params = [*run.model.parameters()]
    weights = [param.detach().clone() for param in params]
    means = vars(run).setdefault("means", weights)
    torch._foreach_lerp_(means, weights, 0.1)
    if run.step % 4 == 3:
        run.model.eval()
        with torch.no_grad():
            torch._foreach_copy_(params, means)
            run.model(batches(run.seed).training(2000)[0])
            torch._foreach_copy_(params, weights)
        run.model.train()


def fewer_dropped(run: Training) -> None:
    run.model.embedding.register_forward_hook(
        lambda _, __, y: F.dropout(y, max(0.0, 0.2 - 0.02 * run.step), run.model.training)
    )


FIFTH_HEALTHY: Mapping[str, Fault] = {
    "stable, then a decay to a hundredth": Fault(options={"schedule": lambda step: 0.01 ** max(0, (step - 67) / 8)}),
    "a width of 16": Fault(fresh=True, models=("dense",), begin=narrow),
    "label smoothing": Fault(begin=keep_logits, loss=smoothed),
    "z-loss": Fault(begin=keep_logits, loss=with_z_loss),
    "uneven micro-batches": Fault(before=micro_batch, loss=lambda run, loss: loss * getattr(run, "share", 1.0)),
    "Nesterov's momentum without decay": Fault(
        options={"optimizer_of": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True), "lr": 0.1},
        begin=lambda run: [group.update(weight_decay=0.0) for group in run.optimizer.param_groups],
    ),
    "layers unfrozen in turn": Fault(before=unfrozen_in_turn),
    "dropout that ends": Fault(begin=fewer_dropped),
    "mean weights evaluated": Fault(after=evaluated_mean),
    "each batch twice": Fault(batch=lambda run, *_: batches(run.seed).training(run.done // 2 * 2)),
    "float16, a scale that grows": Fault(
        options=SCALER, before=lambda run: vars(run).update(loss_scale=2.0 ** (8 + run.step // 2))
    ),
    "a batch that is halved twice": Fault(batch=lambda run, x, y: (x[: 8 >> run.step // 6], y[: 8 >> run.step // 6])),
}


class Losses(list[float]):
    """A recorder that keeps the losses alone."""

    def step(self, loss: Tensor, *_: object, **__: object) -> None:
        self.append(float(loss.detach()))


def losses(fault: Fault, model: str, seed: int, in_fp8: bool = True) -> Tensor:
    """Return the losses of the recorded steps [STEPS], with octavo.inspect left out."""
    high, set_recipe, seen = recipes.high_precision(), octavo.set_recipe, Losses()
    torch.manual_seed(seed)
    with mock.patch.object(octavo, "set_recipe", set_recipe if in_fp8 else lambda model, _: set_recipe(model, high)):
        run = prepared(fault, model, seed)
        run.run(16, fault, seen)
    return torch.tensor(seen)


def truth(fault: Fault, model: str, seed: int) -> tuple[str, bool]:
    """Return by how much the loss is worse than the twin's, in FP8 and in high precision, and whether that is right."""
    twin = losses(Fault(options=fault.options), model, seed)[fault.begins :].mean()
    worse, high = (losses(fault, model, seed, in_fp8)[fault.begins :].mean() / twin - 1 for in_fp8 in (True, False))
    measured = "yes" if high < worse / 10 else "no" if high > worse * 2 / 3 else "between"
    is_right = measured == (fault.fp8 or "no") and bool(worse >= WORSE)
    return f"{worse:.1%} worse, {high:.1%} in high precision: {measured}", is_right


def with_gradients(fault: Fault, *of_run: Any) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the losses of the recorded steps, and the matrices' gradients in each."""
    seen: list[list[Tensor]] = []

    def begin(run: Training) -> None:
        fault.begin(run)
        matrices = [param for param in run.model.parameters() if param.ndim > 1]
        run.optimizer.register_step_pre_hook(lambda *_: seen.append([w.grad.flatten().double() for w in matrices]))

    return losses(dataclasses.replace(fault, begin=begin), *of_run), seen


def damage(fault: Fault, *of_run: Any) -> tuple[float, float]:
    """Return by how much a fault worsens the loss and turns gradients, against a twin of the same precision."""
    twin = Fault(options=fault.options, fresh=fault.fresh)
    both, turned = zip(*(with_gradients(each, *of_run) for each in (fault, twin)), strict=True)
    mean, mean_of_twin = (float(each[fault.begins :].mean()) for each in both)
    cosines = [
        [F.cosine_similarity(*pair, 0) for pair in zip(*step, strict=True)] for step in zip(*turned, strict=True)
    ]
    return mean / mean_of_twin - 1, 1 - float(torch.tensor(cosines)[fault.begins :].amin(1).mean())


def truth_by_gradients(fault: Fault, model: str, seed: int) -> tuple[str, bool]:
    """Return a fault's damage as text, and whether its truth follows, for faults that creep in or are small.

    Each run's twin has its own precision, so that in high precision a fault of FP8 has no damage at all. The loss is
    worse by WORSE or more, or gradients are turned by TURNED or more: one minus the cosine with the twin's, of the
    matrix where that is least, as a mean of the steps from the fault's first.
    """
    (worse, turned), (high, high_turned) = (damage(fault, model, seed, in_fp8) for in_fp8 in (True, False))
    is_of_fp8 = abs(high) <= abs(worse) / 10 and high_turned <= turned / 10
    is_other = high_turned >= turned * 2 / 3 and (worse < WORSE or high >= worse * 2 / 3)
    measured = "yes" if is_of_fp8 else "no" if is_other else "between"
    is_right = measured == (fault.fp8 or "no") and (worse >= WORSE or turned >= TURNED)
    return f"{worse:.1%} worse, turned by {turned:.2f}; {high:.1%}, {high_turned:.2f} in high precision", is_right


def main(
    kinds: list[str],
    draw: str = "fifth draw",
    faults: Mapping[str, Fault] = FIFTH_DRAW,
    healthy: Mapping[str, Fault] = FIFTH_HEALTHY,
    truth: Callable[[Fault, str, int], tuple[str, bool]] = truth,
) -> int:
    """Print the truth of these kinds of a draw, or of all, and losses of its healthy runs; return 1 if one is wrong."""
    torch.set_num_threads(1)
    wrong = 0
    for place, (kind, fault) in enumerate(faults.items()):
        for turn, model in enumerate(MODELS):
            for seed in seeds(draw, place + turn) if model in fault.models and kind in (kinds or [kind]) else ():
                measured, is_right = truth(fault, model, seed)
                wrong += not is_right
                print(f"{kind}, {model}, {seed}: {measured}{'' if is_right else '  <- wrong'}", flush=True)
    for kind, fault in healthy.items():
        if kind in (kinds or [kind]):
            print(kind, " ".join(f"{loss:.2f}" for loss in losses(fault, fault.models[0], 0)), flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
