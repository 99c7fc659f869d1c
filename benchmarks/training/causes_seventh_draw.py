"""The seventh draw of kinds of fault and of healthy runs, written by someone who had not read octavo.inspect's rules.

Eight faults are FP8's own, eight are of the optimizer, the schedule or the data, eight of the program, of which seven
change the forward pass alone. Their truth is stated and measured as the fifth draw's, without octavo.inspect: no kind
lies between "FP8 is the cause" and "FP8 is not". ``python -m benchmarks.training.causes_seventh_draw`` measures it.
Faults appear in several ways: at once, growing in each step, in one layer, in one step whose damage lasts, or before
the first recorded step (ALWAYS), where nothing departs from what was.
"""

from __future__ import annotations

import base64
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import octavo
from benchmarks.training import causes_sixth_draw as sixth
from benchmarks.training.causes import ALL, BEFORE, CHECKPOINT, DATA, DELAYED, Do, Fault, Training, at, batches, having
from benchmarks.training.causes_fifth_draw import LONG, MLPS, gradient_of, keep_logits, main, of_fp8, states
from benchmarks.training.causes_fourth_draw import FORWARD, OF_DATA, output_of
from benchmarks.training.causes_sixth_draw import BY_TENSOR, FAST, OUT
from octavo import RecipeMap, recipes
from octavo.train.model import next_byte_loss
from octavo.train.trainer import build_model

WRITTEN, ALWAYS, UNUSED = ("weights", *FORWARD), {"begins": 0, "first": ()}, 128  # no byte of the text is as large
PLAIN = (OUT, "head")  # layers that return one tensor


def steps_since(run: Training) -> int:
    """Return 1 in the fault's step, 2 in the next, and 0 before."""
    return max(0, run.step - run.at + 1)


def folded(run: Training) -> None:
    """Store some weights 64 times as large from the fault's step on, and keep the scale that they had before."""
    layers = [run.model.get_submodule(name) for name in run.layers("qkv.linear", OUT)]
    delayed = [layer.delayed_scale for layer in layers if hasattr(layer, "delayed_scale")]
    scales_before = vars(run).setdefault("scales_before", [scales[1].clone() for scales in delayed])
    for layer in layers:
        layer.weight.data.mul_(64 if run.step == run.at else 1)
    for scales, scale in zip(delayed, scales_before, strict=True):
        scales[1] = scale


def scale_in_turn(run: Training) -> float:
    return sixth.SMALL if steps_since(run) % 4 else 1.0


def without_input_gradient(run: Training) -> None:
    """Cast the head's weight to zeros for the gradient of its input."""
    cast = {"grad_input": (run.recipe.grad_input[0], sixth.DROPPED)}
    octavo.set_recipe(run.model, RecipeMap(run.recipe, {"head": cast}))


def sequences_larger(count: int, factor: Callable[[Training], float]) -> Do:
    """Return a change that multiplies one of so many sequences in PLAIN layers, and divides its output by as much."""
    return lambda run: sixth.rows_larger(lambda x: sixth.one_in(count, factor(run))(x), *PLAIN)(run)


def growing_along_sequences(run: Training) -> None:
    """Make each position's input of some layers twice as large as the one before it, and the output as much less."""
    factors = 2.0 ** torch.arange(run.model.config.context)[:, None]
    for layer in map(run.model.get_submodule, run.layers(*PLAIN)):
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factors,))
        layer.register_forward_hook(lambda _, __, y: y / factors)


def rows_of_state_reversed(run: Training) -> None:
    """Load second moments whose rows were stored from the last to the first."""
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].flip(0))


def in_three_bits(run: Training) -> None:
    for param in run.model.parameters():
        unit = param.data.abs().max() / 3
        param.data.div_(unit).round_().mul_(unit)


def averaged(run: Training) -> None:
    """Set weights to the mean of these and those of a model that began otherwise."""
    other = build_model(run.model.config, "float32", run.seed + 100)
    for param, its in zip(run.model.parameters(), other.parameters(), strict=True):
        param.data.lerp_(its.data, 0.5)


def in_base64(text: Tensor) -> Tensor:
    rows = [base64.b64encode(bytes(row.tolist()))[: text.shape[1]] for row in text]
    return torch.tensor([[*row] for row in rows], dtype=text.dtype)


