"""The thirteenth draw: healthy runs of unusual shape, written by someone who had not read octavo.inspect's rules.

The draw has no faults. In each of the 24 kinds an expert would call everything meant and harmless, for both models and
seeds 0 to 2. The mean loss of the recorded steps is finite and at most 0.14 % from that of the same run with all
products in high precision (SAME is the limit). From the first to the last step the loss falls by 21 to 50 % in fresh
runs, but in one kind, whose rate hardly begins to rise, it changes by less than 3 %; in the others it follows the texts
of the batches. ``python -m benchmarks.training.causes_thirteenth_draw`` measures it again.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import BEFORE, SEEDS, STEPS, Fault, Training, batches
from benchmarks.training.causes_eleventh_draw import labels_of
from benchmarks.training.causes_parts import FAST, MLPS, OUT, PLAIN, keep_logits, losses, with_teacher
from octavo import RecipeMap, recipes
from octavo.distributed.ranks import Ranks
from octavo.train.model import balance, next_byte_loss

SAME = 0.01  # of the loss in high precision: how near a healthy run's loss is

THIRTEENTH_DRAW: Mapping[str, Fault] = {}


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(mean.lerp(param.grad, 0.1).sign(), alpha=group["lr"])
                mean.lerp_(param.grad, 0.01)


def data_of(run: Training) -> list[Tensor]:
    return [param.detach() for param in run.model.parameters()]


def remembered(run: Training) -> None:
    run.slow = [data.clone() for data in data_of(run)]


def looked_ahead(run: Training) -> None:
    """Go back half of the way since the fifth step before, in each fifth step (arXiv 1907.08610)."""
    if run.step % 5 == 4:
        torch._foreach_lerp_(run.slow, data_of(run), 0.5)
        torch._foreach_copy_(data_of(run), run.slow)


def sharpness_aware(run: Training) -> None:
    """Step by the gradient at weights a little uphill of the present ones (arXiv 2010.01412)."""

    def uphill(*_: object) -> None:
        params = [*run.model.parameters()]
        present, grads = [param.detach().clone() for param in params], [param.grad for param in params]
        torch._foreach_add_(data_of(run), torch._foreach_mul(grads, 0.05 / float(nn.utils.get_total_norm(grads))))
        run.optimizer.zero_grad()
        tokens, targets = batches(run.seed).training(run.done)
        next_byte_loss(run.model(tokens), targets).backward()
        torch._foreach_copy_(data_of(run), present)
        nn.utils.clip_grad_norm_(params, run.clip)

    run.optimizer.register_step_pre_hook(uphill)


def height(step: int) -> float:
    """Return a cycle's height: from 0 up to 1 in the sixth recorded step, and down to 0 in the last."""
    return min((step - BEFORE) / 5, (BEFORE + STEPS - 1 - step) / (STEPS - 6))


def of_mean_teacher(run: Any, loss: Tensor) -> Tensor:
    """Learn from a mean of the weights, too (arXiv 1703.01780)."""
    with torch.no_grad():
        answers = run.teacher(batches(run.seed).training(run.done)[0]).float().softmax(-1)
    torch._foreach_lerp_([param.data for param in run.teacher.parameters()], data_of(run), 0.1)
    return (loss + F.cross_entropy(run.logits.mT, answers.mT)) / 2


def measured_by_means(run: Training) -> None:
    """Average the weights, and compute a loss with the averages in high precision in each fourth step."""
    torch._foreach_lerp_(run.slow, data_of(run), 0.1)
    if run.step % 4 == 3:
        present = [data.clone() for data in data_of(run)]
        torch._foreach_copy_(data_of(run), run.slow)
        run.model.eval()
        with torch.no_grad(), octavo.using(run.model, recipes.high_precision()):
            tokens, targets = batches(run.seed).training(5000)
            run.held_out = float(next_byte_loss(run.model(tokens), targets))
        run.model.train()
        torch._foreach_copy_(data_of(run), present)


