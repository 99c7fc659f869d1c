"""Every op once: its schema, its fake implementation (shapes and dtypes for the compiler), its contract.

The reference in reference/ is the definition on every device; a faster kernel must agree with it bit for bit on codes
and scale_inv. Ops take and return plain tensors. They have no gradient: autograd/ writes those.

Arguments that mean the same everywhere:

    x              [R, C] bf16, fp16 or fp32, any strides, any sizes including 0
    dtype          the codes' dtype: torch.float8_e4m3fn, torch.float8_e5m2, or torch.float4_e2m1fn_x2, which is NVFP4:
                   reference/nvfp4.py. Two of its codes lie in a byte, along the contraction: qdata is [R, C' / 2],
                   transposed [C, R' / 2], pad is 16 and the tile 1x16, 16x1 (transposed codes alone) or 16x16.
                   scale_inv is bf16, amax [1, 1] that of all of x, of which a delayed scale is the outer one
    rotation       of E2M1: the signs of the matrix by which each 16 elements along the contraction are multiplied
                   before the cast, see reference/nvfp4.rotated; codes of the padding are then not 0
    seed           of E2M1: rounded stochastically, by random bits of this seed; None: to nearest
    place          the row and column, in a matrix of which x may be a part, of x's first element, for random bits
    tile           (rows, columns) of x that share a scale; -1 is the whole dimension (granularity.py)
    power_of_two, margin      how numerics.scale_from_amax makes a scale
    delayed_scale  [3] fp32: the delayed scales of (input, weight, grad_output), 0 where there is no history yet, or
                   None for Dynamic; the op reads element ``role``. With one, tile is (-1, -1); with none or 0, the
                   scale is that of this tensor's own amax
    qdata          codes, contiguous [R, C']; ``transposed`` ones are contiguous [C, R']. C' and R' are C and R rounded
                   up to a multiple of ``pad`` (1 to PADDING, a power of two), the codes beyond are 0: torch's FP8
                   product needs a multiple of 16. Where pad > 1, that dimension's tile is -1 or a multiple of pad
    sums           [C] of x's dtype (fp32 if that is codes): the sum of each column, in float32 and rounded once; [0]
                   without ``column_sum``
    scale_inv      fp32, or E8M0 as numerics.scale_inv_dtype says; what is read may be either. Of the shape that
                   granularity.scale_shape of what is cast is, always written; contiguous, but where its tile, as the
                   codes lie, is a part of a row: there its transpose is contiguous
    amax           fp32, shape and strides of scale_inv: largest absolute finite value of what is cast, unscaled
    activation     "" where x itself is cast. Else a name of activations.py: activation(x) is cast, computed in float32
                   and not rounded before; [R, C] of the above is its shape
    preactivation  given, x is the gradient of activation's output, and that of its input, preactivation, is cast
    h_scale_inv    given, the activation's input (x, or preactivation) is codes, and this their scale_inv of ``h_tile``
    k, v, cos, sin given, x is q, and gradients of heads are cast, turned back and rounded to their dtype: [R, C] is
                   [B S, all heads x D] of the result of the op ``rotary`` of these, inverse
    kind           "layer_norm" or "rms_norm", computed in float32 over rows of x; reference/norm.py has the formulas.
                   gamma and beta are [C]
    mean, rstd     [R] fp32, a norm's row statistics; mean is [0] for rms_norm
    keep           a norm returns y too, rounded to x's dtype; else [0, 0]. Another cast with one scale, whose tile is
                   (-1, -1), returns that too after the sums, fp32 [1]
    recast_scale    [1] fp32: where an activation's gradient is cast by one scale, the activation, computed again from
                   preactivation, is cast by this one too: its codes of recast_dtype, as they lie or, with
                   recast_transposed, transposed, are the last result
    offsets        [G] int32: x's rows are in groups, which are matrices of their own (groups.py says where their codes
                   and scales lie). Offsets that descend or go beyond the rows raise ValueError where the reference
                   runs; Triton's kernels, whose host does not wait for their values, then take all groups to have no
                   rows, and products are NaN

Three more ops are custom_ops in autograd/: grouped_mm (grouped.py), first_scale (shared_scales.py) and join_scales
(linear_cross_entropy.py).

Ops are registered by torch.library.Library rather than by the custom_op decorator: 4 us against 17 us a call in eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.granularity import NV
from octavo.kernels.arguments import (
    Castable,
    Commit,
    GroupedOperands,
    NormGradient,
    Output,
    ProductArguments,
    Scaling,
    new_cast,
    new_losses,
    new_norm,
    new_rotary,
    new_scales,
    no_codes,
    unpacking,
)
from octavo.kernels.cpu import KERNELS
from octavo.kernels.devices import ON_CUDA
from octavo.kernels.layouts import unpacked_shape
from octavo.private import let_inductor_call, tell_torch_of_products

_SECOND = (
    "ScalarType? second_dtype=None, int[2] second_tile=[-1, -1], bool second_power_of_two=False, int second_margin=0, "
    "bool swizzle=False, int? rotation=None, int? seed=None, int? second_rotation=None, int? second_seed=None, "
    "int[2] place=[0, 0]"
)
_EXTRAS = (
    'int pad=1, bool column_sum=False, str activation="", Tensor? preactivation=None, Tensor? h_scale_inv=None, '
    "int[2] h_tile=[-1, -1]"
)
_HEADS = "Tensor? k=None, Tensor? v=None, Tensor? cos=None, Tensor? sin=None"
_RECAST = "Tensor? recast_scale=None, ScalarType? recast_dtype=None, bool recast_transposed=False"
_NORM = 'str kind="", Tensor? gamma=None, Tensor? beta=None, float eps=0.0, bool zero_centered=False, bool keep=False'
_OPERANDS = "Tensor a, Tensor a_scale_inv, int[2] a_tile, Tensor b, Tensor b_scale_inv, int[2] b_tile"
_LOSS = "Tensor logits, Tensor target, int ignore_index, float label_smoothing, float softcap"
_STATE = "Tensor(a!) delayed_scale, Tensor(b!) delayed_amax_history, Tensor(c!) delayed_before"
_UPDATE = "float[3] limits, bool[3] powers_of_two, int[3] margins, str reduce"

SCHEMAS = {
    # amax of each tile
    "amax": "(Tensor x, int[2] tile) -> Tensor",
    # what is cast                   results 0, 1                   2, 3                          4 and on
    # x, a function of it or heads,  qdata, transposed              scale_inv, amax               sums, then the scale
    #   by one scaling                                                                            (keep), recast's codes
    # the same by two, Dynamic       qdata, second qdata            scale_inv, second scale_inv   sums
    # a norm (gamma)                 as above, by one or by two     as above                      mean, rstd, y
    # rows in groups (offsets),      qdata, transposed [C, Rp]      scale_inv, amax               none
    #   each group by itself
    # Codes that are not asked for are [0, 0]. The transposed pair's scale_inv is scale_inv.t().
    # two: with a second_dtype, from one read. second_tile is a tile of x; transpose writes the second pair's tensors
    # alone transposed.
    # offsets: A delayed scale is one for all groups; where it is 0, a group's is that of its own amax. Codes of rows
    # that are in no group are 0; scales that no group has are 1, their amaxes 0. pad: of C and, transposed, of each
    # group's rows; as_is=False leaves out the codes as they lie.
    # swizzle: each scaling's scale_inv, E8M0 of 1x32 or 32x1 blocks, has one dimension, as layouts.swizzled makes it of
    # an operand's, contraction last. matmul, dequantize and cast_statistics read either
    "cast": "(Tensor x, Tensor? delayed_scale, int role, ScalarType dtype, int[2] tile, bool power_of_two, int margin, "
    f"bool transpose=False, {_EXTRAS}, *, {_HEADS}, {_NORM}, "
    f"Tensor? offsets=None, bool as_is=True, {_SECOND}, {_RECAST}) -> Tensor[]",
    # the delayed cast of grad_output by its scales_of_pass, and delayed_update with the amax it finds: (qdata,
    # transposed qdata or [0, 0], scale_inv, sums, the recast's codes or [0, 0])
    "cast_and_commit": f"(Tensor x, {_STATE}, Tensor? amax_input, Tensor? amax_weight, "
    f"ScalarType dtype, bool power_of_two, int margin, {_UPDATE}, bool transpose, {_EXTRAS}, *, {_HEADS}, {_RECAST}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # of logits [T, V] of any strides and target [T] int64, the number of the column that is right: (each row's loss,
    # the logarithm of the sum of its exponentials), float32, as reference/cross_entropy.py says; softcap 0: none
    "cross_entropy": f"({_LOSS}) -> (Tensor, Tensor)",
    # the gradient of logits [T, V], of their dtype, by that of each row's loss, grad [T], and the lse of the op above
    "cross_entropy_backward": f"({_LOSS}, Tensor lse, Tensor grad) -> Tensor",
    # the same gradient by grads of 1, which lies in [-1, 1], cast by numerics.scale_of_unit: to codes [T, V'] as it
    # lies, and transposed to the columns from ``first`` on of transposed [V, T']; [0, 0] is left out. What is behind
    # them, up to V' and T', is padding: 0. Before ``first`` are other rows' codes; transposed has any row stride
    "cross_entropy_codes": f"({_LOSS}, Tensor lse, Tensor(a!) codes, Tensor(b!) transposed, int first) -> ()",
    # add what the cast of x [R, C] into qdata [R, C'] did to sums [71] and extremes [3]; reference/cast_statistics.py
    # says what they hold. x, qdata and scale_inv have any strides. Rows in groups, which end at offsets [G]: sums
    # [G, 71] and extremes [G, 3], dense, and scale_inv as cast returned it for x
    "cast_statistics": "(Tensor x, Tensor qdata, Tensor scale_inv, int[2] tile, Tensor(a!) sums, "
    "Tensor(b!) extremes, Tensor? offsets=None) -> ()",
    # for each role whose amax is given, the first time after an optimizer's step: history <- (amax, history[:-1]);
    # later in the step the newest of the history is raised to the amax. delayed_before [3, 3] int32 <- (the number of
    # the backward pass, the bits of the scale before this pass, the number of the pass that rolled).
    # Then scale <- that of the largest of the history, or of its
    # newest ("most_recent"); an amax of 0 keeps the scale. limits, powers_of_two, margins: one a role
    "delayed_update": f"({_STATE}, Tensor? amax_input, Tensor? amax_weight, Tensor? amax_grad_output, {_UPDATE}) -> ()",
    # how many rows of a product's operand [R, C'], codes or numbers, have faults, by its result y [R, C]: added to
    # faults [4], as reference/cast_statistics.py says, with the operand's scales, dense, and its amax [1]. The first
    # fault leaves its place [1] in first [1], int32 and 0 before; of rows in groups, which end at offsets [G], its
    # place and the group's number added up. Scales of groups without rows, one a group, are left out
    "note_faults": "(Tensor y, Tensor operand, Tensor? scale_inv, Tensor? amax, Tensor place, Tensor(a!) faults, "
    "Tensor(b!) first, Tensor? offsets=None) -> ()",
    # q, k, v [B, S, heads, D], D even, of one dtype and any strides: q and k turned by rotary angles, and v as it is,
    # beside each other: [B, S, all heads x D]; inverse: turned back. cos and sin are [1 or B, S, D], or [.., D / 2]
    # where both halves of a head have the same
    "rotary": "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    # the scales [3] that were in force when the backward pass that is under way began
    "scales_of_pass": "(Tensor delayed_scale, Tensor delayed_before) -> Tensor",
    # qdata x scale_inv, rounded once from float32 to dtype
    "dequantize": "(Tensor qdata, Tensor scale_inv, int[2] tile, ScalarType dtype) -> Tensor",
    # a [M, K] . b^T, b [N, K], any strides -> [M, N] out_dtype, contiguous; fp32 accumulation. tiles are of a and b as
    # laid here: contraction last. bias [N], of any stride, in bf16 where the result is, is added to each row before the
    # one rounding. fast_accum permits the tensor cores' shorter accumulator
    "matmul": f"({_OPERANDS}, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    # a cast of each of xs, of one dtype and contiguous rows, in one launch (Dynamic per tensor: two), into
    # qdata[i] [R, C'], transposed[i] [C, R'] (or none at all), scale_inv[i], amax[i]; delayed_scales none for Dynamic.
    # tile: (-1, -1) or a block of powers of two up to 128. All outputs are contiguous, scale_inv and amax by rows
    # whatever the tile, with room for more rows or none. Where skip [1] is not 0 nothing is written: a weight that did
    # not change, in a CUDA graph
    "multi_tensor_cast": "(Tensor[] xs, Tensor(a!)[] qdata, Tensor(b!)[] transposed, Tensor(c!)[] scale_inv, "
    "Tensor(d!)[] amax, Tensor[] delayed_scales, int role, int[2] tile, bool power_of_two, int margin, "
    "Tensor? skip=None) -> ()",
    # each group's own product, contiguous. Of b [G, N, K]: rows of a [R, K] are in groups -> [R, N], rows in no group
    # 0; a's scale_inv is as cast returns it, b's [G, ., .]; bias [G, N]. Of b [K, Rp]: the columns of a [N, Rp]
    # and b are in groups of the sizes that offsets give, each padded to a multiple of pad -> [G, N, K], 0 of a group
    # without rows; both scale_inv are .t() of what cast returns. Codes have any strides; the rest as of matmul
    "grouped_matmul": f"({_OPERANDS}, Tensor offsets, Tensor? bias, ScalarType out_dtype, bool fast_accum, int pad=1) "
    "-> Tensor",
    # a norm of x, or of x + residual [R, C]: (y of x's dtype, mean, rstd, the sum rounded to x's dtype or [0, 0])
    "norm": "(Tensor x, Tensor gamma, Tensor? beta, str kind, float eps, bool zero_centered, Tensor? residual=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    # (dx [R, C] of x's dtype, dgamma [C], dbeta [C] or [0] of gamma's); residual [R, C] is added to dx before it is
    # rounded
    "norm_backward": "(Tensor dy, Tensor x, Tensor gamma, Tensor mean, Tensor rstd, str kind, bool zero_centered, "
    "bool with_beta, Tensor? residual=None) -> (Tensor, Tensor, Tensor)",
}


def _fake_cast_and_commit(source: Castable, scaling: Scaling, commit: Commit, output: Output) -> tuple[Tensor, ...]:
    """Return the op's results, unwritten."""
    q, t, scale_inv, _, sums, *recast_codes = new_cast(source, scaling, None, output)
    return q, t, scale_inv, sums, *(recast_codes or [no_codes(q, q.dtype)])


