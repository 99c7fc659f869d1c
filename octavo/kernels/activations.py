"""The activations that casts can compute on their way: a cast rounds activation(h), or its gradient.

    plain   y [R, C] = f(h),  h [R, C]                  dh = dy . f'(h)
    gated   y [R, C] = f(gate) . up,  h [R, 2C] = (gate | up)
                                                        dh [R, 2C] = (dy . up . f'(gate) | dy . f(gate))

f by name, in float32; sigmoid is s, the normal distribution's function Phi and density phi:

    relu            h where h > 0, else 0
    squared_relu    relu(h)^2                           So et al., arXiv 2109.08668
    silu            h s(h)                              Elfwing et al., arXiv 1702.03118
    quick_gelu      h s(1.702 h)                        Hendrycks and Gimpel, arXiv 1606.08415
    gelu            h Phi(h), torch.nn.GELU()           the same
    gelu_tanh       h (1 + tanh(u)) / 2 = h s(2u), u = sqrt(2 / pi) (h + 0.044715 h^3)

Gated ones (Shazeer, arXiv 2002.05202): swiglu, geglu, geglu_tanh, reglu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Activation(NamedTuple):
    """An activation: its function, and whether that is taken of a gate that multiplies ``up``."""

    function: str
    gated: bool


_PLAIN = ("relu", "squared_relu", "silu", "quick_gelu", "gelu", "gelu_tanh")  # named as their functions
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}  # {activation: its function}
ACTIVATIONS = {name: Activation(name, False) for name in _PLAIN}
ACTIVATIONS |= {name: Activation(function, True) for name, function in _GATED.items()}

# functions by the names of their classes in torch and transformers (its activations.py); torch's GELU is two functions
FUNCTIONS_OF_CLASSES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "squared_relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
}


def activation_of(name: str) -> Activation:
    """Return the activation of this name.

    Raises:
        ValueError: for another name, listing those there are.

    Example:
        >>> activation_of("swiglu")
        Activation(function='silu', gated=True)
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r}: use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def cast_shape(
    x: Sequence[int], activation: str = "", preactivation: Sequence[int] | None = None, has_scale_inv: bool = False
) -> tuple[int, int]:
    """Return the shape [R, C] of the values that a cast rounds.

    Args:
        x: shape of the tensor it reads.
        activation: a name, or "" where x itself is cast.
        preactivation: shape of the activation's input, where x is the gradient of its output.
        has_scale_inv: whether a scale_inv of the activation's input is given.

    Raises:
        ValueError: for an unknown activation, shapes that don't fit it, or an activation's argument without its name.

    Example:
        >>> cast_shape((4, 32), "swiglu"), cast_shape((4, 16), "swiglu", (4, 32))
        ((4, 16), (4, 32))
    """
    rows, cols = x
    if not activation:
        if preactivation is not None or has_scale_inv:
            argument = "h_scale_inv" if preactivation is None else "preactivation"
            raise ValueError(f"{argument} is given without the name of its activation")
        return rows, cols
    gated = activation_of(activation).gated
    if preactivation is not None:
        width = 2 * cols if gated else cols
        if tuple(preactivation) != (rows, width):
            raise ValueError(
                f"a gradient of shape [{rows}, {cols}] belongs to an input of {activation} of shape "
                f"[{rows}, {width}], not {list(preactivation)}"
            )
        return rows, width
    if gated and cols % 2:
        raise ValueError(f"{activation} takes (gate | up), an even number of columns, not {cols}")
    return rows, cols // 2 if gated else cols