def stochastic_depth(run: Training) -> None:
    """Leave each branch out for a tenth of the sequences (arXiv 1603.09382)."""

    def after(_: Any, __: Any, y: Tensor) -> Tensor:
        return y * (torch.rand(len(y), 1, 1) >= 0.1) / 0.9

    for block in run.model.blocks:
        block.attention.register_forward_hook(after)
        block.mlp.register_forward_hook(after)


def looped(run: Training) -> None:
    """Compute with one block twice (arXiv 1807.03819)."""
    run.model.blocks[1] = run.model.blocks[0]
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr, betas=(0.9, 0.95), weight_decay=0.0)


def held_on_spheres(run: Training) -> None:
    """Give each row of the matrices the norm that it began with."""
    for data, first in zip(data_of(run), run.slow, strict=True):
        if data.ndim > 1:
            data.mul_(first.norm(dim=-1, keepdim=True) / data.norm(dim=-1, keepdim=True))


def accumulated(run: Training) -> None:
    """Compute gradients of the first three of four micro-batches."""
    for turn in (1, 2, 3):
        tokens, targets = batches(run.seed).training(run.done + 1000 * turn)
        (next_byte_loss(run.model(tokens), targets) / 4).backward()


def saved_and_loaded(run: Training) -> None:
    """Write all state to a file before the ninth step, and load it from there."""
    if run.step == 8:
        whole = run.model.state_dict(), run.optimizer.state_dict(), octavo.nn.delayed_state_dict(run.model)
        torch.save(whole, file := io.BytesIO())
        file.seek(0)
        model, optimizer, delayed = torch.load(file, weights_only=True)
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        octavo.nn.load_delayed_state_dict(run.model, delayed)


def with_adapters(run: Training) -> None:
    """Freeze the model, and train adapters of rank 4 beside its layers (arXiv 2106.09685)."""
    run.model.requires_grad_(False)
    run.adapters = {}
    for name in run.layers(*PLAIN, *MLPS):
        layer = run.model.get_submodule(name)
        outs, ins = layer.weight.shape[-2:]
        down, up = nn.Parameter(torch.randn(4, ins) * ins**-0.5), nn.Parameter(torch.zeros(outs, 4))
        run.adapters[name] = down, up
        layer.register_forward_hook(lambda _, inputs, y, down=down, up=up: y + inputs[0] @ down.t() @ up.t())
    run.optimizer = torch.optim.AdamW([each for pair in run.adapters.values() for each in pair], lr=run.lr)


def merged(run: Training) -> None:
    """Add adapters to the weights before the ninth step, and begin new ones with a warm-up (arXiv 2307.05695)."""
    for name, (down, up) in run.adapters.items() if run.step == 8 else ():
        run.model.get_submodule(name).weight.detach().add_(up.detach() @ down.detach())
        nn.init.normal_(down, std=down.shape[1] ** -0.5)
        nn.init.zeros_(up)
        run.optimizer.state.clear()


def deeper(run: Training) -> None:
    """Add a copy of the last block that adds zero at first."""
    run.model.blocks.append(copy.deepcopy(run.model.blocks[-1]))
    for name in run.layers(OUT, *MLPS):
        if name.startswith("blocks.2."):
            run.weight(name).zero_()
    run.optimizer.add_param_group({"params": [*run.model.blocks[2].parameters()], "weight_decay": 0.1})


NESTEROV = functools.partial(octavo.optim.SGD, momentum=0.9, nesterov=True)
OF_KINDS = RecipeMap(
    recipes.delayed(),
    {"*.attention.qkv*": recipes.mx(), "*.attention.out": recipes.blockwise(), "head": recipes.rowwise()},
)

