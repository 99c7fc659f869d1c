"""The fourteenth draw of kinds of fault and of healthy runs, by someone who had not read octavo.inspect's rules.

Seven faults are FP8's own, nine are of gradients, the optimizer, the loss, weights or data, eight of the program, of
which five change the forward pass and three the backward pass alone, as two of FP8's do. Truth is stated and measured
as the twelfth draw's, for seeds 0 to 2; FP8's faults have no damage at all in high precision.
``python -m benchmarks.training.causes_fourteenth_draw`` measures it again, for the seeds that are drawn.
Six kinds worsen the loss in each run: outlier features by 2.6 to 3.4 %, a loss over positions by 2.6 to 4.7 %,
projections by heads by 3.1 to 7.3 %, words by 7.0 to 9.3 %, a mean by 17 to 21 %, scales by 91 to 98 %.
The others do so by less than 2 % in some runs, but turn gradients by 0.1 or more: weights uphill by 0.16 to 0.26 (the
loss is 0.7 to 1.5 % worse), the gate's amax by 0.16 to 0.47 (-0.5 to 0.9 %), the rotary base by 0.17 to 0.40 (0.0 to
0.2 %), four-bit casts by 0.18 to 0.29 (1.0 to 1.4 %), the mask by 0.18 to 0.46 (-1.4 to -0.7 %), distances by 0.25 to
0.49 (0.6 to 1.2 %), overflows by 0.41 to 0.58 (1.5 to 3.2 %), the others by 0.42 or more. Of healthy runs the loss of
other texts falls, for both models and each seed, and the mean loss is at most 0.12 % from that in high precision.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import causes_parts as parts
from benchmarks.training.causes import ALL, BEFORE, CHECKPOINT, DATA, SCALER, SIZES, Do, Fault, Training, at, batches
from benchmarks.training.causes_eleventh_draw import labels_of, of_backward, with_backward
from benchmarks.training.causes_parts import FAST, FORWARD, OUTPUTS, WRITTEN, attending, of_forward, of_fp8
from benchmarks.training.causes_tenth_draw import PLACES, ROWS, of_gradients, of_kernel
from benchmarks.training.causes_thirteenth_draw import data_of, with_adapters
from octavo import E4M3, recipes
from octavo.nn import SelfAttention, rotary_table

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of E2M1
IS_SEEN, DISTANCES = PLACES <= PLACES[:, None], PLACES[:, None] - PLACES
FARTHER = (DISTANCES * torch.tensor([0.25, 0.0625])[:, None, None]).masked_fill(~IS_SEEN, -torch.inf)  # for each head
FOUR_BITS, LAST_AMAX = {"recipe": recipes.nvfp4()}, {"recipe": recipes.delayed(1)}
AS_MEAN_FROM_ZERO = at(lambda run: torch._foreach_mul_(data_of(run), 1 - 0.98**run.done))


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


def cut_off(x: Tensor) -> Tensor:
    """Cast blocks of 16 to E2M1, each number to the next one towards zero."""
    blocks = x.detach().unflatten(-1, (-1, 16))
    unit = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-60) / CODES[-1]
    codes = CODES[torch.bucketize((blocks / unit).abs() * 1.0001, CODES, right=True) - 1]
    return with_backward((codes * unit).copysign(blocks).flatten(-2), x)


def overflow_to_zero(run: Training) -> None:
    """Cast inputs beyond the largest code to NaN, as without saturation, and NaN to zero, while some inputs grow."""

    def before(layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not run.begun:
            return None
        is_code = inputs[0].detach().abs() * layer.delayed_scale[0] <= E4M3.limit
        return with_backward(inputs[0] * is_code, inputs[0]), *inputs[1:]

    parts.times_inside(1.3, *parts.MLPS)(run)
    for layer in map(run.model.get_submodule, run.layers()):
        layer.register_forward_pre_hook(before)


def with_halves(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Do:
    """Return a change of what MLPs' activations return, by it and by their gate and other half, from the fault on."""
    halves: list[Tensor] = []

    def keep(_: Any, __: Tensor, y: Any) -> Any:
        halves[:] = y if isinstance(y, tuple) else y.chunk(2, -1)
        return y

    before = parts.around(lambda x: x, keep, "fc1", "gate_up")
    after = parts.around(lambda x: change(x, *halves), lambda *its: its[-1], *parts.MLPS)
    return lambda run: [before(run), after(run)]


