"""The values that ranks agree on, and when they need not."""

import pytest
import torch

import octavo
from octavo import E4M3, PerRow, PerTensor, recipes
from octavo.autograd import shared_scales
from octavo.autograd.casts import CastRequest, cast_role
from octavo.autograd.rows import Parts, Rows
from octavo.autograd.shared_scales import scale_for, shared_amax
from octavo.kernels.arguments import CastSource
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, WEIGHT, Cast
from tests.support.definitions import same_bits
from tests.support.parallel_tasks import Pair, parallel, step


def test_only_a_scale_per_tensor_of_a_role_in_parts_is_agreed_on():
    parts, x = Parts("no group of this name", (False, True, True)), torch.ones(4, 4)
    assert scale_for(x, Cast(E4M3, PerTensor()), None, INPUT, parts) is None
    assert scale_for(x, Cast(E4M3, PerRow()), None, GRAD_OUTPUT, parts) is None
    assert scale_for(x, Cast(E4M3, PerTensor()), None, INPUT, None) is None
    assert shared_amax((None, None), parts) == (None, None)
    assert shared_amax((x,), None) == (x,)


def largest_on_ranks(mesh):
    """Return largest values over ranks, of a tensor that is r - 3 on rank r."""
    parts = Parts(mesh.get_group().group_name, (True, True, True))
    x = torch.full((2, 2), float(mesh.get_local_rank() - 3))
    amax_of_rank = x.abs().amax().view(1, 1)
    return (
        scale_for(x, Cast(E4M3, PerTensor()), None, INPUT, parts).tolist(),
        scale_for(CastSource(x, "squared_relu"), Cast(E4M3, PerTensor()), None, INPUT, parts).tolist(),
        [None if amax is None else amax.item() for amax in shared_amax((amax_of_rank, None, amax_of_rank), parts)],
    )


def test_the_largest_of_all_ranks(pool):
    for scale, squared, amax in pool.run(largest_on_ranks, (2,)):
        assert scale == [torch.tensor(448.0).div(3).item()] * 3
        assert squared == [1.0] * 3  # of zeros
        assert amax == [3.0, None, 3.0]


def agreements(mesh, backend):
    """Return the scales that ranks agree on in each of three steps, of which the third follows a loss of history."""
    torch.compiler.reset()
    calls, plain = [], shared_scales.scale_of_whole
    model = parallel(Pair(32, 64, True), mesh, "delayed", True)
    if backend:
        model.compile(backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_scales, "scale_of_whole", lambda *how: calls.append(how[1]) or plain(*how))
        for _ in range(3):
            step(model, torch.randn(8, 32), torch.randn(8, 32))
            calls.append(None)
            if calls.count(None) == 2:
                model.up.reset_delayed_state()
    return calls


@pytest.mark.parametrize(
    "backend", ["", *(pytest.param(name, marks=pytest.mark.full) for name in ("aot_eager", "inductor"))]
)
def test_delayed_scales_are_agreed_on_where_there_are_none(pool, backend):
    """Ranks agree on delayed scales that do not exist: of up's weight and output, and of down's weight and input."""
    first = [WEIGHT, WEIGHT, INPUT, GRAD_OUTPUT, None]
    assert pool.run(agreements, (2,), backend, seconds=300) == [[*first, None, WEIGHT, GRAD_OUTPUT, None]] * 2


@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRAD_OUTPUT])
@pytest.mark.parametrize("history_length", [None, 2])
def test_both_casts_to_four_bits_read_one_amax_of_all_ranks(role, history_length, monkeypatch):
    amaxes = []
    monkeypatch.setattr(shared_scales, "maximum_over_ranks", lambda amax, group: amaxes.append(amax) or amax)
    recipe = recipes.nvfp4(history_length)
    parts = Parts("no group of this name", (True, True, True), scale_may_be_empty=True)
    layer = octavo.nn.Linear(32, 48, recipe=recipe)
    x = torch.randn(48, 32)
    shared = cast_role(x, CastRequest(recipe, role, True, True), layer.fp8.state, Rows(parts=parts))
    assert len(amaxes) == 1
    alone = cast_role(x, CastRequest(recipe, role, True, True), None)
    for (codes, scale_inv), expected in zip(shared[:2], alone[:2], strict=True):
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale_inv, expected[1])


@pytest.mark.parametrize(
    ("roles", "dim"), [((True, True, False), None), ((False, True, True), 1), ((True, False, True), 0)], ids=str
)
def test_ranks_round_their_parts_of_a_gradient_as_one_process_rounds_the_whole(roles, dim, monkeypatch):
    """Random bits are of an element's place in the whole, of which ranks have columns, rows, or all."""
    grad, request = torch.randn(64, 96), CastRequest(recipes.nvfp4(), GRAD_OUTPUT, True, True)
    monkeypatch.setattr(shared_scales, "maximum_over_ranks", lambda amax, group: grad.abs().amax().view(1, 1))
    expected = cast_role(grad, request, None)
    for rank, x in enumerate((grad, grad) if dim is None else grad.chunk(2, dim)):
        operands = cast_role(x, request, None, Rows(parts=Parts("no group of this name", roles, rank=rank)))
        dims = dim, {0: 1, 1: 0}.get(dim)  # as it lies, and transposed
        for pair, pair_of_whole, dim_of_pair in zip(operands[:2], expected[:2], dims, strict=True):
            for part, whole in zip(pair, pair_of_whole, strict=True):
                assert same_bits(part, whole if dim_of_pair is None else whole.chunk(2, dim_of_pair)[rank])