THIRTEENTH_HEALTHY: Mapping[str, Fault] = {
    "Lion": Fault(options={"optimizer_of": Lion, "lr": 1e-3}, fresh=True),
    "Nesterov's momentum in FP8": Fault(options={"optimizer_of": NESTEROV, "lr": 0.03}),
    "lookahead": Fault(begin=remembered, after=looked_ahead),
    "sharpness-aware steps": Fault(begin=sharpness_aware),
    "one cycle": Fault(  # arXiv 1708.07120: the first beta falls while the rate rises
        options={"schedule": lambda step: 0.04 + 2 * height(step)},
        before=lambda run: [g.update(betas=(0.95 - height(run.done) / 10, 0.95)) for g in run.optimizer.param_groups],
    ),
    "a warm-up of 2000 steps": Fault(options={"warmup": 2000}, fresh=True),
    "batches that grow": Fault(
        options={"lr": 1e-3}, batch=lambda run, x, y: (x[: (n := 2 << min(2, run.step // 5))], y[:n])
    ),
    "four epochs of four batches": Fault(
        options={"lr": 1e-3}, batch=lambda run, *_: batches(run.seed).training(BEFORE + run.step % 4)
    ),
    "labels smoothed more and more": Fault(
        begin=keep_logits,
        loss=lambda run, _: F.cross_entropy(run.logits.mT, labels_of(run), label_smoothing=(run.step + 1) / 160),
    ),
    "experts balanced by biases": Fault(models=("experts",), after=lambda run: balance(run.model.mixtures, Ranks())),
    "a teacher of averaged weights": Fault(begin=with_teacher, loss=of_mean_teacher),
    "evaluated with averaged weights": Fault(begin=remembered, after=measured_by_means),
    "dropout from the begin": Fault(
        options={"at": 0}, fresh=True, begin=parts.around(lambda x: x, lambda *its: F.dropout(its[-1], 0.1), OUT, *MLPS)
    ),
    "stochastic depth": Fault(fresh=True, begin=stochastic_depth),
    "logits capped softly": Fault(  # arXiv 2408.00118
        options={"at": 0}, fresh=True, begin=parts.output_of("head", lambda _, y: 30 * (y / 30).tanh())
    ),
    "one block twice": Fault(fresh=True, begin=looped),
    "rows of constant norms": Fault(fresh=True, begin=remembered, after=held_on_spheres),
    "a weight decay that rises": Fault(
        before=lambda run: run.optimizer.param_groups[0].update(weight_decay=0.04 + 0.36 * run.step / (STEPS - 1))
    ),
    "four micro-batches a step": Fault(before=accumulated, loss=lambda run, loss: loss / 4),
    "thawed part by part": Fault(  # arXiv 1801.06146: the head and its norm alone at first
        before=lambda run: [
            part.requires_grad_(run.step >= 4 * place)
            for place, part in enumerate((*run.model.blocks[::-1], run.model.embedding), 1)
        ]
    ),
    "saved and loaded": Fault(before=saved_and_loaded),
    "adapters merged": Fault(
        options={**FAST, "schedule": lambda step: min(1.0, ((step - BEFORE) % 8 + 1) / 4)},
        begin=with_adapters,
        before=merged,
    ),
    "a block more": Fault(begin=deeper),
    "a recipe for each kind of layer": Fault(options={"recipe": OF_KINDS}),
}


def main(kinds: list[str]) -> int:
    """Print losses of these kinds of run, or of all, and how far they are from those in high precision."""
    torch.set_num_threads(1)
    wrong = 0
    for kind, fault in THIRTEENTH_HEALTHY.items():
        for model, seed in itertools.product(fault.models, SEEDS) if kind in (kinds or [kind]) else ():
            loss, high = (losses(fault, model, seed, in_fp8) for in_fp8 in (True, False))
            apart = float(loss.mean() / high.mean()) - 1
            wrong += not abs(apart) < SAME
            print(f"{kind}, {model}, {seed}:", *(f"{each:.2f}" for each in loss), f"{apart:+.2%}", flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
