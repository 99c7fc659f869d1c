"""The casts, norms, products and AdamW steps that are timed: how each is called, and whether its results are right.

``octavo tune`` times those of _TUNED_BY, by which it chooses configurations; tests and benchmarks take all.

A case makes its arguments for a shape: [R, C] of the tensor that is cast, (M, N, K) of a product [M, K] . [N, K]^T.
They go to the Triton kernel and to the reference. The bytes of a case are the least that it must move: its inputs once
(twice if the scale first needs an amax of the whole tensor) and each of its outputs once. All numbers come from a seed.

Products are named by the operands' blocks: delayed and dynamic have tensor . tensor, rowwise has rows . rows, blockwise
has 1x128 . 128x128 for output and grad_input and 1x128 . 1x128 for grad_weight, mx has 1x32 . 1x32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import formats
from octavo.granularity import ALL, BLOCK, MX, PADDING, Tile
from octavo.kernels.activations import activation_of
from octavo.kernels.arguments import unpacking
from octavo.kernels.layouts import blocks_in_row
from octavo.kernels.reference import KERNELS as REFERENCE
from octavo.kernels.reference.norm import normalise
from octavo.kernels.reference.optimizer_state import Fp8Weight, Master, MasterWeight, MomentTensors
from octavo.kernels.reference.optimizer_step import AdamGroup, BitNumbers, WeightUpdate
from octavo.kernels.reference.optimizer_step import optimizer_step as reference_step
from octavo.kernels.triton import KERNELS as TRITON
from octavo.kernels.triton import optimizer_step
from octavo.kernels.triton.agreement import difference, same_state, sqnr
from octavo.kernels.triton.delayed_update import committed
from octavo.kernels.triton.launch import LARGE, config
from octavo.kernels.triton.library_matmul import library_matmul
from octavo.kernels.triton.matmul import triton_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROWS, COLUMNS = (ALL, ALL), (1, ALL), (ALL, 1)
VECTOR, TALL, SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
MX_TALL = MX[::-1]
UPDATE = ([448.0, 448.0, 57344.0], [False] * 3, [0] * 3, "max")
SCALE, FUSED_SCALE = 64.0, 16.0  # for normal numbers, and for their products: nothing saturates
EPS = 1e-5
ADAM = AdamGroup(1e-3, 0.9, 0.999, 1e-8, 0.01, False, True, True)
LEAST_SQNR = 35.0  # dB of a product in bf16, whose rounding alone gives 50; fast accumulation costs some

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Shape = tuple[int, ...]
Inputs = Callable[[Shape], tuple[Any, ...]]


class CastOp(NamedTuple):
    """A cast's op, and its arguments by position, from the scale on; all that follow go by name."""

    name: str
    scaling: Callable[[], tuple[Any, ...]]


def normal(shape: Shape, seed: int = 0) -> Tensor:
    """Return normal numbers, bf16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)


def _x_alone(shape: Shape) -> tuple[Tensor, ...]:
    """Return the input of an op that reads one tensor."""
    return (normal(shape),)


class Case(NamedTuple):
    """An op of the kernels' table; ``inputs`` makes what it reads for a shape, ``arguments`` its arguments from that.

    The last argument may be Named.
    """

    op: str
    arguments: Callable[..., tuple[Any, ...]]
    reads: int = 1  # how many times it reads its inputs
    inputs: Inputs = _x_alone
    exact: bool = True  # its codes are the reference's; else it may round differently before the cast
    product: tuple[Any, ...] = ()  # if it is one: both operands' blocks, and fast_accum

    def call_of(self, shape: Shape) -> Callable[[], Any]:
        """Return a call of the case's kernel."""
        bound = partial(call, KERNELS[self.op], self.arguments(*self.inputs(shape)))
        _synchronize()  # until the scales have arrived on the host
        return bound

    def wrong(self, shape: Shape) -> str:
        """Return how the kernel differs from its reference more than the definition permits; "" if it does not.

        A product is held against the same pairs multiplied in float32.
        """
        arguments, expected_arguments = (self.arguments(*self.inputs(shape)) for _ in range(2))
        _synchronize()
        results = call(KERNELS[self.op], arguments)
        if self.product:
            a, b = (REFERENCE["dequantize"](*pair, torch.float32) for pair in (arguments[:3], arguments[3:6]))
            quality = sqnr(results.float(), a @ b.t())
            return "" if quality > LEAST_SQNR else f"{quality:.1f} dB"
        expected = call(DEFINITIONS[self.op], expected_arguments)
        results, expected = ((r,) if isinstance(r, Tensor) else tuple(r) for r in (results, expected))
        problem = difference(results, expected, self.exact, shape[0])
        return problem or ("" if same_state(arguments, expected_arguments, self.exact) else "state differs")

    def by_triton(self) -> Case:
        """Return the same product by octavo's kernel."""
        return _product("Triton", *self.product)