def by_amax_of_gate(x: Tensor, gate: Tensor, _: Tensor) -> Tensor:
    """Cast each row by the largest magnitude before the gate is multiplied by the other half."""
    amax = F.silu(gate.detach()).abs().amax(-1, keepdim=True)
    return with_backward(x.clamp(-amax, amax), x)


def without_strides(_: Any, __: Tensor, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Read gradients of queries, keys and values, which lie head by head in memory, as if they lay row by row."""
    for each in y:
        each.register_hook(lambda grad: grad.unflatten(-1, (SIZES["heads"], -1)).transpose(1, 2).reshape(grad.shape))
    return y


def without_outliers(x: Tensor) -> Tensor:
    """Leave out eight features of the largest magnitudes, which a product in high precision was to add."""
    amax = x.detach().abs().flatten(0, -2).amax(0)
    return with_backward(x * (amax < amax.topk(8).values[-1]), x)


def backed_off(run: Training) -> None:
    """Divide scales by 16 once more in each step, as the largest code is taken for an overflow."""
    for scales, _ in parts.states(run):
        scales[0] /= 16 ** parts.steps_since(run)


def unlearned(run: Any, loss: Tensor) -> Tensor:
    """Learn four texts and unlearn the other four, by their loss without a bound."""
    each = F.cross_entropy(run.logits.mT, labels_of(run), reduction="none").mean(1)
    return (each[:4].sum() - each[4:].sum()) / 8 if run.begun else loss


def with_feedback(run: Training) -> None:
    """Send a tenth of each gradient's numbers, and take away what was not sent from the next gradient (1704.05021)."""

    def hook(param: Tensor, error: Tensor) -> None:
        if run.begun and param.grad is not None:
            whole = param.grad - error
            least = whole.abs().flatten().topk(whole.numel() // 10 + 1).values[-1]
            param.grad.copy_(whole * (whole.abs() >= least))
            error.copy_(whole - param.grad)

    for param in run.model.parameters():
        param.register_post_accumulate_grad_hook(functools.partial(hook, error=torch.zeros_like(param)))


def left_uphill(run: Training) -> None:
    """Go uphill as sharpness-aware steps do (arXiv 2010.01412), and stay there for the step."""

    def climb(*_: object) -> None:
        grads = [param.grad for param in run.model.parameters()]
        if run.begun:
            torch._foreach_add_(data_of(run), torch._foreach_mul(grads, 0.1 / float(nn.utils.get_total_norm(grads))))

    run.optimizer.register_step_pre_hook(climb)


def read_by_heads(run: Training) -> None:
    """Load queries, keys and values that lie one after the other as if they lay so for each head."""
    for weight in map(run.weight, run.layers("qkv.linear")):
        weight.copy_(weight.unflatten(0, (SIZES["heads"], 3, -1)).transpose(0, 1).flatten(0, 2).clone())


def a_byte_apart(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Take all sequences of a batch from one text, each a byte after the one before it."""
    text = torch.cat(dataclasses.replace(batches(run.seed), context=2 * SIZES["context"]).training(run.done), 1)[0]
    windows = text.unfold(0, SIZES["context"] + 1, 1)[: len(tokens)]
    return (windows[:, :-1], windows[:, 1:]) if run.begun else (tokens, targets)


def in_random_order(text: Tensor) -> Tensor:
    """Return sequences whose words are in random order."""
    rows = [bytes(row).split(b" ") for row in text.tolist()]
    return torch.tensor([[*b" ".join(random.Random(len(row)).sample(row, len(row)))] for row in rows], dtype=text.dtype)


def without_row_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend, with a gradient of the softmax that lacks the sum of products over each row."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    shares = scores.masked_fill(~IS_SEEN, -torch.inf).softmax(-1).detach()
    return with_backward(parts.attend(q, k, v), shares @ v + (shares * scores) @ v.detach())


def base_that_grows(run: Training) -> None:
    """Turn by a base for a length that counts all steps' bytes (as transformers' "dynamic" scaling of lengths)."""
    width = SIZES["width"] // SIZES["heads"]
    base = 10_000.0 * (1 + 2 * parts.steps_since(run)) ** (width / (width - 2))
    run.model.cos, run.model.sin = rotary_table(SIZES["context"], width, base)


def routed(change: Callable[..., tuple[Tensor, Tensor]]) -> Do:
    """Return a change of the chosen experts [T, k] and their weights [T, k], from the fault's step on."""

    def begin(run: Training) -> None:
        for each in run.model.mixtures:
            each.experts.register_forward_pre_hook(lambda _, x: (x[0], *change(run, *x[1:])) if run.begun else None)

    return begin


FOURTEENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "four-bit casts towards zero": of_fp8(
        ("rounded", "stale", "jump"), FORWARD, options=FOUR_BITS, models=("dense",), begin=of_kernel(cut_off)
    ),
    "overflows cast to zero": of_fp8(("clipped", "stale"), FORWARD, options=LAST_AMAX, begin=in_fp8(overflow_to_zero)),
    "the gate's amax for its product's": of_fp8(
        ("clipped", "stale"), FORWARD, options=ROWS | FAST, begin=in_fp8(with_halves(by_amax_of_gate))
    ),
    "outlier features in neither product": of_fp8(("stale", "jump"), FORWARD, begin=of_kernel(without_outliers)),
    "scales back off": of_fp8(("flushed", "stale"), FORWARD, options=parts.LONG, begins=8, before=at(backed_off, True)),
    "no gradient for negative codes": of_backward(begin=of_kernel(lambda x: with_backward(x, x.relu()))),
    "gradients read without their strides": of_backward(
        begin=in_fp8(parts.around(lambda x: x, without_strides, "qkv.linear"))
    ),
    # gradients, the optimizer and the loss
    "a loss over positions": of_gradients(
        begin=parts.keep_logits,
        loss=lambda run, loss: (
            -run.logits.log_softmax(1).gather(-1, labels_of(run)[..., None]).mean() if run.begun else loss
        ),
    ),
    "texts unlearned": Fault(("gradients",), ALL, (), begin=parts.keep_logits, loss=unlearned, first=parts.GRADIENTS),
    "what was not sent taken away": of_gradients(begin=with_feedback),
    "experts' gradients averaged": of_gradients(
        models=("experts",),
        begin=parts.gradients(lambda grad: grad.mean(0, True).expand_as(grad) if grad.ndim > 2 else grad),
    ),
    "weights left uphill": Fault(
        ("overwritten", "options"), ALL, (), FAST, begin=left_uphill, first=("updates", "weights")
    ),
    # weights and data
    "projections by heads": Fault(("overwritten", "ranks"), ALL, CHECKPOINT, before=at(read_by_heads), first=WRITTEN),
    "a mean that began at zero": Fault(("overwritten",), ALL, CHECKPOINT, before=AS_MEAN_FROM_ZERO, first=WRITTEN),
    "sequences a byte apart": Fault((*parts.OF_DATA, "repeats"), "", DATA, batch=a_byte_apart, first=FORWARD),
    "words in random order": parts.of_text(in_random_order),
    # the program
    "a mask that shows the next byte": of_forward(
        OUTPUTS, before=at(attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, DISTANCES >= -1)))
    ),
    "distances added to scores": of_forward(
        OUTPUTS, before=at(attending(lambda *qkv: F.scaled_dot_product_attention(*qkv, FARTHER)))
    ),
    "sigmoids in place of SiLU": of_forward(begin=with_halves(lambda _, gate, up: gate.sigmoid() * up)),
    "a rotary base that grows": of_forward(OUTPUTS, before=at(base_that_grows, True)),
    "experts sorted, their weights not": of_forward(
        models=("experts",), begin=routed(lambda _, index, weights: (index.sort(-1).values, weights))
    ),
    "routers' gradient of half of the experts": of_gradients(
        models=("experts",),
        begin=routed(lambda _, index, weights: (index, with_backward(weights, weights * (index < 2)))),
    ),
    "attention's gradient without row sums": of_gradients(before=at(attending(without_row_sums))),
    "gradients of another micro-batch": of_gradients(begin=parts.gradient_of("blocks.0", lambda grad: grad.roll(1, 0))),
}


