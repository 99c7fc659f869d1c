"""The ninth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, of
which seven change the forward pass alone. Three of FP8's are of a kernel or a cache: hooks change what layers in FP8
compute, and no others. Truth is stated and measured as causes_parts.py says; no kind lies between "FP8 is the cause"
and "FP8 is not". ``python -m benchmarks.training.causes_ninth_draw`` measures it again. Twelve kinds worsen the loss by
less than 2 % in some runs, but turn gradients by more than 0.1: lost updates by 0.12 to 0.39 (the loss is -0.8 to 0.1 %
worse), the next row's scales by 0.18 to 0.60 (1.1 to 2.8 %), states of other blocks by 0.28 to 0.54 (-0.8 to 1.8 %),
scales of 1 by 0.26 to 0.74 (0.6 to 1.0 %), the others by 0.45 or more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, CHECKPOINT, DATA, DELAYED, SIZES, Fault, Training, at, batches
from benchmarks.training.causes_parts import (
    BY_TENSOR,
    FAST,
    FORWARD,
    GRADIENTS,
    LONG,
    MLPS,
    OF_DATA,
    OUTPUTS,
    PLAIN,
    WRITTEN,
    attend,
    attending,
    keep_logits,
    main,
    of_fp8,
    option,
    output_of,
    states,
    times_inside,
)
from octavo import recipes
from octavo.nn.transformer import rotate
from octavo.train.trainer import build_model

of_fast_step = functools.partial(parts.of_step, options=FAST)


def of_layer_before(run: Training) -> None:
    """Cast each layer's operands by the scales of the layer before it, the first one's by those of the last."""
    scales = [scales for scales, _ in states(run)]
    for mine, other in zip(scales, [each.clone() for each in scales[-1:] + scales[:-1]], strict=True):
        mine.copy_(other)


def once_in_eight(run: Training) -> None:
    """Keep the scales of the fault's step for eight steps, then those of the next eight."""
    if (run.step - run.at) % 8 == 0:
        run.scales = [scales.clone() for scales, _ in states(run)]
    for (scales, _), old in zip(states(run), run.scales, strict=True):
        scales.copy_(old)


