"""The tenth draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, which
change the forward pass alone. Six of FP8's are of a kernel: hooks change what layers in FP8 compute, and no others;
of these that of inputs' gradients also has a loss that is smaller. Truth is stated and measured as the ninth draw's,
for seeds 0 to 2; no kind lies between "FP8 is the cause" and "FP8 is not", and FP8's have no damage at all in high
precision. ``python -m benchmarks.training.causes_tenth_draw`` measures it again. Nine kinds worsen the loss by 2.3 to
13 % in each run. The other fifteen do so by less than 2 % in some runs, but turn gradients by 0.1 or more: first
moments in two bits by 0.11 to 0.29 (the loss is -0.2 to 0.5 % worse), queries and keys normalized by 0.18 to 0.58 (0.0
to 1.0 %), smoothing by 0.20 to 0.52 (0.4 to 1.0 %), the oldest amax by 0.24 to 0.47 (0.5 to 1.3 %), other signs by 0.26
to 0.29 (-0.4 to 0.4 %), inputs' gradients in E5M2 by 0.29 to 0.58 (-0.1 to 0.9 %), the others by 0.31 or more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, CHECKPOINT, DATA, SIZES, Do, Fault, Training, at, batches
from benchmarks.training.causes_parts import (
    ALWAYS,
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
    steps_since,
    times_inside,
)
from octavo import E4M3, RecipeMap, recipes
from octavo.train.model import next_byte_loss

HALF = SIZES["context"] // 2
TEMPLATE = torch.tensor([*b"<|user|> Write: "], dtype=torch.uint8)
HADAMARD = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 4)
PLACES = torch.arange(SIZES["context"])
PREFIX = (PLACES < 8) | (PLACES <= PLACES[:, None])  # the first eight positions are seen by all
DOCUMENTS = (PLACES // 11 == PLACES[:, None] // 11).tril()
ROWS = {"recipe": recipes.rowwise()}
TURNED = HADAMARD @ (HADAMARD * torch.tensor([1.0, 1.0, 1.0, -1.0] * 4)[:, None]) / 16  # 4 of 16 signs differ


def of_kernel(before: Callable[[Tensor], Tensor], after: Callable[..., Tensor] = lambda *its: its[-1]) -> Do:
    """Return a change of inputs and results of PLAIN layers while they compute in FP8, from the fault's step on."""

    def begin(run: Training) -> None:
        def is_hit(layer: Any) -> bool:
            return run.begun and not layer.recipe.is_high_precision

        for layer in map(run.model.get_submodule, run.layers(*PLAIN)):
            layer.register_forward_pre_hook(lambda layer, inputs: (before(inputs[0]),) if is_hit(layer) else None)
            layer.register_forward_hook(lambda layer, x, y: after(layer, x[0], y) if is_hit(layer) else None)

    return begin


def read_rounded_up(x: Tensor) -> Tensor:
    """Multiply each row as if its scale were rounded up to a power of two after the cast."""
    octaves = (x.detach().abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / E4M3.limit).log2()
    return x * 2 ** (octaves.ceil() - octaves)


def saturated(x: Tensor) -> Tensor:
    """Clip rows at 240 in codes, where E4M3 of other hardware ends, with the gradient of x."""
    limit = x.detach().abs().amax(-1, keepdim=True) * 240 / E4M3.limit
    return x + (x.clamp(-limit, limit) - x).detach()


def returned_in_e5m2(x: Tensor) -> Tensor:
    """Return x, whose gradient is stored in E5M2 without a scale."""
    same = x.view_as(x)
    if same.requires_grad:
        same.register_hook(lambda grad: grad.to(torch.float8_e5m2).to(grad.dtype))
    return same


