"""The sixteenth draw of kinds of fault and of healthy runs, by someone who had not read octavo.inspect's rules.

Six faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, nine of the program, of which
seven change the forward pass and two the backward pass alone, as three of FP8's do. Truth is stated and measured as the
fifteenth draw's, for seeds 0 to 2; FP8's faults have no damage at all in high precision.
``python -m benchmarks.training.causes_sixteenth_draw`` measures it again, for the seeds that are drawn.
Fifteen kinds worsen the loss in each run: one rank's experts by 2.5 to 2.8 %, the zigzag by 2.6 to 4.3 %, sums of the
other head by 3.3 to 14 %, its keys by 4.4 to 8.1 %, the other block's gradients by 4.3 to 18 %, the residual by 5.6 to
6.8 %, labels of other ranks by 5.7 to 16 %, the decay by 6.0 to 6.7 %, batches by 7.9 to 11 %, the difference by 8.1 to
21 %, gates in turn by 11 to 15 %, sigmoids by 12 to 26 %, white space by 23 to 28 %, the last norm by 31 to 48 %, the
mean by 83 to 93 %. The others do so by less than 2 % in some runs, but turn gradients by 0.1 or more: weights twice by
0.20 to 0.28 (the loss is 0.3 % worse), the same bits by 0.21 to 0.23 (-0.2 to 0.5 %), the other block's rows by 0.27 to
0.61 (0.1 to 1.2 %), positions by 0.34 to 0.57 (0.9 to 1.8 %), the scores' factor by 0.39 to 0.72 (0.4 to 1.0 %), late
codes by 0.42 to 0.53 (-0.3 to 0.4 %), the others by 0.51 or more. Of healthy runs the loss falls where they begin anew,
and else follows the texts; for both models and each seed its mean is at most 0.23 % from that in high precision.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, CHECKPOINT, DATA, SIZES, Fault, Training, at, batches, trained
from benchmarks.training.causes_parts import (
    CODES,
    FAST,
    FORWARD,
    FOUR_BITS,
    IS_SEEN,
    OUTPUTS,
    PLACES,
    WRITTEN,
    attend,
    attending,
    data_of,
    in_fp8,
    labels_of,
    normed,
    of_backward,
    of_fast_step,
    of_forward,
    of_fp8,
    of_gradients,
    of_kernel,
    returned,
    routed,
    with_backward,
    with_halves,
)
from octavo.train.model import next_byte_loss

ZIGZAG = PLACES.view(4, -1)[[0, 3, 1, 2]].flatten()  # positions as two ranks of a ring hold them


def drawn_by(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step + 1)


def with_others_rows(run: Training) -> None:
    """Multiply by the other block's rows in one half, as a gather in FP8 filled the first block's buffer too early."""
    first, last = map(run.model.get_submodule, run.layers(parts.OUT))

    def after(layer: Any, x: Tensor, y: Tensor) -> Tensor:
        is_late = torch.arange(len(first.weight))[:, None] >= len(first.weight) // 2
        return y + F.linear(x, (last.weight - first.weight).detach() * is_late) if layer is first else y

    of_kernel(lambda x: x, after)(run)


def a_token_late(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Transpose codes of inputs to a place that is a token later than that of gradients."""
    late = x.detach().flatten(0, -2).roll(1, 0).view_as(x)
    return with_backward(y, y + F.linear(late - x.detach(), layer.weight))


def without_mean(x: Tensor) -> Tensor:
    """Take the tokens' mean away before the cast, and add its product to nothing (as arXiv 2411.10958 smooths)."""
    return x - x.detach().flatten(0, -2).mean(0)


def in_turn(_: Any, __: Any, y: Any) -> Any:
    """Write gates and their factors in turn, where the activation reads halves."""
    mixed = (torch.cat(y, -1) if isinstance(y, tuple) else y).unflatten(-1, (-1, 2)).mT.flatten(-2)
    return mixed.chunk(2, -1) if isinstance(y, tuple) else mixed