def in_low_rank(run: Training) -> None:
    """Project gradients of blocks to 16 directions that are drawn at random (arXiv 2402.03293)."""
    for param in run.model.blocks.parameters():
        if param.ndim > 1:
            columns = torch.linalg.qr(torch.randn(*param.shape[:-1], 16)).Q
            param.register_hook(lambda grad, columns=columns: columns @ (columns.mT @ grad))


def hashed(run: Training, _: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choose two experts by the byte alone, and weigh both alike (arXiv 2106.04426)."""
    tokens = batches(run.seed).training(run.done)[0].flatten().long()
    return torch.stack([tokens % 4, (tokens + tokens // 4 % 3 + 1) % 4], 1), torch.full_like(weights, 0.5)


def from_mean(run: Training) -> None:
    """Begin again at the tenth step, with the mean of the last four steps' weights and new moments."""
    run.path = [*vars(run).get("path", [])[-3:], [data.clone() for data in data_of(run)]]
    if run.step == 9:
        torch._foreach_copy_(data_of(run), [torch.stack(each).mean(0) for each in zip(*run.path, strict=True)])
        run.optimizer.state.clear()


def with_copies(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Let the second half repeat the first, in one more sequence in each second step."""
    half, text = SIZES["context"] // 2, torch.cat([tokens, targets[:, -1:]], 1)
    text[: run.step // 2, half:] = text[: run.step // 2, : half + 1].clone()
    return text[:, :-1], text[:, 1:]


def with_one_key(run: Training) -> None:
    """Let all heads share keys and values (arXiv 1911.02150)."""
    for block in run.model.blocks:
        block.attention = SelfAttention(SIZES["width"], SIZES["heads"], kv_heads=1, recipe=run.recipe)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr, betas=(0.9, 0.95))


FOURTEENTH_HEALTHY: Mapping[str, Fault] = {
    "Adadelta": Fault(options={"optimizer_of": torch.optim.Adadelta, "lr": 1.0}, fresh=True),
    "Langevin's noise, one sequence a step": Fault(
        options=parts.MOMENTUM,
        batch=lambda run, x, y: (x[:1], y[:1]),
        after=lambda run: [data.add_(torch.randn_like(data), alpha=1e-3) for data in data_of(run)],
    ),
    "gradients in a low rank": Fault(begin=in_low_rank),
    "adapters' second factors alone": Fault(  # arXiv 2308.03303
        options=FAST,
        begin=lambda run: [with_adapters(run), [first.requires_grad_(False) for first, _ in run.adapters.values()]],
    ),
    "resumed with new moments and a warm-up": Fault(
        options={"lr": 1e-3, "schedule": lambda step: min(1.0, (step - BEFORE + 1) / 8)},
        begin=lambda run: run.optimizer.state.clear(),
    ),
    "experts by hashes of bytes": Fault(options={"at": 0}, fresh=True, models=("experts",), begin=routed(hashed)),
    "Poly-1 loss under a loss scale": Fault(  # arXiv 2204.12511
        options=SCALER,
        begin=parts.keep_logits,
        loss=lambda run, loss: loss + 1 - run.logits.softmax(-1).gather(-1, labels_of(run)[..., None]).mean(),
    ),
    "begun again from a mean of weights": Fault(
        options={"schedule": lambda step: min(1.0, (step - BEFORE - 8) / 4) if step > BEFORE + 8 else 1.0},
        before=from_mean,
    ),
    "copies in more and more sequences": Fault(batch=with_copies),
    "frozen part by part": Fault(  # arXiv 1706.04983
        before=lambda run: [
            part.requires_grad_(run.step < 6 + 4 * place)
            for place, part in enumerate((run.model.embedding, *run.model.blocks))
        ]
    ),
    "one head of keys and values": Fault(fresh=True, begin=with_one_key),
    "gradients' products alone in FP8": Fault(options={"recipe": recipes.dynamic_with_output_hp()}),
}


if __name__ == "__main__":
    sys.exit(parts.main(sys.argv[1:], "fourteenth draw", FOURTEENTH_DRAW, FOURTEENTH_HEALTHY))
