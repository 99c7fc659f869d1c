"""The launch beside its reference, bit for bit: what is stored after some steps of many weights."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference.optimizer_step import SgdGroup
from octavo.kernels.step_numbers import power
from octavo.optim.moment import NAMED
from tests.support.optimizer_both import ADAM, MASTERS, OTHER, SCHEMES, SGD, SHAPES, Both, differences, mixed, update_of
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu


@pytest.mark.covering(1)
@pytest.mark.parametrize(("decoupled", "clip"), [(True, True), (False, False)], ids=["clipped", "coupled"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adam(scheme: str, decoupled: bool, clip: bool, kernels: TritonKernels, small: None) -> None:
    groups = [group._replace(decoupled=decoupled, clip=clip) for group in (ADAM, OTHER)]
    shift = list(SCHEMES).index(scheme) + 3 * clip
    both = Both(kernels, mixed(SCHEMES[scheme], MASTERS, 1, shift), groups)
    both.steps(2)
    assert len(both.plans) == 1


@pytest.mark.parametrize(("decoupled", "clip"), [(True, False), (False, True)])
def test_the_other_rules(decoupled: bool, clip: bool, kernels: TritonKernels, small: None) -> None:
    groups = [group._replace(decoupled=decoupled, clip=clip) for group in (ADAM, OTHER)]
    for scheme in ("fp32", "fp8"):
        Both(kernels, mixed(SCHEMES[scheme], MASTERS, 1, 5), groups).steps(2)


@pytest.mark.parametrize("scheme", ["fp8", pytest.param("two stages", marks=pytest.mark.full)])
def test_sizes(scheme: str, kernels: TritonKernels) -> None:
    shapes = [*SHAPES, (3, 1300), (65, 130)]
    updates = [update_of(shape, SCHEMES[scheme], number=number) for number, shape in enumerate(shapes)]
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


@pytest.mark.parametrize("scheme", ["fp8", "previous", "two stages"])
def test_sizes_in_small_tiles(scheme: str, kernels: TritonKernels, small: None) -> None:
    updates = [update_of(s, SCHEMES[scheme], "split24", number=n) for n, s in enumerate(SHAPES)]
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


@pytest.mark.parametrize("betas", [(0.0, 0.9), (0.9, 0.0), (0.0, 0.0), (0.9, 0.5), (0.5, 0.25)], ids=str)
def test_betas(betas: tuple[float, float], kernels: TritonKernels) -> None:
    group = ADAM._replace(beta1=betas[0], beta2=betas[1])
    for first in (0, 4000):
        updates = [update_of((2, 150), NAMED["fp8"], m, number=2 * n, step=first) for n, m in enumerate(MASTERS[::2])]
        Both(kernels, updates, [group]).steps(2, 0.1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["fp32", "fp8", "bf16", "previous", "two stages"])
@pytest.mark.parametrize(
    "group",
    [
        SGD,
        SGD._replace(nesterov=True, maximize=True),
        SGD._replace(dampening=0.5, weight_decay=0.0),
        SGD._replace(momentum=0.0),
    ],
    ids=["plain", "nesterov", "dampening", "no momentum"],
)
def test_sgd(group: SgdGroup, scheme: str, kernels: TritonKernels, small: None) -> None:
    moments = SCHEMES[scheme][:1] if group.momentum else ()
    both = Both(kernels, mixed(moments, MASTERS, 1, len(scheme)), [group, group._replace(lr=0.3)])
    both.steps(2)
    assert len(both.plans) == 1


FURTHER = [1 << 23, (1 << 24) - 3, (5 << 24) + 1]  # in rows of 256 that end past 2^31, 2^32, or begin there


@pytest.mark.parametrize("first_row", [3, *FURTHER])
def test_rows_further_on(first_row: int, kernels: TritonKernels, small: None) -> None:
    updates = [update_of((7, 256), NAMED["fp8"], m, number=n, first_row=first_row) for n, m in enumerate(MASTERS[2:4])]
    updates.append(update_of((3, 300), NAMED["bf16"], "stochastic", number=2, first_row=first_row))
    updates.append(update_of((3, 299), NAMED["fp8"], "stochastic", number=3, first_row=first_row))
    Both(kernels, updates, [ADAM, OTHER]).steps(2)
    sgd = [update_of((7, 256), NAMED["fp8"][:1], "split24", first_row=first_row)]
    Both(kernels, sgd, [SGD]).steps(2)


@pytest.mark.parametrize("row", [3, (5 << 24) + 1])
def test_columns_of_longer_rows(row: int, kernels: TritonKernels, small: None) -> None:
    shapes, names = [(3, 256), (3, 150), (1, 200)], itertools.cycle(["fp8", "bf16"])
    updates = [update_of(s, NAMED[next(names)], "stochastic", number=n, first_row=row) for n, s in enumerate(shapes)]
    updates = [update._replace(first_col=128 * n, row_length=1000) for n, update in enumerate(updates)]
    Both(kernels, updates, [ADAM, OTHER]).steps(1)
    sgd = [update_of((3, 256), NAMED["fp8"][:1], "split24", first_row=row)._replace(first_col=64, row_length=512)]
    Both(kernels, sgd, [SGD]).steps(1)


@pytest.mark.parametrize("where", [0, 128])
def test_the_last_program_ends_all_of_many_tensors(where: int, kernels: TritonKernels) -> None:
    updates = [update_of((1, 0), SCHEMES["previous"], number=number) for number in range(301)]
    for number in {where, 299}:
        updates[number] = update_of((2, 3), SCHEMES["previous"], "split24", number=number)
    Both(kernels, updates, [ADAM, OTHER]).steps(2)


@pytest.mark.parametrize("scheme", ["fp32", "fp8", "previous", "two stages"])
def test_a_fault_stays_where_it_is(scheme: str, kernels: TritonKernels) -> None:
    updates = [update_of((3, 300), SCHEMES[scheme], master, number=n) for n, master in enumerate(MASTERS)]
    both, places = Both(kernels, updates, [ADAM, OTHER]), [0, 130, 299]
    both.new_gradients()
    both.step()
    where, faults = (torch.arange(3), torch.tensor(places)), torch.tensor([math.nan, math.inf, -math.inf])
    both.new_gradients(spoil=lambda g: g.index_put_(where, faults))
    both.step()
    for update in both.ours:
        spoilt = ~update.master.weight.cpu().isfinite()
        assert spoilt.nonzero().tolist() == [[row, col] for row, col in enumerate(places)]
    both.new_gradients()
    both.step()


@pytest.mark.parametrize("scheme", ["fp8", "previous", "two stages"])
def test_gradients_too_large_for_a_second_moment_make_no_nan(scheme: str, kernels: TritonKernels) -> None:
    both = Both(kernels, [update_of((3, 300), SCHEMES[scheme], "weight")], [ADAM])
    places, large = (torch.arange(3), torch.tensor([0, 130, 299])), torch.tensor([1e30, -1e30, 3e38])
    for spoilt in (False, True, False, True):
        both.new_gradients(spoil=lambda g, spoilt=spoilt: g.index_put_(places, large) if spoilt else g)
        both.step()
    assert all(update.master.weight.isfinite().all() for update in both.ours)


def test_a_step_is_skipped(kernels: TritonKernels) -> None:
    flag = torch.ones((), device=kernels.device)
    for scheme in ("fp8", "previous", "two stages"):
        both = Both(kernels, mixed(SCHEMES[scheme], MASTERS[1::3], 1, 1), [ADAM, OTHER])
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
def test_gradients_are_divided(group: Any, kernels: TritonKernels) -> None:
    scale = torch.tensor(3.0, device=kernels.device)
    moments = NAMED["fp8"][: 1 + (group is ADAM)]
    both = Both(kernels, mixed(moments, MASTERS, 1, 2), [group, group._replace(maximize=True)])
    for _ in range(2):
        both.new_gradients()
        both.step(None, scale)
    unscaled = Both(kernels, [update_of((2, 150), moments)], [group])
    unscaled.new_gradients()
    halves = Both(kernels, unscaled.theirs, [group])
    halves.ours[0].gradient.mul_(8)
    halves.theirs[0].gradient.mul_(8)
    halves.step(None, scale.fill_(8.0))
    unscaled.step()
    assert differences(halves.ours, unscaled.ours) == []


@pytest.mark.parametrize("group", [ADAM, SGD], ids=["Adam", "SGD"])
def test_learning_rates(group: Any, kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels.module("optimizer_step")
    rate = torch.tensor(0.05, device=kernels.device)
    groups = [group._replace(lr=rate), group._replace(lr=torch.tensor(0.05, dtype=torch.float64))]
    if kernels.device.type == "cpu":  # as if it were on a GPU
        monkeypatch.setattr(module, "_address", lambda lr: lr.data_ptr() if lr is rate else 0)
    moments = NAMED["fp32"][: 1 + (group is ADAM)]
    both = Both(kernels, [update_of((2, 10), moments, number=n) for n in range(2)], groups)
    both.steps(1)
    plan = next(iter(both.plans.values()))
    assert (plan.table[:, 11] != 0).tolist() == [True, False]
    assert plan.sent["groups"][0][0][0] == 0.0
    rate.fill_(0.5)
    sent = plan.sent["groups"]
    both.steps(1)
    assert len(both.plans) == 1 and plan.sent["groups"] is sent  # nothing new to send


def test_a_step_keeps_the_corrections_of_the_next_one(kernels: TritonKernels) -> None:
    both = Both(kernels, [update_of((2, 150), NAMED["fp8"], "split32", number=n) for n in range(2)], [ADAM, OTHER])
    both.steps(2)
    (plan,) = both.plans.values()
    entries = plan.table[:, -14:].unflatten(1, (2, -1))[:, 1].cpu()  # of odd steps
    assert entries[:, 0].tolist() == [3, 3]
    expected = [[g.beta1, g.beta2, 1 - power(g.beta1, 3)] for g in (ADAM, OTHER)]
    assert entries.view(torch.float64)[:, 1:4].tolist() == expected
    for number in (9.0, 3.0):  # as a loaded state has it
        for update in (*both.ours, *both.theirs):
            update.step.fill_(number)
        both.steps(2)
    for betas in ((0.8, 0.99), (0.8, 0.97)):
        both.groups = [ADAM._replace(beta1=betas[0], beta2=betas[1]), OTHER]
        both.steps(2)
    assert list(both.plans.values()) == [plan]


def record(both: Both, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Launches in the rest of the test: whether each only finds amaxes."""
    launch, found = both.module.launch, []

    def recorded(kernel: Any, programs: int, arguments: tuple[Any, ...], num_warps: int) -> None:
        found.append(arguments[-1].find)
        launch(kernel, programs, arguments, num_warps)

    monkeypatch.setattr(both.module, "launch", recorded)
    return found


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
    both = Both(kernels, mixed(NAMED["fp8"], MASTERS[:2], 2, 1), [ADAM, OTHER])
    both.steps(2)
    (plan,) = both.plans.values()
    table, sent = plan.table, dict(plan.sent)
    both.step()  # with what was there before
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

    updates = [update_of((2, 256), NAMED["fp8"], "split32", torch.bfloat16, number=n) for n in range(2)]
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
    both = Both(kernels, [update_of(shape, NAMED["fp8"]) for shape in ((0, 5), (5, 0))], [ADAM])
    both.step()
    assert float(both.ours[0].step) == 1.0


def test_nothing_to_update_is_skipped_too(kernels: TritonKernels) -> None:
    both = Both(kernels, [update_of((0, 5), NAMED["fp8"])], [ADAM])
    both.step(torch.ones((), device=kernels.device))


def test_a_graph_is_captured_after_a_step(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(kernels, [update_of((2, 150), NAMED["fp8"])], [ADAM])
    both.step()
    monkeypatch.setattr(both.module, "is_capturing", lambda: True)  # as if one were being captured
    both.step()
    other = ADAM._replace(lr=0.02)
    for groups, plans, what in (([other], both.plans, "addresses or the options changed"), ([ADAM], {}, "are new")):
        with pytest.raises(RuntimeError, match=f"run the step once before capturing it in a CUDA graph: .*{what}"):
            both.module.optimizer_step(both.ours, groups, None, None, plans)
    monkeypatch.setattr(both.module, "is_capturing", lambda: False)
    ((*read,),) = both.plans["captured"]
    read[0] = read[0][:, :20]  # without the corrections that a step keeps for the next one
    before, both.groups = [tensor.clone() for tensor in read], [other]
    both.step()
    assert all(map(torch.equal, before, read))  # what the graph reads stays as it is