def _fake_matmul(operands: ProductArguments | GroupedOperands, out_dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return the product, unwritten."""
    return operands.a.codes.new_empty(operands.shape, dtype=out_dtype)


def _fake_norm_backward(gradient: NormGradient) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dgamma, dbeta), unwritten."""
    x, gamma = gradient.x, gradient.gamma
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(len(gamma) if gradient.with_beta else 0)


FAKES: dict[str, Callable[..., Any]] = unpacking(
    {
        "amax": lambda x, tile: new_scales(x, x.shape, (tile[0], tile[1])),
        "cast": new_cast,
        "cast_and_commit": _fake_cast_and_commit,
        "cross_entropy": new_losses,
        "cross_entropy_backward": lambda rows, lse, grad: rows.logits.new_empty(rows.logits.shape),
        "rotary": new_rotary,
        "scales_of_pass": lambda delayed_scale, delayed_before: torch.empty_like(delayed_scale),
        "dequantize": lambda q, scale_inv, tile, dtype: q.new_empty(unpacked_shape(q.shape, q.dtype), dtype=dtype),
        "grouped_matmul": _fake_matmul,
        "matmul": _fake_matmul,
        "norm": new_norm,
        "norm_backward": _fake_norm_backward,
        **{name: lambda *_: None for name, schema in SCHEMAS.items() if schema.endswith("-> ()")},
    }
)

LIBRARY = torch.library.Library("octavo", "DEF")
# the functions of octavo/kernels/__init__.py that Inductor's Python calls in place of an op
DIRECT = {f"torch.ops.octavo.{name}.default": f"torch.ops.octavo.direct.{name}" for name in SCHEMAS}


def _fake(name: str) -> Callable[..., Any]:
    """Return an op's fake, which also tells Inductor's Python to call the kernels in place of ops."""
    fake_kernel = FAKES[name]

    @functools.wraps(fake_kernel)
    def fake(*arguments: Any, **named: Any) -> Any:
        let_inductor_call(DIRECT)  # a tracer that will compile has imported Inductor
        return fake_kernel(*arguments, **named)

    return fake


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.needs_exact_strides,))
    # without gradients: a program of torch.export runs them on weights that require some; its backward warns
    LIBRARY.impl(_name, torch.no_grad()(KERNELS[_name]), "CompositeExplicitAutograd")
    LIBRARY.impl(_name, ON_CUDA[_name], "CUDA")
    torch.library.register_fake(f"octavo::{_name}", _fake(_name), lib=LIBRARY)


def _matmul_flop(
    a: Sequence[int], a_scale_inv: Sequence[int], a_tile: Sequence[int], b: Sequence[int], *_: object, **__: object
) -> int:
    """Return the FLOPs of ``matmul`` by its operands' shapes, of whose contraction the padding counts too."""
    terms = a_scale_inv[1] * NV[1] if a_tile[1] == NV[1] else a[1]  # two of E2M1's codes lie in a byte
    return 2 * a[0] * b[0] * terms


def _grouped_matmul_flop(*operands: Any, pad: int = 1, out_shape: object = None) -> int:
    """Return the FLOPs of ``grouped_matmul`` by its operands' shapes, as if all rows were in groups."""
    a, _, _, b, _, _, offsets, _, _, _, *pad_by_position = operands
    if len(b) == 3:
        return 2 * a[0] * a[1] * b[1]
    pad = pad_by_position[0] if pad_by_position else pad
    rows = a[1] - (offsets[0] * pad if pad > 1 else 0)  # groups.padded_columns: each group may add up to ``pad``
    return 2 * a[0] * b[0] * rows


tell_torch_of_products({torch.ops.octavo.matmul: _matmul_flop, torch.ops.octavo.grouped_matmul: _grouped_matmul_flop})
