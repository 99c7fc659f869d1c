import contextlib
import tempfile

import pytest
import torch

import octavo
from octavo import E4M3, Cast, Delayed, Dynamic, PerBlock, PerRow, PerTensor, Recipe, recipes
from octavo.autograd import casts as module
from octavo.autograd.casts import CastRequest, cast_and_commit, cast_role, cast_to_send
from octavo.autograd.gather_input import cast_norm
from octavo.autograd.rows import DENSE
from octavo.kernels.arguments import CastSource, NormSource
from octavo.scaling.delayed import State
from octavo.scaling.recipe import GRAD_OUTPUT, INPUT, RoleCasts
from octavo.tensor.pair import Operands
from octavo.weights.operands import fp8_pair
from tests.support.definitions import same_bits
from tests.support.helpers import FP8_RECIPES, CountOps, delayed_state


def test_only_what_is_asked_for_is_cast():
    x = torch.randn(8, 8)
    rowwise = recipes.rowwise()
    assert cast_role(x, CastRequest(rowwise, INPUT, False, False), None) == Operands()
    assert cast_role(x, CastRequest(rowwise, INPUT, True, False), None).transposed is None
    assert cast_role(x, CastRequest(rowwise, INPUT, False, True), None).as_is is None
    assert cast_role(x, CastRequest(recipes.high_precision(), INPUT, True, True), None) == Operands()
    for recipe, expected in ((recipes.dynamic(), {"cast": 1}), (rowwise, {"cast_two_scalings": 1})):
        with CountOps() as ops:
            cast_role(x, CastRequest(recipe, INPUT, True, True), None)
        assert ops.calls == expected  # x is read once


def mixed_recipe() -> Recipe:
    """Return a recipe with one Delayed cast of each role, the other not."""
    delayed, row = Cast(E4M3, PerTensor(), Delayed(2)), Cast(E4M3, PerRow(), Dynamic())
    return Recipe(output=(delayed, row), grad_input=(delayed, row), grad_weight=(row, row))


LAYOUTS = [(True, True), (True, False), (False, True)]  # whether a role is asked for as it is, and transposed
each_recipe = pytest.mark.parametrize("recipe", [*FP8_RECIPES.values(), mixed_recipe], ids=lambda make: make.__name__)


def on_both_devices(monkeypatch, call):
    """Return what ``call`` of a state gives where transposed codes are views and where they are laid; and the state."""
    results = []
    for lays in (False, True):
        monkeypatch.setattr(module, "needs_transposed_codes", lambda device, lays=lays: lays)
        state = State(torch.tensor([3.0, 5.0, 7.0]), torch.ones(3, 2), State.empty(2).before)
        results.append((call(state), state))
    (plain, state), (laid, its_state) = results
    assert all(map(torch.equal, state[:2], its_state[:2]))
    return plain, laid, state


