import re

import pytest

from octavo.kernels.activations import ACTIVATIONS, Activation, activation_of, cast_shape

PLAIN = ["relu", "squared_relu", "silu", "quick_gelu", "gelu", "gelu_tanh"]
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


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
