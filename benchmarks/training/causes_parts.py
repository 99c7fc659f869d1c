"""Parts of faults that several blind draws of causes.py share, and how a draw's truth is measured.

Each fault has the truth: whether FP8 is its cause, the recorded step where it begins, the kinds of quantity that change
first, and the kinds of finding that say it. What changes first follows from where a fault is put in. A change of the
forward pass or of data changes the loss, gradients and inputs of later layers in one step, so each of them is right;
one of an optimizer's step changes that step's updates, and the loss at the next one. A fault that is there from the
first recorded step on (ALWAYS) has no departure. A fault of FP8 alone computes in high precision what the training
computed without it.

Whether FP8 is the cause is measured without octavo.inspect, for each kind, model and seed, by `truth_by_gradients`: the
training with the fault and its healthy twin (same recipe, batches and weights, no fault), both in FP8, and both with
all products in high precision. Faults of gradients hardly change the loss of ten steps at the rate of 3e-3, so these
have a rate of 1e-2 in all recorded steps (FAST), as has their twin. The draws' files, run as modules, measure theirs
again, and fail where a kind's truth is another; they also print how each healthy run's loss went.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training.causes import (
    ALL,
    DATA,
    MODELS,
    SIZES,
    STEPS,
    Do,
    Fault,
    Training,
    at,
    batches,
    prepared,
    seeds,
)
from octavo import recipes

WORSE, TURNED = 0.02, 0.1  # of a loss, and of gradients: what a fault changes at least
FORWARD, OF_DATA, OUTPUTS = ("loss", "gradients", "inputs"), ("batch", "labels", "jump"), ("jump", "logits")
STEPPED, WRITTEN, ALWAYS = ("updates", "loss"), ("weights", *FORWARD), {"begins": 0, "first": ()}
GRADIENTS, CASTS = ("gradients", *STEPPED), ("Cast(", "recipes.", "None")
OUT, LAST_OUT, MLPS = "attention.out", "blocks.1.attention.out", ("fc2", "down")
PLAIN = (OUT, "head")  # layers that return one tensor
FAST, BY_TENSOR, ROWS = {"lr": 1e-2}, {"recipe": recipes.dynamic()}, {"recipe": recipes.rowwise()}
LONG = {"recipe": recipes.delayed(history_length=1024)}
MOMENTUM = {"optimizer_of": functools.partial(torch.optim.SGD, momentum=0.9), "lr": 0.03}

attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
PLACES, FOUR_BITS = torch.arange(SIZES["context"]), {"recipe": recipes.nvfp4()}
IS_SEEN = PLACES <= PLACES[:, None]
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of E2M1


def of_fp8(causes: tuple[str, ...], first: tuple[str, ...], layer: Any = ALL, **does: Any) -> Fault:
    """Return a fault of FP8 alone."""
    return Fault(causes, layer, does.pop("remedies", CASTS), fp8="yes", first=first, **does)


def of_step(causes: tuple[str, ...], remedies: tuple[str, ...], first: tuple[str, ...], **does: Any) -> Fault:
    """Return a fault of gradients or of the optimizer's step."""
    return Fault(causes, "", remedies, first=first, **does)


of_gradients = functools.partial(Fault, ("gradients",), ALL, (), FAST, first=GRADIENTS)
of_backward = functools.partial(of_fp8, ("gradients", "rounded", "stale"), ("gradients",), options=FAST)
of_fast_step = functools.partial(of_step, options=FAST)