def turned_by_other_signs(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Turn blocks of 16 tokens of one operand of the weight's gradient by other signs than the other operand's."""
    turned = (TURNED @ x.flatten(0, -2).unflatten(0, (-1, 16))).view_as(x)
    change = F.linear((turned - x).detach(), layer.weight)
    return y + change - change.detach()


def of_vocabulary_part(run: Training, loss: Tensor) -> Tensor:
    """Return the loss of a softmax over the 32 bytes that the label's rank has."""
    targets = batches(run.seed).training(run.done)[1].long()
    is_other = torch.arange(256) // 32 != targets[..., None] // 32
    return next_byte_loss(run.logits.masked_fill(is_other, -1e9), targets) if run.begun else loss


def without_mean_term(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a norm's result, with a gradient as if its divisor were a constant."""
    same = x * x.detach().square().mean(-1, keepdim=True).add(1e-5).rsqrt() * weight
    return same + (y - same).detach()


def with_balance_loss(run: Training, loss: Tensor) -> Tensor:
    """Add the auxiliary loss of balance (arXiv 2101.03961) with a factor of 1, where 0.01 is usual."""
    for scores in [run.scores[each.router] for each in run.model.mixtures] if run.begun else ():
        shares = F.one_hot(scores.topk(2).indices, 4).float().mean((0, 1))
        loss = loss + 4 * (shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    return loss


def updates_three_times(run: Training) -> None:
    """Add each update three times, as if a hook had been registered anew."""
    params = [param.data for param in run.model.parameters()]
    run.optimizer.register_step_pre_hook(lambda *_: vars(run).update(old=[each.clone() for each in params]))
    run.optimizer.register_step_post_hook(lambda *_: torch._foreach_lerp_(params, run.old, -2.0) if run.begun else None)


def in_two_bits(run: Training) -> None:
    for state in run.optimizer.state.values():
        unit = state["exp_avg"].abs().max().clamp(min=1e-30)
        state["exp_avg"].div_(unit).round_().mul_(unit)


def padded_left(_: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Begin sequences with 8 to 24 zeros, which the loss leaves out and attention does not."""
    place = PLACES - torch.randint(8, 25, (len(tokens), 1))
    tokens, targets = (each.long().gather(1, place.clamp(min=0)) for each in (tokens, targets))
    return tokens * (place >= 0), targets.masked_fill(place < 0, -100)


def interpolated(run: Training) -> None:
    """Turn queries and keys by an eighth of their position's angles."""
    angles = torch.atan2(run.model.sin[1], run.model.cos[1]) * PLACES[:, None] / 8
    run.model.cos, run.model.sin = angles.cos(), angles.sin()


def of_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add attention to the first half's keys and that to the second half's, each with a softmax of its own."""
    is_seen = torch.ones(q.shape[-2], HALF, dtype=torch.bool).tril()
    first = F.scaled_dot_product_attention(q, k[:, :, :HALF], v[:, :, :HALF], is_seen)
    second = attend(*(each[:, :, HALF:] for each in (q, k, v)))
    return first + F.pad(second, (0, 0, HALF, 0))


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def residual_after_norm(run: Training) -> None:
    """Add what attention and MLPs compute to the normalized stream."""
    for block in run.model.blocks:
        block.forward = lambda x, rotary=None, block=block: (
            normed(y := normed(x) + block.attention(x, rotary)) + block.mlp(y)
        )


def chosen_before(run: Training) -> None:
    """Send tokens to the experts that the router chose for the batch before."""
    chosen: dict[tuple[int, int], Tensor] = {}

    def replace(place: int, _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        chosen[place, run.step] = inputs[1]
        return (inputs[0], chosen[place, run.step - run.begun], *inputs[2:])

    for place, mixture in enumerate(run.model.mixtures):
        mixture.experts.register_forward_pre_hook(functools.partial(replace, place))


of_gradients = functools.partial(Fault, ("gradients",), ALL, (), FAST, first=GRADIENTS)

TENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "row scales rounded up": of_fp8(("stale", "jump"), FORWARD, options=ROWS, begin=of_kernel(read_rounded_up)),
    "rows saturated at 240": of_fp8(
        ("clipped", "stale"),
        FORWARD,
        options=ROWS,
        begin=of_kernel(
            saturated, lambda layer, x, y: y + F.linear(x, saturated(layer.weight) - layer.weight).detach()
        ),
    ),
    "input gradients stored in E5M2": of_fp8(
        ("flushed", "rounded"),
        ("gradients",),
        options=FAST,
        begin=lambda run: [of_kernel(returned_in_e5m2)(run), parts.gradients(lambda grad: grad * 16)(run)],
        loss=lambda run, loss: loss / 16 if run.begun else loss,  # the mean over so many batches
    ),
    "weights' gradients turned by other signs": of_fp8(
        ("gradients", "rounded"),
        ("gradients",),
        options={"recipe": recipes.nvfp4()} | FAST,
        models=("dense",),
        begin=of_kernel(lambda x: x, turned_by_other_signs),
    ),
    "smoothing left out of weights": of_fp8(
        ("stale", "jump"), FORWARD, begin=of_kernel(lambda x: x * 2 ** torch.linspace(-1, 1, x.shape[-1]))
    ),
    "the oldest amax in place of the newest": of_fp8(
        ("clipped", "stale"),
        FORWARD,
        options={"recipe": recipes.delayed(4, "most_recent")},
        begin=times_inside(2.0, *MLPS),
        before=at(lambda run: [scales[0].copy_(E4M3.limit / history[0, -1]) for scales, history in states(run)], True),
    ),
    "last rows of products left out": of_fp8(
        ("stale", "jump", "dead units"),
        FORWARD,
        begin=of_kernel(lambda x: x, lambda _, __, y: F.pad(y.flatten(0, -2)[:-24], (0, 0, 0, 24)).view_as(y)),
    ),
    # gradients, the optimizer and the loss
    "no gradient through attention's softmax": of_gradients(
        before=at(attending(lambda q, k, v: attend(q.detach(), k.detach(), v)))
    ),
    "norms' divisor a constant in backward": of_gradients(begin=parts.norms(without_mean_term)),
    "softmax over a part of the vocabulary": of_gradients(begin=keep_logits, loss=of_vocabulary_part),
    "loss of balance x 100": of_gradients(
        models=("experts",),
        begin=lambda run: [
            each.router.register_forward_hook(lambda key, _, y: vars(run).setdefault("scores", {}).update({key: y}))
            for each in run.model.mixtures
        ],
        loss=with_balance_loss,
    ),
    "each update added three times": Fault(
        ("options", "learning rate", "state"), ALL, ("lr",), FAST, begin=updates_three_times, first=("updates",)
    ),
    "first moments in two bits": Fault(
        ("state",), ALL, ("load_state_dict",), before=at(in_two_bits, True), first=("updates",)
    ),
    # weights and data
    "weights not transposed on load": Fault(
        ("overwritten",),
        ALL,
        CHECKPOINT,
        before=at(lambda run: [w.copy_(w.t().clone()) for w in map(run.weight, run.layers(OUT))]),
        first=WRITTEN,
    ),
    "padding on the left": Fault(OF_DATA, "", DATA, batch=padded_left, **ALWAYS),
    "a template in each sequence": parts.of_text(
        lambda text: torch.cat([TEMPLATE.to(text.dtype).expand(len(text), -1), text[:, : -len(TEMPLATE)]], 1)
    ),
    # the program
    "positions interpolated by eight": parts.of_forward(OUTPUTS, before=at(interpolated)),
    "queries and keys normalized": parts.of_forward(
        OUTPUTS, before=at(attending(lambda q, k, v: attend(normed(q), normed(k), v)))
    ),
    "chunks of keys in the other order": parts.of_forward(
        OUTPUTS, before=at(attending(lambda q, k, v: attend(q, k.roll(HALF, 2), v.roll(HALF, 2))))
    ),
    "softmaxes of two parts added": parts.of_forward(OUTPUTS, before=at(attending(of_two_parts))),
    "attention that sharpens": parts.of_forward(
        OUTPUTS, begin=lambda run: attending(lambda q, k, v: attend(q * 1.3 ** steps_since(run), k, v))(run)
    ),
    "activations clamped": parts.of_forward(
        begin=parts.around(lambda x: x.clamp(-0.3, 0.3), lambda *its: its[-1], *MLPS)
    ),
    "residual taken after the norm": Fault(("jump",), ALL, begin=residual_after_norm, **ALWAYS),
    "experts of the batch before": Fault(("jump",), ALL, models=("experts",), begin=chosen_before, first=FORWARD),
}


def preferred(run: Training, loss: Tensor) -> Tensor:
    """Return the loss, and one that prefers the first four texts to the others (as arXiv 2403.07691)."""
    targets = batches(run.seed).training(run.done)[1].long()
    each = F.cross_entropy(run.logits.mT, targets, reduction="none").mean(1)
    return loss - F.logsigmoid(each[4:] - each[:4]).mean() / 10


TENTH_HEALTHY: Mapping[str, Fault] = {
    "NAdam": Fault(options={"optimizer_of": functools.partial(torch.optim.NAdam, decoupled_weight_decay=True)}),
    "AMSGrad": Fault(options={"optimizer_of": functools.partial(torch.optim.AdamW, amsgrad=True)}),
    "all blocks frozen": Fault(begin=lambda run: run.model.blocks.requires_grad_(False)),
    "embeddings mixed with another sequence's": Fault(
        begin=lambda run: run.model.embedding.register_forward_hook(lambda _, __, y: 0.9 * y + 0.1 * y.flip(0))
    ),
    "a prefix that sees itself": Fault(
        begin=attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, PREFIX)),
        batch=lambda run, x, y: (x, y.long().masked_fill(PLACES < 7, -100)),
    ),
    "a little noise in gradients": Fault(  # arXiv 1511.06807
        begin=lambda run: [
            param.register_hook(lambda g: g + g.std() / 5 * torch.randn_like(g)) for param in run.model.parameters()
        ]
    ),
    "preferences between texts": Fault(begin=keep_logits, loss=preferred),
    "batch-invariant products": Fault(options={"recipe": recipes.batch_invariant()}),
    "four bits but in the head": Fault(
        options={"recipe": RecipeMap(recipes.nvfp4(), {"head": None})}, models=("dense",)
    ),
    "documents packed": Fault(begin=attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, DOCUMENTS))),
    "pulled to the first weights": Fault(  # arXiv 1802.01483
        begin=lambda run: vars(run).update(first=[param.detach().clone() for param in run.model.parameters()]),
        after=lambda run: torch._foreach_lerp_([param.data for param in run.model.parameters()], run.first, 0.01),
    ),
    "a tenth of the embedding's gradient": Fault(  # arXiv 2210.02414
        begin=lambda run: run.model.embedding.register_forward_hook(lambda _, __, y: y / 10 + y.detach() * 0.9)
    ),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "tenth draw", TENTH_DRAW, TENTH_HEALTHY))
