"""Weights that live in FP8, updated by the launch and by its reference: bit for bit, after some steps of many."""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
import torch

from octavo import E4M3, PerTensor
from octavo.kernels.reference.master_weights import Fp8Weight
from octavo.kernels.reference.optimizer_step import AdamGroup, WeightUpdate
from octavo.optim.moment import NAMED, Moment
from tests.support.fp8_weights import RESTS, amax_of, read, store, values_of, weight
from tests.support.optimizer_both import (
    ADAM,
    GRADIENTS,
    OTHER,
    Both,
    coded,
    differences,
    moved,
    update_of,
)
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (3, 31), (130, 128), (135, 256), (129, 300)]
SMALL = [(1, 1), (3, 31), (130, 128), (129, 200)]
ORDINARY = ["weight", "split32", "split24", "stochastic"]
TWO_STAGES = (Moment(E4M3, granularity=PerTensor()), Moment(E4M3, granularity=PerTensor()))
SCHEMES = {**NAMED, "two stages": TWO_STAGES}
TURNED = [ADAM._replace(weight_decay=300.0), OTHER]  # the first turns weights' signs
COUPLED = [group._replace(decoupled=False) for group in (ADAM, OTHER)]

each_granularity = pytest.mark.parametrize("blocks", [False, True], ids=["tensor", "blocks"])
SOME = [*RESTS][::2]
each_kind = pytest.mark.parametrize("kind", RESTS)


def fp8_update(
    shape: tuple[int, int],
    kind: str,
    blocks: bool = False,
    moments: Sequence[Moment] = NAMED["fp8"],
    number: int = 0,
    first_row: int = 0,
) -> WeightUpdate:
    """A weight with a state of 0; its values, and so its blocks' scales, differ by orders of magnitude."""
    values = values_of(shape)
    held = weight(kind, shape, blocks)
    store(held, values)
    update = update_of(shape, moments, gradient=GRADIENTS[number % 3], number=number, first_row=first_row)
    return update._replace(master=held)


def with_ordinary(updates: Iterable[WeightUpdate], moments: Sequence[Moment]) -> list[WeightUpdate]:
    """Weights of other masters among them."""
    found = list(updates)
    for place, master in enumerate(ORDINARY):
        at = place * len(found) // len(ORDINARY)
        found.insert(at, update_of((3, 300), moments, master, GRADIENTS[place % 3], 100 + place))
    return found