def in_shreds(_: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Join pieces of 3 bytes, each of another sequence."""
    pieces = torch.cat([tokens, targets[:, -1:]], 1).reshape(-1, 3)
    text = pieces[torch.randperm(len(pieces))].view(len(tokens), -1)
    return text[:, :-1], text[:, 1:]


def noise_that_spreads(run: Training, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace 1 % more of the bytes by random ones in each step."""
    text = torch.cat([tokens, targets[:, -1:]], 1)
    is_noise = torch.rand(text.shape) < 0.01 * steps_since(run)
    text = torch.randint_like(text, UNUSED).where(is_noise, text)
    return text[:, :-1], text[:, 1:]


def of_last_batch(run: Training) -> None:
    """Give half of the sequences the first block's output for the batch before, as a buffer that is read too early."""
    outputs: dict[int, Tensor] = {}

    def hook(_: Any, __: Any, y: Tensor) -> Tensor:
        outputs[run.step] = y.detach()
        half = len(y) // 2
        return torch.cat([y[:half], outputs[run.step - 1][half:]]) if run.begun else y

    run.model.blocks[0].register_forward_hook(hook)


def subtracting(run: Training) -> None:
    """Subtract what attention and MLPs compute from the residual stream, in all recorded steps."""
    for part in [each for block in run.model.blocks for each in (block.attention, block.mlp)]:
        part.register_forward_hook(lambda _, __, y: -y)


SEVENTH_DRAW: Mapping[str, Fault] = {
    # FP8
    "weights folded, their scale kept": of_fp8(
        ("stale", "clipped", "overwritten"),
        WRITTEN,
        options=DELAYED,
        begin=sixth.around(lambda x: x / 64, lambda _, __, y: y, "qkv.linear", OUT),
        before=at(folded, True),
    ),
    "loss scales of two tasks in turn": of_fp8(
        ("flushed", "stale"),
        ("gradients",),
        options=LONG | FAST,
        begin=lambda run: sixth.gradients(lambda grad: grad / scale_in_turn(run))(run),
        loss=lambda run, loss: loss * scale_in_turn(run),
    ),
    "garbage in unused rows of the head": of_fp8(
        ("outliers", "flushed", "overwritten"),
        WRITTEN,
        "head",
        options=BY_TENSOR,
        begin=output_of("head", lambda _, y: torch.cat([y[..., :UNUSED], torch.full_like(y[..., UNUSED:], -20)], -1)),
        before=at(lambda run: run.weight("head")[UNUSED:].fill_(sixth.HUGE)),
    ),
    "head's weight lost in backward": of_fp8(
        ("flushed", "frozen"), ("gradients",), options=BY_TENSOR | FAST, before=at(without_input_gradient)
    ),
    "sequences that drift apart": of_fp8(
        ("outliers", "flushed"),
        FORWARD,
        options=BY_TENSOR,
        begin=sequences_larger(4, lambda run: 4.0 ** steps_since(run)),
    ),
    "one batch in other units": of_fp8(
        ("flushed", "stale", "clipped"),
        FORWARD,
        options=LONG,
        begin=sequences_larger(1, lambda run: 2.0**30 if run.step == run.at else 1.0),
    ),
    "a scale that rises in one layer": of_fp8(
        ("clipped", "stale"),
        ("loss", "gradients"),
        "head",
        options=DELAYED,
        before=at(lambda run: [scales[0].mul_(2.0 ** (steps_since(run) / 2)) for scales, _ in states(run)[-1:]], True),
    ),
    "inputs that grow along a sequence": of_fp8(
        ("flushed", "outliers"), options=BY_TENSOR, begin=growing_along_sequences, **ALWAYS
    ),
    # the optimizer and the schedule
    "rows of the state reversed": sixth.of_step(
        ("state",), ("load_state_dict",), ("updates",), options=FAST, before=at(rows_of_state_reversed)
    ),
    "signs of gradients lost": sixth.of_step(
        ("gradients",), (), sixth.GRADIENTS, options=FAST, begin=sixth.gradients(torch.abs)
    ),
    "weights stored in three bits": sixth.of_step(
        ("unmoved", "overwritten"), ("master", *CHECKPOINT), ("updates", *WRITTEN), before=at(in_three_bits, True)
    ),
    "averaged with another model": sixth.of_step(("overwritten",), CHECKPOINT, WRITTEN, before=at(averaged)),
    "one step at 100 times the rate": sixth.of_step(
        ("learning rate",),
        ("lr",),
        ("learning rate", "updates"),
        begin=having(schedule=(lambda step: 100.0 if step == BEFORE + 6 else 1.0,)),
    ),
    # data
    "text in base64": sixth.of_text(in_base64),
    "shreds of documents": Fault(OF_DATA, "", DATA, batch=in_shreds, **ALWAYS),
    "noise that spreads in the text": Fault(OF_DATA, "", DATA, batch=noise_that_spreads, first=FORWARD),
    # the program
    "softmax before the loss's": sixth.of_forward(
        ("jump", "gradients"), begin=output_of("head", lambda _, y: y.softmax(-1))
    ),
    "last block left out": sixth.of_forward(("jump", "frozen"), begin=output_of("blocks.1", lambda x, _: x)),
    "head reads each feature's neighbour": sixth.of_forward(begin=output_of("norm", lambda _, y: y.roll(1, -1))),
    "sums of one rank of four": sixth.of_forward(
        ("jump", "ranks", "dead units"),
        begin=sixth.around(
            lambda x: x * (torch.arange(x.shape[-1]) < x.shape[-1] // 4), lambda _, __, y: y, OUT, *MLPS
        ),
    ),
    "activations of the batch before": sixth.of_forward(begin=of_last_batch),
    "noise that grows before the head": sixth.of_forward(
        begin=lambda run: output_of("norm", lambda _, y: y + 0.2 * steps_since(run) * torch.randn_like(y))(run)
    ),
    "blocks that subtract": Fault(("jump",), ALL, begin=subtracting, **ALWAYS),
    "gradients in reversed positions": Fault(
        ("gradients",), ALL, (), FAST, begin=gradient_of("blocks.1", lambda grad: grad.flip(1)), first=sixth.GRADIENTS
    ),
}


def sharpness_aware(run: Training) -> None:
    """Compute each step's gradient where the batch's loss rises fastest, 0.05 away from the weights (2010.01412)."""
    params = [*run.model.parameters()]
    next_byte_loss(run.model((batch := batches(run.seed).training(run.done))[0]), batch[1]).backward()
    norm = torch.stack([param.grad.norm() for param in params]).norm()
    run.moves = [param.grad * 0.05 / norm for param in params]
    torch._foreach_add_([param.data for param in params], run.moves)
    run.model.zero_grad()


def moved_back(run: Training) -> None:
    def move(*_: object) -> None:
        torch._foreach_sub_([param.data for param in run.model.parameters()], run.moves)

    run.optimizer.register_step_pre_hook(move)


def with_teacher(run: Training) -> None:
    run.teacher = copy.deepcopy(run.model)
    octavo.set_recipe(run.teacher, recipes.high_precision())
    keep_logits(run)


def distilled(run: Training, loss: Tensor) -> Tensor:
    """Return the mean of the loss and the distance to what the model said when the recording began."""
    with torch.no_grad():
        teacher = run.teacher(batches(run.seed).training(run.done)[0]).float().softmax(-1)
    return (loss + F.cross_entropy(run.logits.flatten(0, 1), teacher.flatten(0, 1))) / 2


def shared(run: Training) -> None:
    """Use the first block twice, in a model that begins its training."""
    run.model.blocks[1] = run.model.blocks[0]
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr)


def cycle(step: int) -> float:
    """Return a schedule's factor that rises from 0.2 to 2 in eight steps and falls again."""
    return 2 - 1.8 * abs(step - BEFORE - 8) / 8 if step >= BEFORE else 1.0


def with_momentum_of_cycle(run: Training) -> None:
    for group in run.optimizer.param_groups:
        group["betas"] = 0.95 - 0.05 * cycle(run.done), 0.95


SEVENTH_HEALTHY: Mapping[str, Fault] = {
    "Adagrad": Fault(options={"optimizer_of": torch.optim.Adagrad, "lr": 1e-2}),
    "clipped in each step": Fault(options={"clip": 0.05}),
    "logits capped at 30": Fault(
        begin=lambda run: run.model.head.register_forward_hook(lambda _, __, y: 30 * torch.tanh(y / 30))
    ),
    "FP8 from the ninth step on": Fault(
        before=lambda run: (
            run.step in (0, 8) and octavo.set_recipe(run.model, run.recipe if run.step else recipes.high_precision())
        )
    ),
    "two tasks in turn": Fault(batch=lambda run, *batch: sixth.counting(run, *batch) if run.step % 2 else batch),
    "32 sequences of 8 bytes": Fault(batch=lambda run, x, y: (x.reshape(-1, 8), y.reshape(-1, 8))),
    "norms alone are trained": Fault(
        begin=lambda run: [param.requires_grad_(param.ndim < 2) for param in run.model.parameters()]
    ),
    "a block that is used twice": Fault(fresh=True, models=("dense",), begin=shared),
    "sharpness-aware minimization": Fault(begin=moved_back, before=sharpness_aware),
    "stochastic depth": Fault(
        begin=lambda run: run.model.blocks[1].register_forward_hook(
            lambda _, inputs, y: torch.where(torch.rand(len(y), 1, 1) < 0.3, inputs[0], y)
        )
    ),
    "distillation": Fault(begin=with_teacher, loss=distilled),
    "one cycle of rate and momentum": Fault(options={"schedule": cycle}, before=with_momentum_of_cycle),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "seventh draw", SEVENTH_DRAW, SEVENTH_HEALTHY))
