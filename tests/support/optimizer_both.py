"""The optimizer's launch and its reference, each on its own copy of the same weights."""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo import E4M3, E5M2, PerBlock, PerTensor, quantize
from octavo.formats import E4M4
from octavo.kernels.reference.optimizer_state import MasterWeight, MomentTensors
from octavo.kernels.reference.optimizer_step import AdamGroup, BitNumbers, SgdGroup, WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference
from octavo.kernels.step_numbers import root_of
from octavo.optim.moment import NAMED_MOMENTS, Moment
from tests.support.combinations import dealt
from tests.support.fp8_weights import PLAIN_RESTS, store, values_of, weight
from tests.support.fp8_weights import RESTS as FP8_RESTS
from tests.support.rounded_once import rounded_once
from tests.support.triton_cases import assert_counters_are_zero
from tests.support.triton_kernels import TritonKernels

ONE: Any = {"granularity": PerTensor()}
PREVIOUS: Any = {**ONE, "scale": "previous"}
STOCHASTIC: Any = {"rounding": "stochastic"}
HYBRID: Any = {"rounding": "hybrid"}
SCHEMES = {
    **NAMED_MOMENTS,
    "nearest": (Moment(E4M3), Moment(E4M4, root=True)),
    "E5M2": (Moment(E5M2, **STOCHASTIC), Moment(E5M2, root=True)),
    "mixed": (Moment("bf16"), Moment(E4M4, root=True)),
    "previous": (Moment(E4M3, **PREVIOUS), Moment(E5M2, root=True, **PREVIOUS, **STOCHASTIC)),
    "two stages": (Moment(E5M2, **ONE), Moment(E4M3, **ONE)),
    "hybrid": (Moment(E4M3, **HYBRID), Moment(E4M4, root=True, **HYBRID)),
    "hybrid bf16": (Moment("bf16", **HYBRID), Moment(E5M2, root=True, **PREVIOUS, **HYBRID)),
    "a root in two stages": (Moment("fp32"), Moment(E4M4, root=True, **ONE, **STOCHASTIC)),
}
MASTERS = [*PLAIN_RESTS]
SHAPES = [(1, 1), (1, 31), (3, 31), (5, 128), (0, 5), (2, 300), (9, 256), (5, 0), (7, 16), (1, 1030)]
GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
ADAM = AdamGroup(0.01, 0.9, 0.99, 1e-8, 0.1, False, True, True)
OTHER = ADAM._replace(lr=0.02, beta1=0.5, beta2=0.95, eps=1e-6, weight_decay=0.0, maximize=True)
SGD = SgdGroup(0.1, 0.9, 0.0, 0.01, False, False)


IN_FP8 = [*itertools.product(FP8_RESTS, [False, True])]  # kinds of masters, and whether scales are of blocks
BY_TURNS = [(kind, bool(number % 2)) for number, kind in enumerate(FP8_RESTS)]
# the element that rows begin at or pass: here, in a larger tensor, past int32 and where random bits take 64
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9), (0.0, 0.0), (0.9, 0.0), (0.5, 0.25), (0.9, 0.5), (0.99, 1 - 1e-7)]


def update_of(
    shape: tuple[int, int],
    moments: Sequence[Moment],
    master: str = "weight",
    gradient: torch.dtype = torch.float32,
    number: int = 0,
    first_row: int = 0,
    step: int = 0,
) -> WeightUpdate:
    """Return a weight with a state of 0, on the CPU; number: of the weight; it is of group number % 2."""
    weight = torch.randn(shape).to(torch.float32 if master == "weight" else torch.bfloat16)
    span = None if (dtype := PLAIN_RESTS[master]) is None else torch.iinfo(dtype)
    remainder = None if span is None else torch.randint(span.min, span.max, shape).to(dtype)
    size, cpu = torch.Size(shape), torch.device("cpu")
    stored = [m.for_kernel(name, m.new_state(name, size, cpu)) for name, m in zip("01", moments, strict=False)]
    steps, grad = torch.tensor(float(step)), torch.randn(shape).to(gradient)
    bits = BitNumbers(number * 77, first_row)
    return WeightUpdate(MasterWeight(weight, master, remainder), tuple(stored), grad, steps, bits, number % 2)


def tensors_of(update: WeightUpdate) -> dict[str, Tensor]:
    """Return all tensors that a step may write."""
    parts: dict[str, Any] = {"step": update.step}
    for name, part in zip(("master", "first", "second"), (update.master, *update.moments), strict=False):
        parts |= {f"{name}.{key}": value for key, value in vars(part).items()}
    return {name: value for name, value in parts.items() if isinstance(value, Tensor)}


def differences(ours: Iterable[WeightUpdate], theirs: Iterable[WeightUpdate]) -> list[str]:
    """Return a line for each tensor that is not the same bit for bit; any two NaN are equal."""
    lines = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for (name, x), y in zip(tensors_of(a).items(), tensors_of(b).values(), strict=True):
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
            wrong = (x.contiguous().view(bits) != y.contiguous().view(bits)) & ~(x.isnan() & y.isnan())
            if wrong.any():
                lines.append(f"{index} {tuple(a.gradient.shape)} {a.master.kind} {name}: {int(wrong.sum())}")
    return lines


def put(update: WeightUpdate, g: Tensor) -> None:
    """Give a weight another gradient; a vector that is seen as [n, 1] has its blocks along it."""
    if update.gradient_scale_inv is not None:
        vector = update.gradient_scale_inv.shape[0] != g.shape[0]
        pair = quantize(g.view(1, -1) if vector else g, E4M3, PerBlock(1, 128))
        update.gradient_scale_inv.copy_(pair.scale_inv)
        g = pair.qdata.view(torch.uint8).view(g.shape)
    update.gradient.copy_(g)


