"""The fifteenth draw of kinds of fault and of healthy runs, by someone who had not read octavo.inspect's rules.

Six faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, nine of the program, of which
seven change the forward pass and two the backward pass alone, as two of FP8's do. Truth is stated and measured as the
fourteenth draw's, for seeds 0 to 2; FP8's faults have no damage at all in high precision.
``python -m benchmarks.training.causes_fifteenth_draw`` measures it again, for the seeds that are drawn.
Ten kinds worsen the loss in each run: late gradients by 2.7 to 4.7 %, norms over positions by 3.5 to 5.3 %, experts by
3.7 to 5.5 %, their capacity by 4.2 to 6.5 %, the softmax by 5.4 to 11 %, joined heads by 5.5 to 7.8 %, roles by 20 to
26 %, padding by 31 to 80 %, Base64 by 89 to 108 %, norms' weights by 117 to 128 %. The others do so by less than 2 % in
some runs, but turn gradients by 0.1 or more: one rank's scale by 0.10 to 0.51 (the loss is 0.1 to 0.7 % worse), block
scales by 0.11 to 0.27 (0.2 to 0.8 %), the floor by 0.13 to 0.36 (0.0 to 0.4 %), second moments by 0.17 to 0.47 (1.7 to
3.0 %), saturated sums by 0.19 to 0.41 (-0.3 to 1.0 %), others' queries by 0.20 to 0.48 (-0.2 to 0.2 %), the rate by
0.25 to 0.47 (1.7 to 3.6 %), the others by 0.40 or more. Of healthy runs the loss falls where they begin anew, and else
follows the texts; for both models and each seed its mean is at most 0.21 % from that in high precision.
"""

from __future__ import annotations

import base64
import functools
import math
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, CHECKPOINT, DATA, DELAYED, SIZES, Fault, Training, at
from benchmarks.training.causes_parts import (
    FAST,
    FORWARD,
    IS_SEEN,
    OUTPUTS,
    PLACES,
    ROWS,
    WRITTEN,
    attend,
    attending,
    in_fp8,
    labels_of,
    normed,
    of_backward,
    of_forward,
    of_fp8,
    of_gradients,
    of_kernel,
    returned,
    routed,
    with_backward,
    with_halves,
)
from octavo import E4M3, recipes
from octavo.nn.transformer import rotate
from octavo.train.model import next_byte_loss

FLOOR, RANKS_TOKENS = 1e-4, 2.0**18  # of the smallest amax that a cast takes; tokens of all ranks
SHOWN_LATER = IS_SEEN & ((PLACES >= 8) | (PLACES == PLACES[:, None]))
IS_NEAR = PLACES // 8 == PLACES[:, None] // 8  # of one rank of four