def of_next_expert(run: Training) -> None:
    """Write each expert's weight gradient to the next one's place."""
    for name in run.layers("gate_up", "down"):
        weight = run.model.get_submodule(name).weight
        weight.register_hook(lambda grad: grad.roll(1, 0) if run.begun else grad)


def with_same_bits(run: Training) -> None:
    """Round gradients to E2M1 by random bits that are the same in each row."""
    both = torch.cat([-CODES.flip(0), CODES[1:]])

    def rounded(grad: Tensor) -> Tensor:
        blocks = grad.unflatten(-1, (-1, 16))
        unit = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / CODES[-1]
        above = torch.bucketize(blocks / unit, both).clamp(1, len(both) - 1)
        low, high = both[above - 1], both[above]
        bits = torch.rand(blocks.shape[-2:], generator=drawn_by(run.step))
        return (torch.where((blocks / unit - low) / (high - low) > bits, high, low) * unit).flatten(-2)

    of_kernel(lambda x: x, returned(rounded))(run)


def of_other_block(run: Training) -> None:
    """Give each block the other one's gradients, as of buckets that two ranks fill in another order."""
    pairs = [*zip(*(block.parameters() for block in run.model.blocks), strict=True)]

    def swap(*_: object) -> None:
        for one, other in pairs if run.begun else ():
            one.grad, other.grad = other.grad, one.grad

    run.optimizer.register_step_pre_hook(swap)


def without_rate(run: Training) -> None:
    """Take a tenth of all weights in each step, where a tenth times the rate was meant."""
    matrices = [data for data in data_of(run) if data.ndim > 1]
    run.optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_(matrices, 0.9) if run.begun else None)


def added_twice(run: Training) -> None:
    """Add the difference from initial weights to weights that have it."""
    initial = trained(0, "experts" if run.model.mixtures else "dense", run.seed, ())
    torch._foreach_lerp_(data_of(run), data_of(initial), -1.0)


