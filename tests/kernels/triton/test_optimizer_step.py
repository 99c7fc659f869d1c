"""The launch beside its reference, bit for bit: the tensors after some steps of many weights."""

import copy
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import E4M3, PerTensor
from octavo.formats import E4M4
from octavo.kernels.reference.optimizer_state import Fp8Weight
from octavo.kernels.reference.optimizer_step import BitNumbers, SgdGroup, WeightUpdate
from octavo.kernels.step_numbers import key_of, random_bits, root_of, swapped
from octavo.optim.moment import NAMED_MOMENTS, Moment
from tests.support.fp8_weights import RESTS
from tests.support.optimizer_both import (
    ADAM,
    BETAS,
    BY_TURNS,
    IN_FP8,
    MASTERS,
    OTHER,
    SCHEMES,
    SGD,
    SHAPES,
    Both,
    coded,
    dealt_weights,
    differences,
    fp8_update,
    mixed,
    update_of,
    update_of_case,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu
FP8_MOMENTS = NAMED_MOMENTS["fp8"]


def set_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, tile_r: int, tiles: int) -> None:
    chosen = kernels.module("launch").Config(tile_r, 128, tiles, 4)
    monkeypatch.setattr(kernels.module("optimizer_step"), "config", lambda *_: chosen)


@pytest.fixture
def large(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use large tiles: fewer of them in the interpreter, where one takes as long whatever its size."""
    if kernels.interpreted:
        set_tiles(kernels, monkeypatch, 128, 1)


def test_a_largest_number_is_not_rounded_up_to_nan(kernels: TritonKernels) -> None:
    """Times its scale it may exceed the format's max by a bit, which the largest random bits carry to the next code."""
    gradients = torch.rand(1000) + 1
    roots = root_of(gradients.square() * (1 - ADAM.beta2))
    excess = roots * (E4M4.max / roots) > E4M4.max
    index = torch.arange(1 << 21)
    largest = swapped(random_bits(key_of(0, 1, 0), index.clone())) >> 13 == -1  # all of the upper 19
    moments = Moment(E4M3, rounding="stochastic"), Moment(E4M4, root=True, rounding="stochastic")
    update = update_of((1, 1), moments, first_row=int(index[largest][0]))
    both = Both(kernels, [update._replace(gradient=gradients[excess][:1].view(1, 1).clone())], [ADAM])
    both.step()
    assert both.ours[0].moments[1].data.tolist() == [[E4M4.max_code]]


RULES = {
    "Adam": ADAM,
    "coupled": ADAM._replace(decoupled=False),
    "unclipped": ADAM._replace(bounds_update=False),
    "unclipped, coupled": ADAM._replace(bounds_update=False, decoupled=False),
    "SGD": SGD,
    "nesterov": SGD._replace(nesterov=True, maximize=True),
    "dampening": SGD._replace(dampening=0.5, weight_decay=0.0),
    "no momentum": SGD._replace(momentum=0.0),
    "an average": SGD._replace(averages=True, nesterov=True, momentum=0.3),
    "decoupled, bounded": SGD._replace(averages=True, momentum=0.0, max_update=1.25),
}
ORDINARY = [*SHAPES, (3, 1300), (65, 130), (7, 256), (300, 1)]
LARGER = [(1, 1), (3, 31), (130, 128), (135, 256), (129, 200), (256, 128), (256, 129)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
@pytest.mark.parametrize("rule", RULES)
def test_any_weights(rule: str, seed: int, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, the second with divided gradients, give the reference's weights and sums of the resolution."""
    number, group = 10 * seed + [*RULES].index(rule), RULES[rule]
    torch.manual_seed(number)
    bounded = getattr(group, "bounds_update", False) or rule == "decoupled, bounded"  # as FP8 masters need
    other = OTHER._replace(decoupled=group.decoupled) if rule in ("Adam", "coupled") else group._replace(lr=0.3)
    moments = slice((1 if group.momentum else 0) if isinstance(group, SgdGroup) else 2)
    updates = []
    for in_fp8 in (False, True) if bounded and rule != "coupled" else (False,):
        kinds = dealt_weights(number, 2, IN_FP8, LARGER) if in_fp8 else dealt_weights(number, 3, MASTERS, ORDINARY)
        updates += [update_of_case(case, moments, len(updates) + at) for at, case in enumerate(kinds)]
    if kernels.interpreted and (bounded or number % 4 > 1):  # in the interpreter a tile takes as long whatever its size
        set_tiles(kernels, monkeypatch, 64 if number % 4 == 3 else 128, 1)
    elif number % 4 < 2:
        set_tiles(kernels, monkeypatch, 16 if number % 4 else 8, 2)
    groups = [group, other]
    if not isinstance(group, SgdGroup):
        betas = (BETAS[(2 * number + at) % len(BETAS)] for at in range(2))
        groups = [one._replace(beta1=b1, beta2=b2) for one, (b1, b2) in zip(groups, betas, strict=True)]
    both = Both(kernels, updates, groups)
    both.step(measures=True)
    both.new_gradients(0.01 if number % 3 == 2 else 10.0)
    both.step(None, torch.tensor(3.0), measures=True)
    assert len(both.plans) == 1


def test_the_last_program_ends_all_of_many_tensors(kernels: TritonKernels) -> None:
    updates = [update_of((1, 0), SCHEMES["previous"], number=number) for number in range(301)]
    for number in (128, 299):
        updates[number] = update_of((2, 3), SCHEMES["previous"], "split24", number=number)
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


def test_a_step_is_skipped(kernels: TritonKernels, large: None) -> None:
    flag = torch.ones(())
    updates = [update_of((3, 300), SCHEMES[scheme], "split24") for scheme in ("previous", "two stages")]
    updates += [fp8_update((3, 200), *cell, number=number) for number, cell in enumerate(BY_TURNS[:2])]
    both = Both(kernels, updates, [ADAM, OTHER])
    both.new_gradients()
    both.step(flag.zero_())
    before = copy.deepcopy(both.ours)
    both.new_gradients(math.nan)
    both.step(flag.fill_(1.0))
    assert differences(both.ours, before) == []
    both.new_gradients()
    both.step(flag.zero_())
    assert all(float(update.step) == 2.0 for update in both.ours)


@pytest.mark.parametrize("group", [ADAM, SGD], ids=["Adam", "SGD"])
def test_learning_rates(group: Any, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels.module("optimizer_step")
    rate = torch.tensor(0.05)
    groups = [group._replace(lr=rate), group._replace(lr=torch.tensor(0.05, dtype=torch.float64))]
    # as if it were on a GPU
    monkeypatch.setattr(module, "_address", lambda lr: lr.data_ptr() if lr is rate else 0)
    moments = NAMED_MOMENTS["fp32"][: 1 + (group is ADAM)]
    both = Both(kernels, [update_of((2, 10), moments, number=n) for n in range(2)], groups)
    both.steps(1)
    (plan,) = both.plans.values()
    sent = plan.sent["groups"]
    rate.fill_(0.5)
    both.steps(1)
    assert len(both.plans) == 1 and plan.sent["groups"] is sent  # nothing new to send


def test_corrections_that_a_step_kept_are_those_of_the_next_one_alone(kernels: TritonKernels) -> None:
    both = Both(kernels, [update_of((2, 150), FP8_MOMENTS, "split32", number=n) for n in range(2)], [ADAM, OTHER])
    both.steps(2)
    (plan,) = both.plans.values()
    for number in (9.0, 3.0):  # as a loaded state has it
        for update in (*both.ours, *both.theirs):
            update.step.fill_(number)
        both.steps(1)
    both.groups = [ADAM._replace(beta1=0.8, beta2=0.97), OTHER]
    both.steps(2)
    assert list(both.plans.values()) == [plan]


def record(both: Both, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Launches in the rest of the test: whether each only finds amaxes."""
    launch, only_amaxes = both.module.launch, []

    def recorded(kernel: Any, programs: int, arguments: tuple[Any, ...], num_warps: int) -> None:
        only_amaxes.append(arguments[-1].finds_amaxes)
        launch(kernel, programs, arguments, num_warps)

    monkeypatch.setattr(both.module, "launch", recorded)
    return only_amaxes


@pytest.mark.parametrize("rule", [ADAM, SGD._replace(averages=True, max_update=1.25)], ids=["Adam", "Muon's"])
def test_the_hybrid_reads_what_it_replaces(kernels: TritonKernels, rule: Any) -> None:
    both_forms, count = (SCHEMES["hybrid"], SCHEMES["hybrid bf16"]), 1 + (rule is ADAM)
    Both(kernels, [update_of((3, 200), moments[:count]) for moments in both_forms], [rule]).steps(3, 1.5)


def test_one_launch_or_two(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, expected in (("fp8", [False]), ("previous", [False]), ("two stages", [True, False])):
        both = Both(kernels, [update_of((2, 150), SCHEMES[scheme], m) for m in MASTERS[::2]], [ADAM])
        with monkeypatch.context() as patch:
            launches = record(both, patch)
            both.steps(2)
            assert launches == expected * 2
    both = Both(kernels, [update_of((1, 128), SCHEMES["two stages"])], [ADAM])  # a block's amax is all's
    launches = record(both, monkeypatch)
    both.steps(1)
    assert launches == [False]


def test_a_plan_stays_while_weights_do(kernels: TritonKernels) -> None:
    both = Both(kernels, mixed(FP8_MOMENTS, MASTERS[:2], 2, 1), [ADAM, OTHER])
    both.steps(2)
    (plan,) = both.plans.values()
    table, sent = plan.table, dict(plan.sent)
    both.step()  # with the earlier content
    assert all(plan.sent[name] is sent[name] for name in ("gradients", "groups"))
    both.ours = [u._replace(gradient=u.gradient.clone()) for u in both.ours]
    both.step()
    assert plan.sent["groups"] is sent["groups"] and plan.sent["gradients"] is not sent["gradients"]
    both.groups = [ADAM._replace(lr=0.5), OTHER]
    both.step()
    assert all(plan.sent[name][1] is sent[name][1] for name in sent) and plan.sent["groups"] is not sent["groups"]
    assert plan.table is table and len(both.plans) == 1
    both.ours, both.theirs = both.ours[1:], both.theirs[1:]
    both.step()
    assert len(both.plans) == 2
    both.ours = [u._replace(gradient=u.gradient.float()) for u in both.ours]
    both.theirs = [u._replace(gradient=u.gradient.float()) for u in both.theirs]
    both.step()
    assert len(both.plans) == 3


@pytest.mark.parametrize("what", ["gradient", "weight", "moment"])
def test_misaligned(what: str, kernels: TritonKernels) -> None:
    def shifted(x: Tensor) -> Tensor:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        return memory[1:].view(x.shape).copy_(x)

    updates = [update_of((2, 256), FP8_MOMENTS, "split32", torch.bfloat16, number=n) for n in range(2)]
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(1)
    update = both.ours[0]
    if what == "gradient":
        both.ours[0] = update._replace(gradient=shifted(update.gradient))
    else:  # as an optimizer does, which sees that it is another tensor
        part, name = (update.master, "weight") if what == "weight" else (update.moments[1], "data")
        setattr(part, name, shifted(getattr(part, name)))
        both.plans.clear()
    both.steps(2)
    plan = list(both.plans.values())[-1]
    assert [of.even for of in plan.steps[0].tensors] == [False, True]  # one apart, the other read in vectors


def test_nothing_to_update(kernels: TritonKernels) -> None:
    """Weights without elements are updated alone, skipped too, or among others."""
    for skip in (None, torch.ones(())):
        both = Both(kernels, [update_of(shape, FP8_MOMENTS) for shape in ((0, 5), (5, 0))], [ADAM])
        both.step(skip)
        assert float(both.ours[0].step) == (skip is None)
    updates = []
    for kind in RESTS:
        update = fp8_update((3, 5), kind)
        low_bits = None if update.master.low_bits is None else update.master.low_bits[:0]
        held = Fp8Weight(update.master.weight[:0], kind, update.master.scale_inv, low_bits, torch.zeros(1, 1))
        updates += [update_of((0, 5), FP8_MOMENTS, number=1)._replace(master=held), update]
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(2)
    assert all(float(weight.step) == 2.0 for weight in both.ours)


def test_a_graph_is_captured_after_a_step(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(kernels, [update_of((2, 150), FP8_MOMENTS)], [ADAM])
    both.step()
    monkeypatch.setattr(both.module, "is_capturing", lambda: True)  # as if one were being captured
    both.step()
    other = ADAM._replace(lr=0.02)
    for groups, plans, message in (([other], both.plans, "addresses or the options changed"), ([ADAM], {}, "are new")):
        with pytest.raises(RuntimeError, match=f"run the step once before capturing it in a CUDA graph: .*{message}"):
            both.module.optimizer_step(both.ours, groups, None, None, plans)
    monkeypatch.setattr(both.module, "is_capturing", lambda: False)
    ((*read,),) = both.plans["captured"]
    read[0] = read[0][:, :20]  # without the corrections that a step keeps for the next one
    before, both.groups = [tensor.clone() for tensor in read], [other]
    both.step()
    assert all(map(torch.equal, before, read))  # what the graph reads stays as it is


# --- weights that live in FP8 -----------------------------------------------------------------------------------------


def experts(
    count: int, shape: tuple[int, int], kind: str, blocks: bool, moments: Sequence[Moment], number: int
) -> WeightUpdate:
    """Matrices of so many experts one below the other, each with scales of its own."""
    apart = [fp8_update(shape, kind, blocks, moments, number=3 * number) for _ in range(count)]
    masters = [one.master for one in apart]
    whole = torch.Size((count, *shape))
    low_bits = None if RESTS[kind] is None else torch.cat([one.low_bits for one in masters])  # type: ignore[misc]
    master = Fp8Weight(
        torch.cat([one.weight for one in masters]),
        kind,
        torch.stack([one.scale_inv for one in masters]),
        low_bits,
        torch.stack([one.amax for one in masters]),  # type: ignore[misc]
    )
    stored = [m.for_kernel(str(i), m.new_state(str(i), whole, "cpu", True), True) for i, m in enumerate(moments)]
    gradient = torch.cat([one.gradient for one in apart])
    return apart[0]._replace(master=master, moments=tuple(stored), gradient=gradient, bits=BitNumbers(number * 77))


PREVIOUS = (Moment(E4M3, granularity=PerTensor(), scale="previous"),) * 2


def test_experts_in_one_launch(kernels: TritonKernels, large: None) -> None:
    """One launch updates experts of several weights and of one, with gradients in codes."""
    cells = (
        (2, (3, 31), "fp8_split16", False),
        (2, (130, 128), "fp8_stochastic", True),
        (1, (5, 128), "fp8_fp32", False),
    )
    updates = [experts(*cell, PREVIOUS, number) for number, cell in enumerate(cells)]
    updates[1] = coded(updates[1])
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(2)
    assert [float(update.step) for update in both.ours] == [2.0] * len(both.ours) and len(both.plans) == 1


def test_aligned_blocks_are_read_in_vectors(kernels: TritonKernels, large: None) -> None:
    updates = [fp8_update((256, 128), *cell, number=n) for n, cell in enumerate(BY_TURNS)]
    updates.append(fp8_update((256, 129), "fp8_split16", True, number=9))  # 16 divides all, 128 no row
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(1)
    (plan,) = both.plans.values()
    assert [of.even for of in plan.steps[0].tensors] == [True] * len(BY_TURNS) + [False]


# --- gradients in codes -----------------------------------------------------------------------------------------------


def test_codes_of_a_vector_that_is_seen_in_rows_of_one(kernels: TritonKernels, monkeypatch: Any) -> None:
    """A sharded vector's part is seen in rows of one; its codes are as the reference writes them."""
    set_tiles(kernels, monkeypatch, 4, 2)  # small tensors are several programs
    lengths = [1, 5, 128, 300, 2064, 0]
    masters = itertools.cycle(MASTERS[:4])
    updates = [update_of((n, 1), NAMED_MOMENTS["fp32"], next(masters), number=i) for i, n in enumerate(lengths)]
    updates = [coded(update._replace(bits=BitNumbers(update.bits.key, 1000)), vector=True) for update in updates]
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


def test_a_plan_keeps_no_gradient(kernels: TritonKernels) -> None:
    both = Both(kernels, [coded(update_of((3, 300), FP8_MOMENTS)), update_of((3, 300), FP8_MOMENTS)], [ADAM, OTHER])
    both.step()
    ends = [weakref.ref(update.gradient) for update in both.ours]
    both.ours = [update._replace(gradient=update.master.weight, gradient_scale_inv=None) for update in both.ours]
    assert len(both.plans) == 1 and all(end() is None for end in ends)