def of_text(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault of data that changes the text [B, C + 1] of each batch."""

    def batch(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        whole = change(torch.cat([tokens, targets[:, -1:]], 1))
        return (whole[:, :-1], whole[:, 1:]) if run.begun else (tokens, targets)

    return Fault(OF_DATA, "", DATA, batch=batch, first=FORWARD)


def of_forward(causes: tuple[str, ...] = ("jump",), **does: Do) -> Fault:
    """Return a fault of the forward pass alone."""
    return Fault(causes, ALL, first=FORWARD, **does)


def steps_since(run: Training) -> int:
    """Return 1 in the fault's step, 2 in the next, and 0 before."""
    return max(0, run.step - run.at + 1)


def states(run: Training) -> list[tuple[Tensor, Tensor]]:
    """Return scales [3] and histories [3, H] of the layers that have delayed scales."""
    layers = [run.model.get_submodule(name) for name in run.layers()]
    return [(each.delayed_scale, each.delayed_amax_history) for each in layers if hasattr(each, "delayed_scale")]


def option(name: str, value: Any) -> Do:
    """Return a change of an option of all groups in the fault's step."""
    return at(lambda run: [group.update({name: value}) for group in run.optimizer.param_groups])


def attending(attend: Callable[..., Tensor]) -> Do:
    """Return a change of all attention: ``attend`` of queries and keys, which rotary angles have turned, and values."""

    def forward(attention: Any, x: Tensor, rotary: Any) -> Tensor:
        attended = attend(*attention._turned(x, rotary))
        return attention.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def change(run: Training) -> None:
        for block in run.model.blocks:
            block.attention.forward = functools.partial(forward, block.attention)

    return change


def output_of(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Do:
    """Return a change of a module's output from the fault's step on, by its input and output."""
    return lambda run: run.model.get_submodule(name).register_forward_hook(
        lambda _, inputs, output: change(inputs[0], output) if run.begun else None
    )


def norms(change: Callable[..., Tensor]) -> Do:
    """Return a change of all norms' outputs, by weight, input and output."""

    def begin(run: Training) -> None:
        for name, norm in run.model.named_modules():
            if isinstance(norm, nn.RMSNorm):
                output_of(name, functools.partial(change, norm.weight))(run)

    return begin


def around(before: Callable[[Tensor], Tensor], after: Callable[..., Tensor], *ends: str) -> Do:
    """Return a change of layers' inputs and, of (layer, changed input, output), of their outputs, from the fault on."""

    def begin(run: Training) -> None:
        for layer in map(run.model.get_submodule, run.layers(*ends)):
            layer.register_forward_pre_hook(lambda _, inputs: (before(inputs[0]), *inputs[1:]) if run.begun else None)
            layer.register_forward_hook(lambda layer, inputs, y: after(layer, inputs[0], y) if run.begun else None)

    return begin


def times_inside(base: float, *ends: str) -> Do:
    """Return a change of layers' inputs, ``base`` times as large in each step, and of their outputs as much less.

    In high precision neither the output nor a gradient of the weight or of the layer before it changes.
    """

    def change(run: Training) -> None:
        def smaller(_: Any, __: Any, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            factor = base ** steps_since(run)
            return tuple(y / factor for y in output) if isinstance(output, tuple) else output / factor

        for layer in map(run.model.get_submodule, run.layers(*ends)):
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * base ** steps_since(run), *inputs[1:]))
            layer.register_forward_hook(smaller)

    return change


def gradient_of(name: str, change: Callable[[Tensor], Tensor]) -> Do:
    """Return a change of the gradient that a module's backward gets, from the fault's step on."""

    def hook(run: Training, output: Tensor) -> None:
        if run.begun and output.requires_grad:
            output.register_hook(change)

    return lambda run: run.model.get_submodule(name).register_forward_hook(lambda _, __, output: hook(run, output))


def gradients(change: Callable[[Tensor], Tensor]) -> Do:
    """Return a change of each parameter's gradient, before clipping, from the fault's step on."""

    def begin(run: Training) -> None:
        def hook(param: Tensor) -> None:
            if run.begun and param.grad is not None:
                param.grad.copy_(change(param.grad))

        for param in run.model.parameters():
            param.register_post_accumulate_grad_hook(hook)

    return begin


def keep_logits(run: Training) -> None:
    run.model.head.register_forward_hook(lambda _, __, logits: vars(run).update(logits=logits.float()))


def with_teacher(run: Training) -> None:
    run.teacher = copy.deepcopy(run.model)
    octavo.set_recipe(run.teacher, recipes.high_precision())
    keep_logits(run)


def counting(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes that count on from each sequence's first."""
    numbers = (tokens[:, :1].long() + torch.arange(SIZES["context"] + 1)) % 256
    return (numbers[:, :-1], numbers[:, 1:]) if run.step >= 0 else (tokens, targets)


def muon(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices of blocks, and its AdamW for embedding, head and vectors."""
    params = [param for group in groups for param in group["params"]]
    others = [param for param in params if param.ndim < 2 or 256 in param.shape or param.shape[0] == 4]
    matrices = [param for param in params if all(param is not each for each in others)]
    both = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return octavo.optim.Muon(both, lr=lr, adamw={"lr": lr}, moments="fp32")


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def of_kernel(before: Callable[[Tensor], Tensor], after: Callable[..., Tensor] = lambda *its: its[-1]) -> Do:
    """Return a change of inputs and results of PLAIN layers while they compute in FP8, from the fault's step on."""

    def begin(run: Training) -> None:
        def is_hit(layer: Any) -> bool:
            return run.begun and not layer.recipe.is_high_precision

        for layer in map(run.model.get_submodule, run.layers(*PLAIN)):
            layer.register_forward_pre_hook(lambda layer, inputs: (before(inputs[0]),) if is_hit(layer) else None)
            layer.register_forward_hook(lambda layer, x, y: after(layer, x[0], y) if is_hit(layer) else None)

    return begin


def labels_of(run: Training) -> Tensor:
    return batches(run.seed).training(run.done)[1].long()


def returned(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a change of the gradient of a layer's result."""
    return lambda _, __, y: [y.requires_grad and y.register_hook(change), y][-1]


def with_backward(y: Tensor, same: Tensor) -> Tensor:
    """Return y, with the gradient of ``same``."""
    return same + (y - same).detach()


def data_of(run: Training) -> list[Tensor]:
    return [param.detach() for param in run.model.parameters()]


class _InFP8:
    """A training whose fault acts only while its layers compute in FP8, as one of a kernel."""

    def __init__(self, run: Training) -> None:
        self.run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    @property
    def begun(self) -> bool:
        return self.run.begun and not self.run.model.head.recipe.is_high_precision


def in_fp8(begin: Do) -> Do:
    """Return a change of trainings in FP8 alone, which is none where these run once more in high precision."""
    return lambda run: None if run.model.head.recipe.is_high_precision else begin(_InFP8(run))


def routed(change: Callable[..., tuple[Tensor, Tensor]]) -> Do:
    """Return a change of the chosen experts [T, k] and their weights [T, k], from the fault's step on."""

    def begin(run: Training) -> None:
        for each in run.model.mixtures:
            each.experts.register_forward_pre_hook(lambda _, x: (x[0], *change(run, *x[1:])) if run.begun else None)

    return begin


def with_halves(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Do:
    """Return a change of what MLPs' activations return, by it and by their gate and other half, from the fault on."""
    halves: list[Tensor] = []

    def keep(_: Any, __: Tensor, y: Any) -> Any:
        halves[:] = y if isinstance(y, tuple) else y.chunk(2, -1)
        return y

    before = around(lambda x: x, keep, "fc1", "gate_up")
    after = around(lambda x: change(x, *halves), lambda *its: its[-1], *MLPS)
    return lambda run: [before(run), after(run)]


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
        run.run(STEPS, fault, seen)
    return torch.tensor(seen)


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
    """Return a fault's damage as text, and whether its truth follows.

    Each run's twin has its own precision, so that in high precision a fault of FP8 has no damage at all: FP8 is the
    cause ("yes") where the damage in high precision is less than a tenth of that in FP8, and is not ("no") where it is
    more than two thirds of it. The loss is worse by WORSE or more, or gradients are turned by TURNED or more: one minus
    the cosine with the twin's, of the matrix where that is least, as a mean of the steps from the fault's first.
    """
    (worse, turned), (high, high_turned) = (damage(fault, model, seed, in_fp8) for in_fp8 in (True, False))
    is_of_fp8 = abs(high) <= abs(worse) / 10 and high_turned <= turned / 10
    is_other = high_turned >= turned * 2 / 3 and (worse < WORSE or high >= worse * 2 / 3)
    measured = "yes" if is_of_fp8 else "no" if is_other else "between"
    is_right = measured == (fault.fp8 or "no") and (worse >= WORSE or turned >= TURNED)
    return f"{worse:.1%} worse, turned by {turned:.2f}; {high:.1%}, {high_turned:.2f} in high precision", is_right


def main(kinds: list[str], draw: str, faults: Mapping[str, Fault], healthy: Mapping[str, Fault]) -> int:
    """Print the truth of these kinds of a draw, or of all, and losses of its healthy runs; return 1 if one is wrong."""
    torch.set_num_threads(1)
    wrong = 0
    for place, (kind, fault) in enumerate(faults.items()):
        for turn, model in enumerate(MODELS):
            for seed in seeds(draw, place + turn) if model in fault.models and kind in (kinds or [kind]) else ():
                measured, is_right = truth_by_gradients(fault, model, seed)
                wrong += not is_right
                print(f"{kind}, {model}, {seed}: {measured}{'' if is_right else '  <- wrong'}", flush=True)
    for kind, fault in healthy.items():
        if kind in (kinds or [kind]):
            print(kind, " ".join(f"{loss:.2f}" for loss in losses(fault, fault.models[0], 0)), flush=True)
    return wrong > 0