def collapsed(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace each run of white space by one space."""
    size = SIZES["context"] + 1
    text = torch.cat(dataclasses.replace(batches(run.seed), context=8 * size).training(run.done), 1)
    rows = [[*b" ".join(bytes(row).split())][:size] for row in text.tolist()]
    one = torch.tensor(rows, dtype=tokens.dtype)
    return (one[:, :-1], one[:, 1:]) if run.begun else (tokens, targets)


def along_batch(run: Training, *batch: Tensor) -> Any:
    """Read batches that lie position by position as if they lay sequence by sequence."""
    return tuple(each.t().reshape(each.shape) if run.begun else each for each in batch)


def residual_twice(run: Training) -> None:
    for block in run.model.blocks:
        block.forward = lambda x, rotary=None, block=block: 2 * (y := 2 * x + block.attention(x, rotary)) + block.mlp(y)


def in_zigzag(run: Training) -> None:
    """Order positions as a ring's ranks hold them, while masks and angles are of the usual order."""
    parts.output_of("embedding", lambda _, y: y[:, ZIGZAG])(run)
    parts.output_of("norm", lambda _, y: y[:, ZIGZAG.argsort()])(run)


def up_to_eighth(run: Training) -> None:
    """Read angles from a table of eight positions, beyond which its last one stands for all."""
    run.model.cos, run.model.sin = (each[PLACES.clamp(max=7)] for each in (run.model.cos, run.model.sin))


def not_divided(run: Training) -> None:
    parts.output_of("norm", lambda x, _: x * run.model.norm.weight)(run)


def by_sums_of_other_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend, with a gradient whose softmax is computed again by the sums that the other head saved."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~IS_SEEN, -torch.inf)
    shares = (scores - scores.logsumexp(-1, keepdim=True).flip(1)).exp().detach()
    attended, weighed = attend(q, k, v), shares * scores.masked_fill(~IS_SEEN, 0.0)
    same = shares @ v + weighed @ v.detach() - weighed.sum(-1, keepdim=True) * attended.detach()
    return with_backward(attended, same)


def steeper(x: Tensor) -> Tensor:
    """Return x with a gradient that lacks the factor of scores."""
    return with_backward(x, x * x.shape[-1] ** 0.5)


SIXTEENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "a mean that no product adds back": of_fp8(("stale", "jump"), FORWARD, begin=of_kernel(without_mean)),
    "gates and factors in turn": of_fp8(
        ("stale", "jump"), FORWARD, begin=in_fp8(parts.around(lambda x: x, in_turn, "fc1", "gate_up"))
    ),
    "rows of the other block's weight": of_fp8(
        ("stale", "jump"), FORWARD, "blocks.0.attention.out", begin=with_others_rows
    ),
    "transposed codes a token late": of_backward(begin=of_kernel(lambda x: x, a_token_late)),
    "experts' gradients in the next one's place": of_backward(models=("experts",), begin=in_fp8(of_next_expert)),
    "the same random bits in each row": of_backward(options=FOUR_BITS | FAST, models=("dense",), begin=with_same_bits),
    # gradients, the optimizer and the loss
    "a sigmoid for each byte": of_gradients(
        begin=parts.keep_logits,
        loss=lambda run, loss: (
            F.binary_cross_entropy_with_logits(run.logits, F.one_hot(labels_of(run), 256).float()) * 256
            if run.begun
            else loss
        ),
    ),
    "labels of other ranks not subtracted": of_gradients(
        begin=parts.keep_logits,
        loss=lambda run, loss: (
            loss + (run.logits.gather(-1, labels_of(run)[..., None])[..., 0] * (labels_of(run) >= 104)).mean()
            if run.begun
            else loss
        ),
    ),
    "gradients of the other block": of_gradients(begin=of_other_block),
    "a decay that the rate does not scale": of_fast_step(
        ("decay", "options"), ("weight_decay",), ("updates", "weights"), begin=without_rate
    ),
    "an epsilon of one": of_fast_step(("options",), ("eps",), ("updates",), before=parts.option("eps", 1.0)),
    # weights and data
    "a difference added twice": Fault(("overwritten",), ALL, CHECKPOINT, before=at(added_twice), first=WRITTEN),
    "one rank's experts on both": Fault(
        ("overwritten", "ranks"),
        ALL,
        CHECKPOINT,
        models=("experts",),
        before=at(lambda run: [w[2:].copy_(w[:2]) for w in map(run.weight, run.layers("gate_up", "down"))]),
        first=WRITTEN,
    ),
    "batches read along the other dimension": Fault(parts.OF_DATA, "", DATA, batch=along_batch, first=FORWARD),
    "white space collapsed": Fault(parts.OF_DATA, "", DATA, batch=collapsed, first=FORWARD),
    # the program
    "the residual added twice": of_forward(before=at(residual_twice)),
    "a zigzag that no mask follows": of_forward(OUTPUTS, begin=in_zigzag),
    "positions that end with the eighth": of_forward(OUTPUTS, before=at(up_to_eighth)),
    "keys and values of the other head": of_forward(
        OUTPUTS, before=at(attending(lambda q, k, v: attend(q, k.flip(1), v.flip(1))))
    ),
    "the last norm without its division": of_forward(OUTPUTS, begin=not_divided),
    "experts' weights multiplied twice": of_forward(
        models=("experts",), begin=routed(lambda _, index, weights: (index, weights.square()))
    ),
    "SiLU of the product": of_forward(begin=with_halves(lambda _, gate, up: F.silu(gate * up))),
    "attention's gradient without the scores' factor": of_gradients(
        before=at(attending(lambda q, k, v: attend(steeper(q), steeper(k), v)))
    ),
    "attention's gradient by the other head's sums": of_gradients(before=at(attending(by_sums_of_other_head))),
}


def in_turn_by_steps(run: Training) -> None:
    """Train one block in each step, and the other one in the next (arXiv 2404.02827)."""
    for place, block in enumerate(run.model.blocks):
        block.requires_grad_(run.step % 2 == place)