@pytest.fixture(autouse=True)
def large_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, where a tile takes the same time whatever its size, few of them."""
    if kernels.device.type == "cpu":
        set_tiles(kernels, monkeypatch, 128, 1)


def set_tiles(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, block_r: int, tiles: int) -> None:
    chosen = kernels.module("launch").Config(block_r, 128, tiles, 4)
    monkeypatch.setattr(kernels.module("optimizer_step"), "config", lambda *_: chosen)


@pytest.mark.covering(1)
@each_granularity
@each_kind
def test_all_shapes_in_one_launch(kind: str, blocks: bool, kernels: TritonKernels) -> None:
    updates = [fp8_update(shape, kind, blocks, number=number) for number, shape in enumerate(SHAPES)]
    both = Both(kernels, with_ordinary(updates, NAMED["fp8"]), [ADAM, OTHER])
    both.steps(2)
    assert len(both.plans) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("groups", [TURNED, COUPLED], ids=["decoupled", "coupled"])
@pytest.mark.parametrize("scheme", ["fp32", "two stages"])
def test_all_kinds_in_one_launch(scheme: str, groups: list[AdamGroup], kernels: TritonKernels) -> None:
    cells = itertools.product(RESTS, [False, True])
    shapes = itertools.cycle(SMALL)
    updates = [fp8_update(next(shapes), *cell, SCHEMES[scheme], number) for number, cell in enumerate(cells)]
    Both(kernels, with_ordinary(updates, SCHEMES[scheme]), groups).steps(2, 0.01)


def experts(
    count: int, shape: tuple[int, int], kind: str, blocks: bool, moments: Sequence[Moment], number: int
) -> WeightUpdate:
    """Matrices of so many experts one below the other, each with scales of its own."""
    apart = [fp8_update(shape, kind, blocks, moments, 3 * number) for _ in range(count)]
    masters = [one.master for one in apart]
    whole = torch.Size((count, *shape))
    rest = None if RESTS[kind] is None else torch.cat([one.rest for one in masters])  # type: ignore[misc]
    master = Fp8Weight(
        torch.cat([one.weight for one in masters]),
        kind,
        torch.stack([one.scale_inv for one in masters]),
        rest,
        torch.stack([one.amax for one in masters]),  # type: ignore[misc]
    )
    stored = [m.for_kernel(str(i), m.new_state(str(i), whole, "cpu", True), True) for i, m in enumerate(moments)]
    gradient = torch.cat([one.gradient for one in apart])
    return apart[0]._replace(master=master, moments=tuple(stored), gradient=gradient, key=number * 77)


PREVIOUS = (Moment(E4M3, granularity=PerTensor(), scale="previous"),) * 2


MANY = pytest.param(NAMED["fp8"], 130, marks=pytest.mark.full, id="more than count their step at a time")


@pytest.mark.parametrize(
    ("scheme", "most"),
    [
        pytest.param(PREVIOUS, 2, id="previous"),
        pytest.param(TWO_STAGES, 2, id="two stages", marks=pytest.mark.full),
        MANY,
    ],
)
def test_experts_in_one_launch(scheme: Sequence[Moment], most: int, kernels: TritonKernels) -> None:
    """Several and one, their gradients in codes."""
    cells = [("fp8_split16", False), ("fp8_stochastic", True), ("fp8_fp32", False)]
    shapes, counts = [(3, 31), (130, 128), (5, 128)], [most, 2, 1]
    updates = [
        experts(count, shape, *cell, scheme, number)
        for number, (count, shape, cell) in enumerate(zip(counts, shapes, cells, strict=True))
    ]
    updates[1] = coded(updates[1])
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(2)
    assert [float(update.step) for update in both.ours] == [2.0] * len(both.ours) and len(both.plans) == 1


@each_granularity
def test_gradients_in_codes(blocks: bool, kernels: TritonKernels) -> None:
    shapes = itertools.cycle(SHAPES)
    updates = [coded(fp8_update(next(shapes), kind, blocks, number=n)) for n, kind in enumerate(RESTS)]
    updates += [coded(fp8_update((256, 384), "fp8_split16", blocks, NAMED["fp32"], 9))]
    Both(kernels, with_ordinary(updates, NAMED["fp8"]), [ADAM, OTHER]).steps(2, 0.01)


@pytest.mark.parametrize("block_r", [pytest.param(16, marks=pytest.mark.full), 64])
def test_tiles(block_r: int, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(kernels, monkeypatch, block_r, 2)
    cells = itertools.product(["fp8_split16", "fp8_fp32"], [False, True])
    updates = [fp8_update((129, 130), *cell, number=number) for number, cell in enumerate(cells)]
    Both(kernels, updates, COUPLED).steps(1)


@each_granularity
def test_aligned_blocks_are_read_in_vectors(blocks: bool, kernels: TritonKernels) -> None:
    updates = [fp8_update((256, 128), kind, blocks, number=n) for n, kind in enumerate(RESTS)]
    updates.append(fp8_update((256, 129), "fp8_split16", blocks, number=9))  # 16 divides all, 128 no row
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(1)
    (plan,) = both.plans.values()
    assert [of.even for of in plan.steps[0].tensors] == [True] * 5 + [False]


def test_scales_follow_the_weights(kernels: TritonKernels) -> None:
    """Of zeros it is 1 and then their bound's; of what decays it shrinks: block by block."""
    group = ADAM._replace(lr=1.0, weight_decay=0.9)
    updates = [fp8_update((130, 200), kind, blocks, number=0) for kind in SOME for blocks in (False, True)]
    for update in updates:  # zeros in all blocks but the last
        values = torch.zeros(130, 200)
        values[128:, 128:] = 1e6 * torch.randn(2, 72)
        store(update.master, values)
    both = Both(kernels, updates, [group])
    before = [update.master.scale_inv.cpu().clone() for update in both.ours]
    both.steps(2)
    for update, old in zip(both.ours, before, strict=True):
        new = update.master.scale_inv.cpu()
        assert new[-1, -1] < old[-1, -1]
        assert old.numel() == 1 or ((old[0] == 1) & (new[0] < 1)).all()
        assert torch.equal(new.log2() % 1, torch.zeros_like(new))