def coded(update: WeightUpdate, vector: bool = False) -> WeightUpdate:
    """Return the update with a gradient in codes instead."""
    rows, cols = update.gradient.shape
    blocks = (1, -(-rows // 128)) if vector else (rows, -(-cols // 128))
    codes, scale_inv = torch.zeros(rows, cols, dtype=torch.uint8), torch.ones(blocks)
    with_codes = update._replace(gradient=codes, gradient_scale_inv=scale_inv)
    put(with_codes, torch.randn(rows, cols))
    return with_codes


class Both:
    """Weights that the kernel updates, and the same that the reference does."""

    def __init__(self, kernels: TritonKernels, updates: Sequence[WeightUpdate], groups: Sequence[Any]) -> None:
        self.kernels, self.groups = kernels, groups
        self.module: Any = kernels.module("optimizer_step")
        self.ours, self.theirs = ([*map(copy.deepcopy, updates)] for _ in range(2))
        self.plans: dict[Any, Any] = {}

    def new_gradients(self, factor: float = 1.0) -> None:
        for a, b in zip(self.ours, self.theirs, strict=True):
            g = torch.randn(a.gradient.shape) * factor
            put(a, g)
            put(b, g)

    def step(self, skip: Tensor | None = None, grad_scale: Tensor | None = None, measures: bool = False) -> None:
        """Take a step of both, which must store the same, and the same sums for the resolution but for their order."""
        sums = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
        arguments = [(skip, grad_scale, *options) for options in ([[s] for s in sums] if measures else ([], []))]
        # the reference may take torch's root, which may be an ulp off, and sums that a CPU without FMA rounds twice
        with mock.patch.object(Tensor, "sqrt", root_of), rounded_once():
            reference(self.theirs, self.groups, *arguments[0])
        self.module.optimizer_step(self.ours, self.groups, *arguments[1][:2], self.plans, *arguments[1][2:])
        assert differences(self.ours, self.theirs) == []
        torch.testing.assert_close(*sums, rtol=1e-6, atol=0.0)
        assert_counters_are_zero(self.kernels)

    def steps(self, count: int, factor: float = 10.0) -> None:
        """Take steps whose gradients grow."""
        for number in range(count):
            self.new_gradients(factor**number)
            self.step()


def mixed(moments: Sequence[Moment], masters: Sequence[str], each: int, shift: int) -> list[WeightUpdate]:
    """Return ``each`` weights a master, of all sizes and dtypes of gradients, from the shift-th on."""
    updates = []
    for number, master in enumerate(master for master in masters for _ in range(each)):
        shape, gradient = SHAPES[(number + shift) % len(SHAPES)], GRADIENTS[(number + shift) % 3]
        updates.append(update_of(shape, moments, master, gradient, number))
    return updates


def fp8_update(shape: tuple[int, int], kind: str, blocks: bool = False, *args: Any, **options: Any) -> WeightUpdate:
    """Return a weight with a state of 0; its values, and so its blocks' scales, differ by orders of magnitude."""
    held = weight(kind, shape, blocks)
    store(held, values_of(shape))
    options = {"gradient": GRADIENTS[options.get("number", 0) % 3], **options}
    return update_of(shape, *(args or [NAMED_MOMENTS["fp8"]]), **options)._replace(master=held)


def update_of_case(case: dict[str, Any], moments: slice, number: int) -> WeightUpdate:
    """Return a weight, its master, moments of any values, a gradient, and where it lies in the whole tensor."""
    (rows, cols), master, scheme = case["shape"], case["master"], SCHEMES[case["scheme"]][moments]
    gradient = case["gradient"] or torch.float32
    if isinstance(master, str):
        update = update_of((rows, cols), scheme, master, gradient, number, step=case["step"])
    else:
        update = fp8_update((rows, cols), *master, scheme, gradient=gradient, number=number, step=case["step"])
    for place, moment in enumerate(update.moments if case["step"] else ()):
        fill(moment, place == 1)
    length = 1000 if case["apart"] and cols < 800 else 0
    first_row = max(case["start"] // max(length or cols, 1) - rows // 2, 0)
    update = update._replace(bits=BitNumbers(update.bits.key, first_row, 128 if length else 0, length))
    if update.gradient.numel() and case["fault"] is not None:
        for tensor in (update.gradient, update.master.weight)[: 1 + isinstance(update.master, MasterWeight)]:
            tensor.view(-1)[int(torch.randint(tensor.numel(), ()))] = case["fault"]
    update = update._replace(measured=number % 2 == 0)
    return coded(update) if case["gradient"] is None else update


def fill(moment: MomentTensors, is_second: bool) -> None:
    """Fill a moment with any codes, scales and amax."""
    if moment.fmt is None:
        moment.data.copy_(torch.rand(moment.data.shape))
        return
    moment.data.copy_(torch.randint(0, 128 if is_second and moment.fmt.signed else 256, moment.data.shape))
    moment.scale_inv.copy_(torch.rand(moment.scale_inv.shape) * 0.01)
    if moment.amax is not None:
        moment.amax.copy_(torch.rand(moment.amax.shape) * 5)


def dealt_weights(seed: int, count: int, masters: Sequence[Any], shapes: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases of ``update_of_case``."""
    options: dict[str, Sequence[Any]] = {
        "shape": shapes,
        "master": masters,
        "scheme": [*SCHEMES],
        "gradient": [*GRADIENTS, None],  # None: in codes
        "step": [0, 0, 1, 50, 123456, (1 << 24) - 2],
        "fault": [None, None, math.nan, math.inf, -math.inf, 1e30, 1e-40, -0.0],
        "start": [0, 1000, 1 << 31, 1 << 32, (5 << 32) + 300],
        "apart": [False, False, True],
    }
    return dealt(seed, count, **options)