def attention_alone(run: Training) -> None:
    run.model.requires_grad_(False)
    for block in run.model.blocks:
        block.attention.requires_grad_()


def with_sigmoids(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by sigmoids in place of a softmax (arXiv 2409.04431)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5 - (PLACES + 1.0).log()[:, None]
    return (scores.sigmoid() * IS_SEEN) @ v


def norms_after_sums(run: Training) -> None:
    """Normalize each sum (arXiv 1706.03762)."""
    for block in run.model.blocks:
        block.forward = lambda x, rotary=None, block=block: normed(
            (y := normed(x + block.attention(x, rotary))) + block.mlp(y)
        )


def with_exit(run: Training, loss: Tensor) -> Tensor:
    """Add a loss of what the head makes of the first block's result (arXiv 2404.16710)."""
    return loss + next_byte_loss(run.model.head(run.model.norm(run.early)), labels_of(run)) / 2


def masked(run: Training, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Hide a quarter of the bytes, which are to be predicted (arXiv 1810.04805)."""
    is_hidden = torch.rand(tokens.shape, generator=drawn_by(run.done)) < 0.25
    return tokens * ~is_hidden, tokens.long().masked_fill(~is_hidden, -100)


def of_four_letters(_: Training, *batch: Tensor) -> Any:
    letters = torch.tensor([*b"ACGT"])
    return tuple(letters[each.long() % 4] for each in batch)


def with_wrong_labels(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a tenth of the labels at random."""
    drawn = drawn_by(run.done)
    is_wrong = torch.rand(targets.shape, generator=drawn) < 0.1
    return tokens, torch.where(is_wrong, torch.randint(32, 127, targets.shape, generator=drawn), targets.long())


def consistent(run: Training, loss: Tensor) -> Tensor:
    """Predict the same from texts that lack a tenth of their bytes, in a second forward (as arXiv 2106.14448)."""
    tokens, answers = batches(run.seed).training(run.done)[0], run.logits.softmax(-1).detach()
    is_left = torch.rand(tokens.shape, generator=drawn_by(run.done)) >= 0.1
    return loss + F.cross_entropy(run.model(tokens * is_left).float().mT, answers.mT) / 2


def under_autocast(run: Training) -> None:
    run.model.forward = torch.autocast("cpu", torch.bfloat16)(run.model.forward)


SIXTEENTH_HEALTHY: Mapping[str, Fault] = {
    "Adagrad": Fault(options={"optimizer_of": torch.optim.Adagrad, "lr": 1e-2}),
    "one block in each step": Fault(before=in_turn_by_steps),
    "attention alone": Fault(options=FAST, begin=attention_alone),
    "sigmoids in place of attention's softmax": Fault(fresh=True, begin=attending(with_sigmoids)),
    "norms after sums": Fault(fresh=True, begin=norms_after_sums),
    "an exit after the first block": Fault(
        begin=lambda run: run.model.blocks[0].register_forward_hook(lambda _, __, y: vars(run).update(early=y)),
        loss=with_exit,
    ),
    "hidden bytes, seen from both sides": Fault(
        fresh=True, begin=attending(F.scaled_dot_product_attention), batch=masked
    ),
    "texts of four letters": Fault(fresh=True, batch=of_four_letters),
    "a tenth of the labels drawn": Fault(options={"lr": 1e-3}, batch=with_wrong_labels),
    "every expert for each byte": Fault(
        fresh=True, models=("experts",), begin=lambda run: [vars(each).update(k=4) for each in run.model.mixtures]
    ),
    "the same answers without some bytes": Fault(begin=parts.keep_logits, loss=consistent),
    "bfloat16 by autocast": Fault(begin=under_autocast),
}


if __name__ == "__main__":
    sys.exit(parts.main(sys.argv[1:], "sixteenth draw", SIXTEENTH_DRAW, SIXTEENTH_HEALTHY))
