import re
from pathlib import Path

import pytest
import torch

from octavo.kernels import activations, reference
from octavo.kernels.activations import ACTIVATIONS, FUNCTIONS_OF_CLASSES, Activation, activation_of, cast_shape
from octavo.kernels.reference.activation import FUNCTIONS
from octavo.nn.fused import LayerNormMLP
from tests.kernels.conftest import Ops
from tests.support.casts import each_value
from tests.support.exact_activation import EXACT, GATED, PLAIN, exact, exact_gradient


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_implementation_has_each(ops: Ops, name: str) -> None:
    h = torch.randn(6, 8) * 3
    dy = torch.rand(6, 4 if name in GATED else 8) - 0.5
    for values, truth in (
        (each_value(ops.of("cast"), h, name), exact(h.double(), name)),
        (each_value(ops.of("cast"), dy, name, h), exact_gradient(dy, h, name)),
    ):
        torch.testing.assert_close(values.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_in_the_operations_of_torch_too(name: str) -> None:
    h = torch.randn(200) * 3
    before = h.clone()
    values, with_slope = FUNCTIONS[name].in_float32(h), FUNCTIONS[name].with_slope(h)[0]
    assert torch.equal(h, before) and torch.equal(values, with_slope)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        h, dy = torch.randn(200, dtype=dtype) * 3, torch.rand(200, dtype=dtype) - 0.5
        results = FUNCTIONS[name].value(h).double(), FUNCTIONS[name].gradient(dy, h).double()
        truth = exact(h.double(), name), exact_gradient(dy, h, name)
        torch.testing.assert_close(results, truth, rtol=tolerance, atol=tolerance)


def test_tables_and_pages_name_each() -> None:
    functions = {each.function for each in ACTIVATIONS.values()}
    assert functions == {*FUNCTIONS} >= {*FUNCTIONS_OF_CLASSES.values()}
    page = (Path(__file__).parents[2] / "docs/modules.md").read_text(encoding="utf-8")
    assert [name for name in ACTIVATIONS if f"`{name}`" not in page] == [], "docs/modules.md names each"
    of_fused = LayerNormMLP.__doc__ or ""
    assert [name for name in ACTIVATIONS if f'"{name}"' not in of_fused] == [], "nn/fused.py: LayerNormMLP's docstring"
    in_docstring = {*re.findall(r"\w+", activations.__doc__ or "")}
    assert functions - in_docstring == set(), "the docstring of kernels/activations.py defines each"


def test_those_of_the_same_bits_are_listed(ops: Ops) -> None:
    h, dy = torch.randn(64, 64) * 3, torch.rand(64, 64) - 0.5

    def has_bits_of_the_reference(name: str) -> bool:
        casts = ops.of("cast"), reference.KERNELS["cast"]
        dy_of_name = dy[:, :32].contiguous() if name in GATED else dy
        values, gradients = ([each_value(cast, *x) for cast in casts] for x in ((h, name), (dy_of_name, name, h)))
        return torch.equal(*values) and torch.equal(*gradients)

    same = {name for name in ACTIVATIONS if has_bits_of_the_reference(name)}
    listed = EXACT - {""} if ops.name == "Triton" else {*ACTIVATIONS}
    assert same == listed, "tests/support/exact_activation.py: EXACT lists those of the same bits"


def test_a_function_without_a_branch_is_no_other(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "nothing", Activation("nothing", gated=False))
    h = torch.randn(4, 4)
    for tensors in ((h, "nothing"), (h, "nothing", h)):
        with pytest.raises(Exception, match=r"nothing|no function of this name"):
            each_value(ops.of("cast"), *tensors)


def test_names() -> None:
    assert {*ACTIVATIONS} == {*PLAIN, *GATED}
    assert all(activation_of(name) == Activation(name, gated=False) for name in PLAIN)
    assert all(activation_of(name) == Activation(function, gated=True) for name, function in GATED.items())

    for name in ("", "SwiGLU", "swish", "silu "):
        with pytest.raises(ValueError, match=re.escape(f"activation={name!r}: use one of {', '.join(ACTIVATIONS)}")):
            activation_of(name)


@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("cols", [0, 2, 34])
def test_cast_shape(rows: int, cols: int) -> None:
    assert cast_shape((rows, cols)) == (rows, cols)
    for name in PLAIN:
        assert cast_shape((rows, cols), name) == (rows, cols)
        assert cast_shape((rows, cols), name, (rows, cols)) == (rows, cols)
    for name in GATED:
        assert cast_shape((rows, 2 * cols), name) == (rows, cols)
        assert cast_shape((rows, cols), name, (rows, 2 * cols)) == (rows, 2 * cols)


def test_an_odd_width_has_no_halves() -> None:
    for name in GATED:
        with pytest.raises(ValueError, match=rf"{name} takes \(gate \| up\), an even number of columns, not 7"):
            cast_shape((4, 7), name)
        assert cast_shape((4, 7), name, (4, 14)) == (4, 14)
    assert cast_shape((4, 7), "silu") == cast_shape((4, 7), "silu", (4, 7)) == (4, 7)


def test_what_has_no_shape_is_refused() -> None:
    belongs = "a gradient of shape [4, 6] belongs to an input of"
    for name, preactivation, said in (
        ("silu", (4, 13), f"{belongs} silu of shape [4, 6], not [4, 13]"),
        ("swiglu", (4, 6), f"{belongs} swiglu of shape [4, 12], not [4, 6]"),
        ("swiglu", (3, 12), f"{belongs} swiglu of shape [4, 12], not [3, 12]"),
        ("glu", None, "activation='glu': use one of relu, "),
        ("glu", (4, 6), "activation='glu': use one of relu, "),
        ("", (4, 6), "preactivation is given without the name of its activation"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            cast_shape((4, 6), name, preactivation)