def assert_same_operands(a: Operands, b: Operands, asked: tuple[bool, bool]) -> None:
    """Check that the layouts asked for have the same codes; others are there where they cost nothing."""
    for wanted, pair, other in zip(asked, a[:2], b[:2], strict=True):
        if wanted:
            assert all(map(same_bits, pair, other))
    for one, other in zip(a[2:4], b[2:4], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@each_recipe
@pytest.mark.parametrize("asked", LAYOUTS, ids=str)
@pytest.mark.parametrize("activated", [False, True])
def test_codes_are_the_same_where_transposed_ones_are_laid(recipe, asked, activated, monkeypatch):
    x, recipe = torch.randn(48, 32), recipe()
    source, request = CastSource(x, "gelu_tanh") if activated else x, CastRequest(recipe, INPUT, *asked)
    plain, laid, _ = on_both_devices(monkeypatch, lambda state: cast_role(source, request, state))
    assert_same_operands(plain, laid, asked)
    taken = [cast for wanted, cast in zip(asked, recipe.input_casts[:2], strict=True) if wanted]
    assert (plain.amax is None) == (not any(isinstance(cast.rule, Delayed) for cast in taken))


@each_recipe
@pytest.mark.parametrize("asked", LAYOUTS, ids=str)
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("column_sum", [False, True])
def test_gradients_commit_and_find_sums_once(recipe, asked, activated, column_sum, monkeypatch):
    grad, recipe = torch.randn(48, 32), recipe()
    source = CastSource(grad, "gelu_tanh", torch.randn(48, 32)) if activated else grad
    request, amaxes = CastRequest(recipe, GRAD_OUTPUT, *asked, column_sum), (torch.full((1, 1), 2.0), None)
    plain, laid, state = on_both_devices(
        monkeypatch, lambda state: cast_and_commit(source, request, state, amaxes, DENSE)
    )
    if recipe.delayed is None:
        return
    assert_same_operands(plain, laid._replace(column_sum=plain.column_sum), asked)
    if asked[0]:  # else a cast may not read the gradient as it lies
        assert all((one.column_sum is not None) == column_sum for one in (plain, laid))
    assert state.amax_history[0].tolist() == [2.0, 1.0] and state.amax_history[1].tolist() == [1.0, 1.0]


@each_recipe
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_norm_casts_as_its_result_is_cast(recipe, transposed, keep, monkeypatch):
    x, gamma, recipe = torch.randn(48, 32), torch.rand(32) + 0.5, recipe()
    norm = NormSource(x, gamma, None, "rms_norm", 1e-5, False)
    plain, laid, _ = on_both_devices(
        monkeypatch, lambda state: cast_norm(norm, recipe, state, needs_dw=transposed, keep=keep)
    )
    assert_same_operands(plain, laid, (True, transposed))
    state = State(torch.tensor([3.0, 5.0, 7.0]), torch.ones(3, 2), State.empty(2).before)
    y = cast_norm(norm, recipe, state, needs_dw=transposed, keep=True).norm.y
    assert_same_operands(plain, cast_role(y, CastRequest(recipe, INPUT, True, transposed), state), (True, transposed))
    assert (plain.norm.y is not None and plain.norm.y.numel() > 0) == keep


def test_one_op_reads_a_gradient_or_makes_a_norm():
    x, amax = torch.randn(48, 32), (torch.ones(1, 1), None)
    recipe = recipes.delayed()
    for asked in LAYOUTS:
        with CountOps() as ops:
            cast_and_commit(x, CastRequest(recipe, GRAD_OUTPUT, *asked), delayed_state(recipe), amax, DENSE)
        assert ops.calls == {"cast_and_commit": 1}
    for recipe, op in ((recipes.dynamic(), "norm_cast"), (recipes.rowwise(), "norm_cast_two_scalings")):
        with CountOps() as ops:
            norm = NormSource(x, torch.ones(32), None, "rms_norm", 1e-5, False)
            cast_norm(norm, recipe, None, needs_dw=True, keep=False)
        assert ops.calls == {op: 1}


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_codes_serve_every_product_of_a_recipe(name):
    for casts in (FP8_RECIPES[name]().input_casts, FP8_RECIPES[name]().grad_output_casts):
        assert cast_to_send(casts, True, True) is casts.as_is
        assert cast_to_send(casts, True, True, exact=True) is (casts.as_is if casts.coincide else None)


def test_what_is_sent_in_high_precision():
    per_tensor, rows = Cast(E4M3, PerTensor()), Cast(E4M3, PerRow())
    square = Cast(E4M3, PerBlock(16, 16))
    delayed = recipes.delayed().input_casts.as_is
    for casts, reads, expected in (
        (RoleCasts(rows, None, False), (True, True), None),  # grad_weight reads it in high precision
        (RoleCasts(rows, None, False), (True, False), rows),
        (RoleCasts(None, per_tensor, False), (True, True), None),
        (RoleCasts(square, square, True), (True, True), None),  # its blocks have rows of several ranks
        (RoleCasts(rows, delayed, False), (True, True), None),
        (RoleCasts(rows, per_tensor, False), (True, True), rows),
        (RoleCasts(per_tensor, per_tensor, True), (False, False), None),
    ):
        assert cast_to_send(casts, *reads) is expected


@pytest.mark.parametrize(
    ("lays", "compiles"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.full)]
)
def test_swizzled_scales_change_nothing(lays, compiles, monkeypatch, tmp_path):
    """A pass of mx() where the device's products read scales so, eager and recorded, or compiled."""
    monkeypatch.setattr(module, "needs_transposed_codes", lambda device: lays)
    asked = []
    cast = module.kernels.cast

    def noting(*args, **named):
        asked.append(named.get("swizzle", False))
        return cast(*args, **named)

    def one_pass(tokens, compiled=False):
        torch.manual_seed(0)
        how = {"bias": False, "recipe": recipes.mx(), "dtype": torch.bfloat16}
        model = torch.nn.Sequential(octavo.nn.RMSNormMLP(64, 96, "swiglu", **how), octavo.nn.Linear(64, 32, **how))
        x = torch.randn(tokens, 64).bfloat16().requires_grad_()
        with contextlib.ExitStack() as stack:
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            if not compiled:
                stack.enter_context(octavo.inspect.record(model, tempfile.mkdtemp(dir=tmp_path), every=1))
            call(x).sum().backward()
        scales = [fp8_pair(layer, True)[1] for layer in (model[0].fc2, model[1])]
        return [*(p.grad for p in model.parameters()), x.grad, *scales]

    expected = {tokens: one_pass(tokens) for tokens in (64, 40)}
    monkeypatch.setattr(module, "reads_swizzled", lambda device: True)
    for tokens, compiled in ((64, False), (40, False), *[(64, True)] * compiles):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(module.kernels, "cast", noting)
            assert all(map(same_bits, one_pass(tokens, compiled), expected[tokens]))
    assert asked.count(True) == 11 + 5 and asked.count(False) == 6  # of rows by 32, and what is the weights' of 40 rows