class Named(dict[str, Any]):
    """A case's arguments by name."""


def call(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a kernel's results for a case's arguments."""
    *flat, last = arguments
    return kernel(*flat, **last) if isinstance(last, Named) else kernel(*arguments)


# --- casts ------------------------------------------------------------------------------------------------------------


def delayed_state(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a delayed state that has scales, as after the first steps of training."""
    scales = torch.full((3,), scale, device=DEVICE, dtype=torch.float32)
    history = torch.full((3, 16), 448 / scale, device=DEVICE, dtype=torch.float32)
    no_pass = torch.zeros_like(scales)
    before = torch.stack((no_pass, scales, no_pass)).view(torch.int32)  # written in no pass
    committed(scales, history, before, (True, True, True))
    return scales, history, before


def _delayed(scale: float = FUSED_SCALE, role: int = 0, dtype: torch.dtype = E4M3) -> CastOp:
    """Return a cast by one delayed scale."""
    return CastOp("cast", lambda: (delayed_state(scale)[0], role, dtype, TENSOR, False, 0))


def _dynamic(block: Sequence[int] = TENSOR, power_of_two: bool = False, dtype: torch.dtype = E4M3) -> CastOp:
    """Return a cast whose scales come from the amaxes of the tensor itself."""
    return CastOp("cast", lambda: (None, 0, dtype, block, power_of_two, 0))


def _state_and_update() -> tuple[Any, ...]:
    """Return the arguments of ``cast_and_commit`` from the state on."""
    amax = torch.full((1, 1), 5.0, device=DEVICE, dtype=torch.float32)
    return *delayed_state(FUSED_SCALE), amax, amax, E5M2, False, 0, *UPDATE


_COMMIT = CastOp("cast_and_commit", _state_and_update)


def second(block: Sequence[int], power_of_two: bool = True) -> Named:
    """Return a second scaling, in E4M3."""
    return Named(second_dtype=E4M3, second_tile=block, second_power_of_two=power_of_two)


def _cast_case(op: CastOp, reads: int = 1, inputs: Inputs = _x_alone, names: Sequence[str] = (), **named: Any) -> Case:
    """Return a cast of the first input; ``names``: of the arguments that the other inputs are."""

    def arguments(x: Tensor, *others: Tensor) -> tuple[Any, ...]:
        return x, *op.scaling(), Named(named | dict(zip(names, others, strict=False)))

    return Case(op.name, arguments, reads, inputs, exact="activation" not in named and "kind" not in named)


def _grouped(block: Sequence[int], reads: int = 1, as_is: bool = True, delayed: bool = False) -> Case:
    """Return a cast of eight groups of equal sizes; with transposed codes unless a scale is for a part of a row."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        ends = torch.arange(1, 9, device=DEVICE, dtype=torch.int32) * (shape[0] // 8)
        return normal(shape), ends

    op = _delayed(SCALE) if delayed else _dynamic(block, block[0] * block[1] > 1)
    return _cast_case(op, reads, inputs, ("offsets",), transpose=block[0] != 1, pad=PADDING, as_is=as_is)


def _activated(activation: str, op: CastOp, reads: int = 1, **named: Any) -> Case:
    """Return the cast of an activation."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        x = normal(shape)
        return (torch.cat((x, normal(shape, 1)), 1),) if activation_of(activation).gated else (x,)

    return _cast_case(op, reads, inputs, activation=activation, transpose=True, **named)


def _gradient(activation: str, op: CastOp, reads: int = 1, **named: Any) -> Case:
    """Return the cast of an activation's gradient.

    With ``h_tile`` the activation's input is codes in blocks of this size, with ``recast_dtype`` it is cast too.
    """

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        rows, cols = shape
        h = normal(shape)
        dy = normal((rows, cols // 2 if activation_of(activation).gated else cols), 1)
        if "recast_dtype" in named:
            return dy, h, torch.full((1,), FUSED_SCALE, device=DEVICE, dtype=torch.float32)
        if "h_tile" in named:
            return dy, *REFERENCE["cast"](h, None, 0, E4M3, named["h_tile"], False, 0)[:3:2]
        return dy, h

    named = {"transpose": True, "pad": 1, "column_sum": True, "activation": activation, **named}
    names = "preactivation", "recast_scale" if "recast_dtype" in named else "h_scale_inv"
    return _cast_case(op, reads, inputs, names, **named)


def _parameters(kind: str, cols: int) -> tuple[Tensor, ...]:
    """Return (gamma, beta), or gamma alone."""
    wide = 0.1 * normal((2, cols), 2)
    return (wide[0] + 1,) if kind == "rms_norm" else (wide[0] + 1, wide[1])


def _normed(kind: str, op: CastOp, reads: int = 1, **named: Any) -> Case:
    """Return the cast of a norm."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        return normal(shape), *_parameters(kind, shape[1])

    named = {"transpose": True, "kind": kind, "eps": EPS, **named}
    return _cast_case(op, reads, inputs, ("gamma", "beta"), **named)


def _norm_gradient(kind: str) -> Case:
    """Return a norm's gradient, to which the gradient of a residual branch is added."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        x, (gamma, *beta) = normal(shape), _parameters(kind, shape[1])
        _, mean, rstd = normalise(x, gamma, beta[0] if beta else None, kind, EPS, False)
        return normal(shape, 1), x, gamma, mean, rstd, normal(shape, 3)

    def arguments(*tensors: Tensor) -> tuple[Any, ...]:
        *saved, residual = tensors
        return *saved, kind, False, kind == "layer_norm", residual

    return Case("norm_backward", arguments, 1, inputs, exact=False)


def _dequantized(block: Sequence[int]) -> Case:
    """Return the reading of codes in blocks of this size."""

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        return REFERENCE["cast"](normal(shape), None, 0, E4M3, block, False, 0)[:3:2]

    return Case("dequantize", lambda q, scale_inv: (q, scale_inv, block, torch.bfloat16), inputs=inputs)


def _weights(x: Tensor) -> tuple[Any, ...]:
    """Return x as five weights of uneven heights, and memory for their pairs."""
    rows = len(x)
    unit = max(rows // 16, 1)
    xs = [piece for piece in x.split([unit, 2 * unit, 3 * unit, 4 * unit, rows - 10 * unit]) if len(piece)]
    outputs = [torch.empty(w.shape, dtype=E4M3, device=DEVICE) for w in xs]
    transposed = [torch.empty(w.shape[::-1], dtype=E4M3, device=DEVICE) for w in xs]
    scales = [[torch.empty(1, 1, device=DEVICE, dtype=torch.float32) for _ in xs] for _ in range(2)]
    return x, xs, outputs, transposed, *scales


def many(kernel: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """Return ``multi_tensor_cast`` as a function of ``_weights`` that returns what it wrote."""

    def run(x: Tensor, xs: list[Tensor], *outputs: list[Tensor]) -> tuple[Tensor, ...]:
        kernel(xs, *outputs, [], 1, TENSOR, False, 0, None)
        return tuple(tensor for tensors in outputs for tensor in tensors)

    return run


PLAIN = {
    "amax": Case("amax", lambda x: (x, TENSOR)),
    "cast delayed": _cast_case(_delayed(SCALE)),
    "cast dynamic": _cast_case(_dynamic(), 2),
    "cast+transpose delayed": _cast_case(_delayed(SCALE), transpose=True),
    "cast+transpose dynamic": _cast_case(_dynamic(), 2, transpose=True),
    "cast+transpose+sum+commit": _cast_case(_COMMIT, transpose=True, pad=1, column_sum=True),
    "five weights at once": Case("many", _weights, reads=2),
    "cast rows": _cast_case(_dynamic(ROWS)),
    "cast columns": Case("cast", lambda x: (x.t(), *_dynamic(ROWS).scaling()), reads=2),
    "cast rows + columns": _cast_case(_dynamic(ROWS), 2, transpose=True, **second(COLUMNS, False)),
    "cast 1x128": _cast_case(_dynamic(VECTOR, True)),
    "cast 1x128 + 128x1": _cast_case(_dynamic(VECTOR, True), transpose=True, **second(TALL)),
    "cast 1x32 + 32x1": _cast_case(_dynamic(MX, True), transpose=True, **second(MX_TALL)),
    "cast+transpose 128x128": _cast_case(_dynamic(SQUARE, True), transpose=True),
    "grouped cast+transpose delayed": _grouped(TENSOR, delayed=True),
    "grouped cast columns, transposed": _grouped(COLUMNS, 2, as_is=False),
    "grouped cast 1x128": _grouped(VECTOR),
    "grouped cast 128x1, transposed": _grouped(TALL, as_is=False),
    "dequantize tensor": _dequantized(TENSOR),
    "dequantize 1x128": _dequantized(VECTOR),
}
FUSED = {
    "swiglu + cast+transpose delayed": _activated("swiglu", _delayed()),
    "swiglu + cast+transpose dynamic": _activated("swiglu", _dynamic(), 2),
    "gelu_tanh + cast+transpose delayed": _activated("gelu_tanh", _delayed()),
    "gelu + cast+transpose delayed": _activated("gelu", _delayed()),
    "swiglu + rows + columns": _activated("swiglu", _dynamic(ROWS), 2, **second(COLUMNS, False)),
    "swiglu + 1x128 + 128x1": _activated("swiglu", _dynamic(VECTOR, True), **second(TALL)),
    "swiglu gradient + cast+transpose+sum+commit": _gradient("swiglu", _COMMIT),
    "swiglu gradient + cast+transpose+sum dynamic": _gradient("swiglu", _dynamic(dtype=E5M2), 2),
    "gelu gradient + cast+transpose+sum+commit": _gradient("gelu", _COMMIT),
    "swiglu gradient + 1x128 + 128x1 + sum": _gradient("swiglu", _dynamic(VECTOR, True), **second(TALL)),
    "rmsnorm + cast+transpose delayed": _normed("rms_norm", _delayed()),
    "rmsnorm + cast+transpose dynamic": _normed("rms_norm", _dynamic(), 2),
    "layernorm + cast+transpose delayed": _normed("layer_norm", _delayed()),
    "rmsnorm, y kept + cast+transpose delayed": _normed("rms_norm", _delayed(), keep=True),
    "rmsnorm + 1x128 + 128x1": _normed("rms_norm", _dynamic(VECTOR, True), **second(TALL)),
    "rmsnorm gradient + residual": _norm_gradient("rms_norm"),
    "layernorm gradient + residual": _norm_gradient("layer_norm"),
}
# cases of configurations that no other case uses
ONLY_TUNED = {
    "swiglu gradient + cast+sum delayed": _gradient("swiglu", _delayed(role=2, dtype=E5M2), transpose=False),
    "swiglu gradient and swiglu + cast+transpose+sum+commit": _gradient(
        "swiglu", _COMMIT, recast_dtype=E4M3, recast_transposed=True
    ),
    "swiglu gradient + rows": _gradient("swiglu", _dynamic(ROWS), transpose=False, column_sum=False),
    "swiglu gradient of codes + cast+transpose+sum+commit": _gradient("swiglu", _COMMIT, h_tile=MX),
    "rmsnorm + cast delayed": _normed("rms_norm", _delayed(), transpose=False),
    "rmsnorm + rows": _normed("rms_norm", _dynamic(ROWS), transpose=False),
    "rmsnorm + 1x128": _normed("rms_norm", _dynamic(VECTOR, True), transpose=False),
    "rmsnorm + 1x32 + 32x1": _normed("rms_norm", _dynamic(MX, True), **second(MX_TALL)),
}


# --- steps of AdamW on one weight -------------------------------------------------------------------------------------


def _update(master: Master, dtype: str, gradient: torch.dtype) -> WeightUpdate:
    """Return the update of a weight whose moments are in float32, or in blocks of "fp8", as octavo.optim names them."""
    shape = master.weight.shape

    def moment(**form: Any) -> MomentTensors:
        if dtype == "fp32":
            return MomentTensors(torch.zeros(shape, dtype=torch.float32))
        scales = torch.ones(shape[0], blocks_in_row(shape[1]), dtype=torch.float32)
        return MomentTensors(torch.zeros(shape, dtype=torch.uint8), scale_inv=scales, rounding="stochastic", **form)

    moments = moment(fmt=formats.E4M3), moment(fmt=formats.E4M4, root=True)
    step = torch.zeros((), dtype=torch.float32)
    return WeightUpdate(master, moments, torch.empty(shape, dtype=gradient), step, BitNumbers(1), 0)


def _in_float32(shape: Shape) -> MasterWeight:
    """Return a weight that is its own master."""
    return MasterWeight(torch.empty(shape, dtype=torch.float32), "weight")


def _in_bfloat16(shape: Shape) -> MasterWeight:
    """Return a weight with the 16 lower bits of its master."""
    return MasterWeight(torch.empty(shape, dtype=torch.bfloat16), "split32", torch.zeros(shape, dtype=torch.int16))


def _in_fp8(shape: Shape) -> Fp8Weight:
    """Return a weight that lives in FP8 in blocks of 128 x 128, with a master of 8 bits more."""
    codes, low_bits = torch.empty(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.int8)
    scale_inv, amax = (torch.empty(*map(blocks_in_row, shape), dtype=torch.float32) for _ in range(2))
    return Fp8Weight(codes, "fp8_split16", scale_inv, low_bits, amax)


def stored(weight_update: WeightUpdate) -> tuple[Tensor, ...]:
    """Return the tensors that a step reads and writes."""
    names = ("weight", "data", "low_bits", "scale_inv", "amax")
    tensors = (getattr(owner, name, None) for owner in (weight_update.master, *weight_update.moments) for name in names)
    return tuple(tensor for tensor in tensors if tensor is not None)


def filled(tensor: Tensor, x: Tensor | None = None) -> Tensor:
    """Fill a tensor with x, or with zeros, which are a new state."""
    return tensor.zero_() if x is None else tensor.copy_(x)


def _step(make: Callable[[Shape], Master], dtype: str, gradient: torch.dtype = torch.bfloat16) -> Case:
    """Return a step of the weight that ``make`` makes, with moments as ``_update`` has them."""

    def inputs(shape: Shape) -> tuple[Any, ...]:
        x = normal(shape)
        with torch.device(x.device):
            weight_update = _update(make(shape), dtype, gradient)
        return weight_update, filled(weight_update.gradient, x), *map(filled, stored(weight_update))

    return Case("step", lambda weight_update, *tensors: (weight_update, {}), inputs=inputs, exact=False)


def stepping(kernel: Callable[..., None], keeps_plans: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return a step as a function of ``_step``'s arguments that returns what it wrote."""

    def run(weight_update: WeightUpdate, plans: dict[Any, dict[Any, Any]]) -> tuple[Tensor, ...]:
        keyword = {"plans": plans.setdefault(config("optimizer_step", LARGE), {})} if keeps_plans else {}
        kernel([weight_update], [ADAM], **keyword)
        # torch's roots on a CPU, and multiply-adds on a GPU, may round otherwise, which a remainder of 16 bits shows
        return tuple(tensor for tensor in stored(weight_update) if tensor.dtype != torch.int16)

    return run


STEPS = {
    "AdamW fp8, split32": _step(_in_bfloat16, "fp8"),
    "AdamW fp8, fp32": _step(_in_float32, "fp8"),
    "AdamW fp32, fp32": _step(_in_float32, "fp32", torch.float32),
    "AdamW fp8, E4M3 weight in blocks, split16": _step(_in_fp8, "fp8"),
}


# --- products of two pairs in E4M3, by octavo's kernel and by torch's -------------------------------------------------

PRODUCT_BLOCKS: dict[str, tuple[Tile, Tile]] = {
    "tensor . tensor": (TENSOR, TENSOR),
    "rows . rows": (ROWS, ROWS),
    "1x128 . 128x128": (VECTOR, SQUARE),
    "1x128 . 1x128": (VECTOR, VECTOR),
    "1x32 . 1x32": (MX, MX),
}


def _torch_has(blocks: str) -> bool:
    """Whether torch's product takes these here: 1x32 is Blackwell's, a CPU has none of blocks, with torch 2.11 none."""
    if DEVICE.type == "cuda":
        return "1x32" not in blocks or torch.cuda.get_device_capability() >= (10, 0)
    return torch.__version__ >= "2.12" and "x" not in blocks


def _product(maker: str, a_block: Tile, b_block: Tile, fast_accum: bool) -> Case:
    """Return a product of two pairs by octavo's kernel ("Triton") or by "torch"."""

    def operand(x: Tensor, block: Tile) -> tuple[Tensor, Tensor]:
        return TRITON["cast"](x, None, 0, E4M3, block, block[1] > 0, 0)[:3:2]  # scales of blocks are powers of two

    def inputs(shape: Shape) -> tuple[Tensor, ...]:
        rows, cols, contraction = shape
        return *operand(normal((rows, contraction)), a_block), *operand(normal((cols, contraction), 1), b_block)

    def arguments(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor) -> tuple[Any, ...]:
        return a, a_scale_inv, a_block, b, b_scale_inv, b_block, None, torch.bfloat16, fast_accum

    return Case(f"{maker} product", arguments, 1, inputs, False, (a_block, b_block, fast_accum))


PRODUCTS = {
    f"{name}, {maker}{', fast' * fast}": _product(maker, *blocks, fast)
    for maker in ("Triton", "torch")
    for name, blocks in PRODUCT_BLOCKS.items()
    for fast in (True, False)
    if maker == "Triton" or _torch_has(name)
}

# by kind of configs.json, the first decides which configurations are timed again
_TUNED_BY = {
    "cast_transpose": ("cast+transpose delayed", "cast+transpose+sum+commit"),
    "cast": ("cast delayed",),
    "amax": ("amax",),
    "cast_rows": ("cast rows",),
    "amax_lines": ("cast columns", "cast rows + columns"),
    "cast_lines": ("cast rows + columns", "cast columns"),
    "cast_blocks": ("cast 1x128",),
    "cast_blocks_transpose": ("cast 1x128 + 128x1", "cast+transpose 128x128"),
    "amax_gated_gradient": ("swiglu gradient + cast+transpose+sum dynamic",),
    "cast_gated_gradient": ("swiglu gradient + cast+sum delayed",),
    "cast_transpose_gated_gradient": ("swiglu gradient + cast+transpose+sum+commit",),
    "cast_transpose_gated_gradient_and_value": ("swiglu gradient and swiglu + cast+transpose+sum+commit",),
    "cast_transpose_gated_gradient_of_codes": ("swiglu gradient of codes + cast+transpose+sum+commit",),
    "cast_rows_gated_gradient": ("swiglu gradient + rows",),
    "norm_cast": ("rmsnorm + cast delayed", "rmsnorm + rows"),
    "norm_cast_transpose": ("rmsnorm + cast+transpose delayed", "layernorm + cast+transpose delayed"),
    "norm_cast_blocks": ("rmsnorm + 1x128",),
    "norm_cast_blocks_transpose": ("rmsnorm + 1x32 + 32x1",),
    "norm_backward": ("rmsnorm gradient + residual", "layernorm gradient + residual"),
    "optimizer_step": ("AdamW fp8, split32", "AdamW fp8, E4M3 weight in blocks, split16"),
    "matmul_blocks": ("1x128 . 1x128, Triton",),
    "matmul_square_blocks": ("1x128 . 128x128, Triton",),
    "matmul_scaled": ("1x32 . 1x32, Triton",),
    "matmul": ("rows . rows, Triton",),
    "library": tuple(name for name, case in PRODUCTS.items() if case.op == "torch product"),
}

KERNELS = {**TRITON, "many": many(TRITON["multi_tensor_cast"]), "step": stepping(optimizer_step, keeps_plans=True)}
KERNELS["Triton product"] = unpacking({"matmul": triton_matmul})["matmul"]
KERNELS["torch product"] = unpacking({"matmul": library_matmul})["matmul"]
DEFINITIONS = {**REFERENCE, "many": many(REFERENCE["multi_tensor_cast"])}
DEFINITIONS["step"] = stepping(reference_step, keeps_plans=False)
CASES = {**PLAIN, **FUSED}
ALL_CASES = {**CASES, **ONLY_TUNED, **STEPS, **PRODUCTS}
# last torch's products, which are compared with the products' new rows, if torch has any here (2.11 has none on a CPU)
CASES_OF_KIND = {kind: {name: ALL_CASES[name] for name in names} for kind, names in _TUNED_BY.items() if names}


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reads(name: str, shape: Shape) -> tuple[Tensor, ...]:
    """Return the tensors that a case reads."""
    return tuple(tensor for tensor in ALL_CASES[name].inputs(shape) if isinstance(tensor, Tensor))