def beyond_end(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Add products of 32 features beyond each row's end, which are the next row's, as of a last tile without a mask."""
    rows = x.flatten(0, -2).roll(-1, 0).view_as(x)
    return with_backward(y + F.linear(rows[..., :32], layer.weight.roll(-1, 0)[:, :32]), y)


def by_floor(grad: Tensor) -> Tensor:
    """Cast rows by their amax or by FLOOR, whichever is more (as DeepGEMM's casts of activations do)."""
    unit = grad.abs().amax(-1, keepdim=True).clamp(min=FLOOR) / E4M3.limit
    return (grad / unit).to(torch.float8_e4m3fn).to(grad.dtype) * unit


def with_floor(run: Training) -> None:
    """Divide the loss by all ranks' tokens in each step, and multiply gradients after their sum over ranks."""
    of_kernel(lambda x: x, returned(by_floor))(run)

    def summed(param: Tensor) -> None:
        param.grad.mul_(RANKS_TOKENS)

    for param in run.model.parameters():
        param.register_post_accumulate_grad_hook(summed)


def below_power(x: Tensor) -> Tensor:
    """Saturate blocks of 32 by a scale that is cut off to a power of two, so that the largest numbers are clipped."""
    blocks = x.detach().unflatten(-1, (-1, 32))
    limit = E4M3.limit * 2 ** (blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / E4M3.limit).log2().floor()
    return with_backward(blocks.clamp(-limit, limit).flatten(-2), x)


def roles_swapped(run: Training) -> None:
    """Load scales and histories of inputs as those of gradients, and the other way round."""
    for scales, histories in parts.states(run):
        scales.copy_(scales.flip(0))
        histories.copy_(histories.flip(0))


def saturated_sums(run: Training) -> None:
    """Saturate weights' gradients at an eighth of the amax, as a sum of eight ranks' in FP8 by the scale of one."""

    def hook(grad: Tensor) -> Tensor:
        limit = grad.abs().max() / 8
        return grad.clamp(-limit, limit) if run.begun else grad

    for name in run.layers():
        run.model.get_submodule(name).weight.register_hook(hook)


def by_first_scale(x: Tensor) -> Tensor:
    """Read codes of eight ranks' sequences by the first rank's scale."""
    amax = x.detach().abs().flatten(1).amax(1).view(-1, *[1] * (x.ndim - 1))
    return with_backward(x * amax[:1] / amax.clamp(min=2.0**-60), x)


def of_step_before(run: Training) -> None:
    """Step by the gradients of the step before, as without a wait for their sum."""

    def late(*_: object) -> None:
        grads = [param.grad for param in run.model.parameters()]
        present = [grad.clone() for grad in grads]
        if run.begun:
            torch._foreach_copy_(grads, run.late)
        run.late = present

    run.optimizer.register_step_pre_hook(late)


def in_float16(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())


def less_one(run: Training) -> None:
    """Load norms' weights that were saved as differences from one."""
    for norm in run.model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.weight.data.sub_(1)


def padded(text: Tensor) -> Tensor:
    """Return texts of 8 to 22 bytes, and zeros after them, which the loss counts."""
    ends = 8 + 2 * torch.arange(len(text))[:, None]
    return text * (torch.arange(text.shape[1]) < ends)


def of_first_rank(run: Training, *batch: Tensor) -> Any:
    """Take the first two sequences on each of four ranks."""
    return tuple(each[:2].repeat(4, 1) if run.begun else each for each in batch)


def in_base64(text: Tensor) -> Tensor:
    rows = [[*base64.b64encode(bytes(row))][: text.shape[1]] for row in text.tolist()]
    return torch.tensor(rows, dtype=text.dtype)


def in_other_pairs(run: Training) -> None:
    """Turn each pair of neighbours in place of pairs that are half a head's width apart."""
    cos, sin = run.model.cos, run.model.sin

    def turn(x: Tensor) -> Tensor:
        return rotate(rotate(x, (cos, -sin)).unflatten(-1, (-1, 2)).mT.flatten(-2), (cos, sin))

    attending(lambda q, k, v: attend(turn(q), turn(k), v))(run)


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend, and join heads in the order of memory."""
    attended = attend(q, k, v)
    return attended.reshape(len(q), q.shape[2], q.shape[1], -1).transpose(1, 2)


def over_positions(weight: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return x * x.square().mean(-2, keepdim=True).add(1e-5).rsqrt() * weight


def within_capacity(_: Training, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Drop what is beyond half of the mean load of an expert."""
    is_chosen = F.one_hot(index.flatten(), 4)
    places = (is_chosen.cumsum(0) * is_chosen).sum(-1).view_as(index)
    return index, weights * (places <= index.numel() // 8)


def to_loaded(run: Training) -> None:
    """Raise biases of experts with more bytes than the mean, and lower the others'."""
    for each in run.model.mixtures:
        load = each.load.float()
        each.bias += (load - load.mean()).sign() / 10
        each.load.zero_()


def without_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lose gradients of keys and values from queries of three other ranks, as of a ring that does not send them."""
    scores = torch.where(IS_NEAR, q @ k.mT, q @ k.detach().mT) * q.shape[-1] ** -0.5
    shares = scores.masked_fill(~IS_SEEN, -torch.inf).softmax(-1)
    return (shares * IS_NEAR) @ v + (shares * ~IS_NEAR) @ v.detach()


FIFTEENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "features beyond a row's end": of_fp8(("stale", "jump"), FORWARD, begin=of_kernel(lambda x: x, beyond_end)),
    "a floor under gradients' amaxes": of_backward(
        options=ROWS | FAST, begin=with_floor, loss=lambda run, loss: loss / RANKS_TOKENS
    ),
    "block scales cut off to powers": of_fp8(
        ("clipped", "stale"),
        FORWARD,
        options={"recipe": recipes.mx()} | FAST,
        begin=of_kernel(below_power, returned(below_power)),
    ),
    "roles swapped on load": of_fp8(
        ("clipped", "stale", "flushed"), FORWARD, options=DELAYED, before=at(roles_swapped)
    ),
    "sums of weights' gradients saturated": of_backward(begin=in_fp8(saturated_sums)),
    "tokens read by one rank's scale": of_fp8(
        ("stale", "jump"), FORWARD, options=FAST, begin=of_kernel(by_first_scale, returned(by_first_scale))
    ),
    # gradients, the optimizer and the loss
    "a softmax before the loss's": of_gradients(
        begin=parts.keep_logits,
        loss=lambda run, loss: next_byte_loss(run.logits.softmax(-1), labels_of(run)) if run.begun else loss,
    ),
    "gradients of the step before": of_gradients(begin=of_step_before),
    "second moments in float16": Fault(
        ("state",), ALL, ("load_state_dict",), {"lr": 1e-3}, before=at(in_float16, True), first=("updates",)
    ),
    "a rate that compounds": Fault(
        ("learning rate",),
        "",
        ("lr",),
        before=at(lambda run: vars(run).update(lr=run.lr * 1.3), True),
        first=("learning rate", "updates"),
    ),
    # weights and data
    "norms' weights less one": Fault(("overwritten",), ALL, CHECKPOINT, before=at(less_one), first=WRITTEN),
    "experts in the next one's place": Fault(
        ("overwritten", "ranks"),
        ALL,
        CHECKPOINT,
        models=("experts",),
        before=at(lambda run: [w.copy_(w.roll(1, 0)) for w in map(run.weight, run.layers("gate_up", "down"))]),
        first=WRITTEN,
    ),
    "padding in the loss": parts.of_text(padded),
    "one rank's texts on all": Fault((*parts.OF_DATA, "repeats"), "", DATA, batch=of_first_rank, first=FORWARD),
    "texts in Base64": parts.of_text(in_base64),
    # the program
    "rotary pairs of neighbours": of_forward(OUTPUTS, before=at(in_other_pairs)),
    "heads joined in memory's order": of_forward(OUTPUTS, before=at(attending(joined))),
    "first positions seen by none": of_forward(
        OUTPUTS, before=at(attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, SHOWN_LATER)))
    ),
    "norms over positions": of_forward(begin=parts.norms(over_positions)),
    "the gate and its factor swapped": of_forward(begin=with_halves(lambda _, gate, up: F.silu(up) * gate)),
    "bytes beyond experts' capacity": of_forward(models=("experts",), begin=routed(within_capacity)),
    "biases that follow experts' loads": of_forward(
        ("idle expert", "jump"), models=("experts",), before=at(to_loaded, True)
    ),
    "gradients of keys for values": of_gradients(
        before=at(attending(lambda q, k, v: attend(q, with_backward(k, v), with_backward(v, k))))
    ),
    "no gradient from other ranks' queries": of_gradients(before=at(attending(without_far))),
}


def recomputed(run: Training) -> None:
    """Compute blocks once more in backward, in place of what they would save (arXiv 1604.06174)."""
    for block in run.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def without_positions(run: Training) -> None:
    run.model.cos, run.model.sin = torch.ones_like(run.model.cos), torch.zeros_like(run.model.sin)


def normed_twice(run: Training) -> None:
    """Normalize what attention and MLPs compute before it is added, too (arXiv 2408.00118)."""
    for block in run.model.blocks:
        for part in (block.attention, block.mlp):
            part.register_forward_hook(lambda _, __, y: normed(y))


def with_noise(run: Training) -> None:
    """Add uniform noise to embeddings (arXiv 2310.05914), which each step's number draws."""

    def noisy(_: Any, __: Any, y: Tensor) -> Tensor:
        drawn = torch.rand(y.shape, generator=torch.Generator().manual_seed(run.done))
        return y + (2 * drawn - 1) * 5 / math.prod(y.shape[1:]) ** 0.5

    run.model.embedding.register_forward_hook(noisy)


def middle_last(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Move a part of half of the texts to their end (arXiv 2207.14255)."""
    text = torch.cat([tokens, targets[:, -1:]], 1)
    begin, end = sorted(random.Random(run.done).sample(range(1, SIZES["context"]), 2))
    text[:4] = torch.cat([text[:4, :begin], text[:4, end:], text[:4, begin:end]], 1)
    return text[:, :-1], text[:, 1:]


def masked(run: Training) -> None:
    """Draw half of the weights of each layer, which stay at zero (arXiv 1803.03635)."""
    drawn = torch.Generator().manual_seed(run.seed)
    run.masks = {name: torch.rand(run.weight(name).shape, generator=drawn) < 0.5 for name in run.layers()}
    held_at_zero(run)


def held_at_zero(run: Training) -> None:
    for name, mask in run.masks.items():
        run.weight(name).mul_(mask)


def by_integers(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Multiply by weights in integers of four bits, whose gradient goes to the weights (arXiv 1712.05877)."""
    weight = layer.weight.detach()
    unit = weight.abs().amax(-1, keepdim=True) / 7
    return y + F.linear(x, (weight / unit).round() * unit - weight)


FIFTEENTH_HEALTHY: Mapping[str, Fault] = {
    "Adafactor": Fault(options={"optimizer_of": torch.optim.Adafactor, "lr": 1e-2}),
    "norms alone": Fault(  # arXiv 2003.00152
        options=FAST, begin=lambda run: [param.requires_grad_(param.ndim < 2) for param in run.model.parameters()]
    ),
    "halves of the loss in turn": Fault(loss=lambda run, loss: [(loss / 2).backward(retain_graph=True), loss / 2][1]),
    "blocks computed again in backward": Fault(begin=recomputed),
    "no positions": Fault(fresh=True, begin=without_positions),  # arXiv 2305.19466
    "norms after branches, too": Fault(fresh=True, begin=normed_twice),
    "noise in embeddings": Fault(begin=with_noise),
    "middles of texts at their ends": Fault(options={"lr": 1e-3}, batch=middle_last),
    "half of the weights at zero": Fault(fresh=True, begin=masked, after=held_at_zero),
    "the hardest half of the texts": Fault(  # arXiv 1910.00762
        begin=parts.keep_logits,
        loss=lambda run, _: F.cross_entropy(run.logits.mT, labels_of(run), reduction="none").mean(1).topk(4)[0].mean(),
    ),
    "trained for integers of four bits": Fault(
        options={"at": 0}, fresh=True, begin=parts.around(lambda x: x, by_integers, *parts.PLAIN)
    ),
    "a margin of three octaves": Fault(options={"recipe": recipes.delayed(4, margin=3)}),
}


if __name__ == "__main__":
    sys.exit(parts.main(sys.argv[1:], "fifteenth draw", FIFTEENTH_DRAW, FIFTEENTH_HEALTHY))