def half_in_fp8(layer: Any, _: Tensor, y: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return half of a product in FP8: codes of weights are read as the E4M3 whose exponent has a bias of 8."""
    factor = 1.0 if layer.recipe.is_high_precision else 0.5
    return tuple(part * factor for part in y) if isinstance(y, tuple) else y * factor


def backward_of_initial(run: Training) -> None:
    """Multiply gradients in FP8 by initial weights, as if their transposed codes outlived the load of a checkpoint."""
    initial = build_model(run.model.config, "float32", run.seed)
    old = {run.model.get_submodule(name): initial.get_submodule(name).weight.detach() for name in run.layers(*PLAIN)}

    def after(layer: Any, x: Tensor, y: Tensor) -> Tensor:
        change = F.linear(x, old[layer] - layer.weight.detach())
        return y if layer.recipe.is_high_precision else y + change - change.detach()

    parts.around(lambda x: x, after, *PLAIN)(run)


def scales_of_next_row(run: Training) -> None:
    """Read blocks of inputs in FP8 with the scales of the next row's, as if scales lay in another order."""

    def misread(layer: Any, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        if not run.begun or layer.recipe.is_high_precision:
            return None
        blocks = inputs[0].unflatten(-1, (-1, 32))
        octaves = blocks.detach().abs().amax(-1, keepdim=True).clamp(min=2.0**-60).log2().floor()
        return ((blocks * 2 ** (octaves.roll(-1, 1) - octaves)).flatten(-2),)

    for name in run.layers(*PLAIN):
        run.model.get_submodule(name).register_forward_pre_hook(misread)


def common_part(run: Training) -> None:
    """Add 2 standard deviations to all gradients of logits, and take from the head's results what comes of them."""
    head, values = run.model.head, dict.fromkeys(("part", "rows"), torch.zeros(()))

    def added(grad: Tensor) -> Tensor:
        values["part"] = 2 * grad.std()
        return grad + values["part"]

    head.register_forward_pre_hook(lambda _, inputs: values.update(rows=inputs[0].detach().flatten(0, -2).sum(0)))
    parts.gradient_of("head", added)(run)
    parts.gradient_of("norm", lambda grad: grad - values["part"] * head.weight.detach().sum(0))(run)
    head.weight.register_hook(lambda grad: grad - values["part"] * values["rows"])


def states_of_blocks_swapped(run: Training) -> None:
    """Give each block's parameters the optimizer's state of the other block's."""
    state = run.optimizer.state
    for one, other in zip(*(block.parameters() for block in run.model.blocks), strict=True):
        state[one], state[other] = state[other], state[one]


def updates_lost(run: Training) -> None:
    """Undo each step in the second half of each parameter's rows, as if another rank's were not gathered."""
    rows = [param.data[len(param) // 2 :] for param in run.model.parameters()]
    run.optimizer.register_step_pre_hook(lambda *_: vars(run).update(old=[each.clone() for each in rows]))
    run.optimizer.register_step_post_hook(lambda *_: torch._foreach_copy_(rows, run.old) if run.begun else None)


def large_z_loss(run: Training, loss: Tensor) -> Tensor:
    return loss + run.logits.logsumexp(-1).square().mean() / 10 if run.begun else loss


def embeddings_moved(run: Training) -> None:
    run.weight("embedding").copy_(run.weight("embedding").roll(1, 0))


def in_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to a position and the three before it."""
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril().triu(-3)
    return F.scaled_dot_product_attention(q, k, v, seen)


def of_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to all of the sequence before in the batch, too: documents in one row, and no mask between them."""
    seen = torch.ones(q.shape[-2], 2 * q.shape[-2], dtype=torch.bool).tril(q.shape[-2])
    k, v = (torch.cat([each.roll(1, 0), each], 2) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, seen)


def queries_ahead(run: Training) -> None:
    """Turn queries by eight positions more than keys, as of a cache that was longer."""
    attending(lambda q, k, v: attend(rotate(q, (run.model.cos[8], run.model.sin[8])), k, v))(run)


def in_parallel(run: Training) -> None:
    """Let MLPs read what attention reads, and not its result."""
    for block in run.model.blocks:
        block.forward = lambda x, rotary=None, block=block: x + block.attention(x, rotary) + block.mlp(x)


def without_gate(_: Any, __: Any, y: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    gate, up = y if isinstance(y, tuple) else y.chunk(2, -1)
    opened = torch.full_like(gate, 1.2785)  # whose SiLU is 1
    return (opened, up) if isinstance(y, tuple) else torch.cat([opened, up], -1)


def dropped_anew(run: Training) -> None:
    """Drop 30 % of what attention and MLPs compute, and from the fault's step on others of their gradients."""

    def hook(_: Any, __: Any, y: Tensor) -> Tensor:
        mask, another = (torch.rand(2, *y.shape) > 0.3) / 0.7
        backward = y * (another if run.begun else mask)
        return backward + (y * mask - backward).detach()

    for part in [each for block in run.model.blocks for each in (block.attention, block.mlp)]:
        part.register_forward_hook(hook)


def of_token_before(run: Training) -> None:
    """Give each token what experts computed for the one before it."""
    for name in ("blocks.0.mlp", "blocks.1.mlp"):
        output_of(name, lambda _, y: y.flatten(0, 1).roll(1, 0).view_as(y))(run)


NINTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "scales that stay at 1": of_fp8(
        ("flushed", "stale", "rounded"),
        FORWARD,
        options=DELAYED | FAST,
        begin=parts.gradients(lambda grad: grad * 6),
        loss=lambda run, loss: loss / 6 if run.begun else loss,  # the mean over so many batches
        before=at(lambda run: [scales.fill_(1) for scales, _ in states(run)], True),
    ),
    "scales of the layer before": of_fp8(
        ("clipped", "stale", "flushed"), FORWARD, options=DELAYED, before=at(of_layer_before, True)
    ),
    "scales renewed once in eight steps": of_fp8(
        ("clipped", "stale"),
        FORWARD,
        options=DELAYED,
        begin=times_inside(2.0, *MLPS),
        before=at(once_in_eight, True),
    ),
    "transposed weights of the beginning": of_fp8(
        ("stale", "gradients"), ("gradients",), options=FAST, begin=backward_of_initial
    ),
    "weights read as another E4M3": of_fp8(
        ("stale", "jump"), FORWARD, begin=parts.around(lambda x: x, half_in_fp8, "fc1", "gate_up", *MLPS)
    ),
    "block scales of the next row": of_fp8(
        ("stale", "clipped", "jump"), FORWARD, options={"recipe": recipes.mx()}, begin=scales_of_next_row
    ),
    "a common part in the head's gradient": of_fp8(
        ("rounded", "outliers"), ("gradients",), "head", options=BY_TENSOR, begin=common_part
    ),
    # gradients, the optimizer and the loss
    "clipped by value": of_fast_step(
        ("gradients",), ("clip_grad_norm_",), GRADIENTS, begin=parts.gradients(lambda grad: grad.clamp(-1e-6, 1e-6))
    ),
    "gradients cleared before the step": parts.of_step(
        ("gradients", "frozen", "unmoved"), ("zero_grad",), GRADIENTS, begin=parts.gradients(torch.zeros_like)
    ),
    "decay added to gradients": of_fast_step(
        ("options", "decay"), ("weight_decay",), ("updates",), before=option("decoupled_weight_decay", False)
    ),
    "states of blocks swapped": of_fast_step(
        ("state",), ("load_state_dict",), ("updates",), before=at(states_of_blocks_swapped)
    ),
    "half of the updates lost": Fault(
        ("frozen", "unmoved", "overwritten"), ALL, (), FAST, begin=updates_lost, first=("updates",)
    ),
    "z-loss that is too large": of_fast_step(("gradients",), (), GRADIENTS, begin=keep_logits, loss=large_z_loss),
    # weights and data
    "embeddings of the next token": parts.of_step(("overwritten",), CHECKPOINT, WRITTEN, before=at(embeddings_moved)),
    "spaces left out of the loss": Fault(
        OF_DATA,
        "",
        DATA,
        batch=lambda run, x, y: (x, y.long().masked_fill(y == ord(" "), -100) if run.begun else y),
        first=("loss", "gradients"),
    ),
    "text in UTF-16": parts.of_text(lambda text: torch.stack([text, 0 * text], -1).flatten(1)[:, : text.shape[1]]),
    # the program
    "scores scaled twice": parts.of_forward(
        OUTPUTS, before=at(attending(lambda q, k, v: attend(q, k, v, scale=1 / 32)))
    ),
    "a window of four positions": parts.of_forward(OUTPUTS, before=at(attending(in_window))),
    "documents that see each other": parts.of_forward(OUTPUTS, before=at(attending(of_packed))),
    "queries eight positions ahead": parts.of_forward(OUTPUTS, before=at(queries_ahead)),
    "attention and MLP in parallel": parts.of_forward(before=at(in_parallel)),
    "gate left out": parts.of_forward(begin=parts.around(lambda x: x, without_gate, "fc1", "gate_up")),
    "dropout drawn anew in backward": Fault(("gradients",), ALL, (), FAST, begin=dropped_anew, first=GRADIENTS),
    "experts' results a token late": Fault(("jump",), ALL, models=("experts",), begin=of_token_before, first=FORWARD),
}


def centralized(run: Training) -> None:
    """Take from each row of a matrix's gradient its mean (arXiv 2004.01461)."""
    matrices = [param for param in run.model.parameters() if param.ndim > 1]
    run.optimizer.register_step_pre_hook(lambda *_: [w.grad.sub_(w.grad.mean(-1, True)) for w in matrices] and None)


def mixed_in(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Take one more sequence of another domain in each second step."""
    is_same = (torch.arange(len(tokens)) >= run.step // 2)[:, None]
    others = parts.counting(run, tokens, targets)
    return tokens.long().where(is_same, others[0]), targets.long().where(is_same, others[1])


def new_head(run: Training) -> None:
    """Freeze the model, and train a head that begins anew."""
    run.model.requires_grad_(False)
    nn.init.normal_(run.model.head.weight, std=0.5 * SIZES["width"] ** -0.5)
    run.optimizer = torch.optim.AdamW([run.model.head.weight.requires_grad_()], lr=run.lr)


def upcycled(run: Training) -> None:
    """Begin with experts that are copies of one (arXiv 2212.05055), and with a new optimizer."""
    for name in run.layers("gate_up", "down"):
        run.weight(name).copy_(run.weight(name)[:1].clone().expand_as(run.weight(name)))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr)


def by_advantage(run: Training, loss: Tensor) -> Tensor:
    """Weigh each sequence by a reward, less the batch's mean reward, as policy gradients do."""
    targets = batches(run.seed).training(run.done)[1].long()
    each, rewards = F.cross_entropy(run.logits.mT, targets, reduction="none").mean(1), torch.randn(len(targets))
    return ((rewards - rewards.mean()) * each).mean()


NINTH_HEALTHY: Mapping[str, Fault] = {
    "Adamax": Fault(options={"optimizer_of": torch.optim.Adamax}),
    "no clipping": Fault(options={"clip": 0.0}),
    "gradients centralized": Fault(begin=centralized),
    "answers alone in the loss": Fault(
        batch=lambda run, x, y: (x, y.long().masked_fill(torch.arange(32) < torch.randint(4, 25, (len(y), 1)), -100))
    ),
    "another domain mixed in": Fault(batch=mixed_in),
    "weights' gradients in high precision": Fault(options={"recipe": recipes.rowwise_with_gw_hp()}),
    "a history of 1024 steps": Fault(options=LONG),
    "a new head on a frozen model": Fault(begin=new_head),
    "upcycled experts": Fault(options={"lr": 1e-3}, models=("experts",), begin=upcycled),
    "jitter before routers": Fault(  # arXiv 2101.03961
        models=("experts",),
        begin=lambda run: [
            mixture.router.register_forward_pre_hook(lambda _, x: (x[0] * (torch.rand_like(x[0]) / 5 + 0.9),))
            for mixture in run.model.mixtures
        ],
    ),
    "a tenth of bytes dropped": Fault(batch=lambda run, x, y: (x * (torch.rand(x.shape) >= 0.1), y)),
    "sequences weighed by rewards": Fault(options={"lr": 3e-4}, begin=keep_logits, loss=by_advantage),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "ninth draw", NINTH_DRAW, NINTH_HEALTHY))