def test_amaxes_are_those_of_what_is_stored(kernels: TritonKernels) -> None:
    cells = itertools.product(RESTS, [False, True])
    updates = [fp8_update((130, 200), *cell, number=number) for number, cell in enumerate(cells)]
    both = Both(kernels, updates, [ADAM, OTHER])
    both.steps(1)
    for update in both.ours:
        found = moved(update, torch.device("cpu"))
        assert torch.equal(found.master.amax, amax_of(read(found.master), found.master.amax.shape))


@each_granularity
def test_a_fault_stays_where_it_is(blocks: bool, kernels: TritonKernels) -> None:
    updates = [fp8_update((130, 200), kind, blocks, NAMED["fp32"], number) for number, kind in enumerate(RESTS)]
    both, rows, cols = Both(kernels, updates, [ADAM, OTHER]), [0, 1, 129], [3, 130, 199]
    faults = torch.tensor([math.nan, math.inf, -math.inf])
    both.new_gradients(spoil=lambda g: g.index_put_((torch.tensor(rows), torch.tensor(cols)), faults))
    both.step()
    both.new_gradients()
    both.step()
    for update in both.ours:
        spoilt = (update.master.weight.cpu() & 0x7F) == 0x7F
        assert spoilt.nonzero().tolist() == [list(place) for place in zip(rows, cols, strict=True)]
        assert update.master.amax.isfinite().all() and update.master.scale_inv.isfinite().all()


@each_granularity
def test_no_number_at_all(blocks: bool, kernels: TritonKernels) -> None:
    both = Both(kernels, [fp8_update((3, 31), kind, blocks, number=n) for n, kind in enumerate(RESTS)], [ADAM, OTHER])
    both.new_gradients(math.nan)
    both.step()
    both.new_gradients()
    both.step()


def test_a_step_is_skipped(kernels: TritonKernels) -> None:
    flag = torch.ones((), device=kernels.device)
    updates = [fp8_update((3, 200), kind, number=number) for number, kind in enumerate(RESTS)]
    updates += [fp8_update((129, 3), kind, True, number=number) for number, kind in enumerate(RESTS)]
    both = Both(kernels, with_ordinary(updates, NAMED["fp8"]), [ADAM, OTHER])
    both.new_gradients()
    both.step(flag.zero_())
    before = copy.deepcopy(both.ours)
    both.new_gradients(math.nan)
    both.step(flag.fill_(1.0))
    assert differences(both.ours, before) == []
    both.new_gradients()
    both.step(flag.zero_(), torch.tensor(3.0, device=kernels.device))
    assert all(float(update.step) == 2.0 for update in both.ours)


@pytest.mark.parametrize("first_row", [3, 1 << 23, (1 << 24) - 3])
def test_rows_further_on(first_row: int, kernels: TritonKernels) -> None:
    cells = itertools.product(["fp8_split16", "fp8_fp16"], [False, True])
    updates = [fp8_update((129, 256), *cell, number=n, first_row=first_row) for n, cell in enumerate(cells)]
    Both(kernels, updates, [ADAM, OTHER]).steps(1)


@each_kind
def test_nothing_to_update(kind: str, kernels: TritonKernels) -> None:
    update = fp8_update((3, 5), kind)
    rest = None if update.master.rest is None else update.master.rest[:0]
    held = Fp8Weight(update.master.weight[:0], kind, update.master.scale_inv, rest, torch.zeros(1, 1))
    empty = update_of((0, 5), NAMED["fp8"], number=1)._replace(master=held)
    both = Both(kernels, [empty, update], [ADAM, OTHER])
    both.steps(2)
    assert [float(found.step) for found in both.ours] == [2.0, 2.0]
