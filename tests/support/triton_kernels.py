"""The Triton kernels as tests run them: on the GPU where there is one, else on CPU tensors, in Triton's interpreter or
(--compiled) compiled for a GPU and run by the emulator of PTX.

Whether a kernel is interpreted is settled as ``@triton.jit`` decorates it, and other tests compile the same modules for
a GPU. So the interpreter gets its own copy of them, and no other test sees it.
"""

import dataclasses
import functools
import importlib
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.support.emulated import emulating
from tests.support.on_gpu import take_cpu_tensors

PACKAGE = "octavo.kernels.triton"
compiled_for: int | None = None  # the compute capability of --compiled
COPIED = (PACKAGE, "octavo.tune")


class TritonKernels:
    """The kernels by their ops' names: ``kernels.cast(...)``; ``gpu``: the device of torch's products, or a CPU.

    They take CPU tensors everywhere, as references do, whose results on a GPU are not the same bit for bit.
    """

    def __init__(self, interpreted: bool) -> None:
        self.interpreted = interpreted
        self.device = torch.device("cpu")
        self.gpu = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.modules = _copy() if interpreted else _real()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.modules[PACKAGE].KERNELS[name]

    def module(self, name: str) -> ModuleType:
        """Return a module of octavo/kernels/triton, or another that was copied, by its whole name."""
        return self.modules[name if "." in name else f"{PACKAGE}.{name}"]


@functools.cache
def load(interpreted: bool) -> TritonKernels:
    """Return the kernels, loaded once a process."""
    return TritonKernels(interpreted)


@contextmanager
def running(capability: int | None = None) -> Iterator[TritonKernels]:
    """Yield the kernels, which run within the block; compiled for a capability, if one is set and there is no GPU."""
    capability = capability or compiled_for
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        take_cpu_tensors()
    how = nullcontext() if on_gpu else emulating(capability) if capability else _interpreting()
    with how:
        yield load(not on_gpu and not capability)


@contextmanager
def in_place_of_reference(kernels: TritonKernels) -> Iterator[None]:
    """Make layers and optimizers on a CPU run these kernels, laid as on Hopper, except in compiled code."""
    from octavo import kernels as entries
    from octavo.autograd import casts, grouped, linear_cross_entropy, products
    from octavo.kernels.signatures import SCHEMAS
    from octavo.optim import base, muon
    from tests.support.helpers import padded_as_on_gpu

    with ExitStack() as stack:
        for name in SCHEMAS:
            stack.enter_context(mock.patch.object(entries, name, getattr(kernels, name)))
        for module in (casts, grouped, linear_cross_entropy):
            stack.enter_context(mock.patch.object(module, "needs_transposed_codes", lambda device: True))
        for module in (casts, linear_cross_entropy, products):
            stack.enter_context(mock.patch.object(module, "contraction_multiple", padded_as_on_gpu))
        for module in (base, muon):
            stack.enter_context(mock.patch.object(module, "optimizer_step", kernels.modules[PACKAGE].optimizer_step))
        yield


def _ours() -> dict[str, ModuleType]:
    within = tuple(f"{copied}." for copied in COPIED)
    return {name: module for name, module in sys.modules.items() if f"{name}.".startswith(within)}


def _real() -> dict[str, ModuleType]:
    for name in (*COPIED, "octavo.tune.tuner"):  # which imports the others of its room that have kernels
        importlib.import_module(name)
    return _ours()


def _copy() -> dict[str, ModuleType]:
    import triton

    before = _ours()
    for name in before:
        del sys.modules[name]
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return _real()
    finally:
        for name in _ours():
            del sys.modules[name]
        sys.modules.update(before)
        for name in COPIED:  # a package has its modules as attributes too
            package, _, module = name.rpartition(".")
            if name in before:
                setattr(sys.modules[package], module, before[name])
            else:
                delattr(sys.modules[package], module)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of float32, rounded once: before Triton 3.9 the interpreter rounds the product too.

    In float64 the product is exact, and the sum, rounded to odd, rounds to float32 as the exact sum does.
    """
    from triton.runtime.interpreter import TensorHandle

    product, addend = x.data.astype("float64") * y.data, z.data.astype("float64")
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view("int64")
    is_even_and_inexact = (bits & 1 == 0) & (abs(error) > 0)
    odd = bits + is_even_and_inexact * (1 - 2 * ((error > 0) != (total > 0)))
    return TensorHandle(odd.view("float64").astype("float32"), z.dtype.scalar)


def _restore(owner: Any, before: dict[str, Any]) -> None:
    for name, value in dict(vars(owner)).items():
        if name not in before:
            delattr(owner, name)
        elif value is not before[name]:
            setattr(owner, name, before[name])


@contextmanager
def _interpreting() -> Iterator[None]:
    """Make triton.language the interpreter's.

    The interpreter does so itself, at every call of a function, which takes longer than the function; and it does not
    put all of it back, which would spoil a compilation later in this process. Triton's own tl.max and its like were
    decorated as Triton was imported, so a call of one is handed to the interpreter here.
    """
    import numpy
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    def call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return interpreter.InterpretedFunction(function.fn)(*args, **kwargs)

    def convert(values: Any, source: tl.dtype, wanted: tl.dtype, rounding: Any) -> Any:
        if source == tl.bfloat16 and wanted == tl.float32:  # the interpreter's own is wrong for subnormals
            return values.astype(numpy.uint32) << 16
        return convert_float(values, source, wanted, rounding)

    def dtype_of(triton_type: tl.dtype) -> numpy.dtype:
        element = getattr(triton_type, "element_ty", triton_type) if triton_type.is_block() else triton_type
        return numpy.dtype(numpy.uint64) if element.is_ptr() else dtypes[element]

    def masked_store(builder_self: Any, pointers: Any, values: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool, copy=False)  # Triton 3.9 refuses int32, which it makes of a scalar condition
        return store(builder_self, pointers, values, mask, *others)

    blocks: dict[Any, dict[str, Any]] = {}

    def block(block_self: tl.block_type, element: tl.dtype, shape: Any) -> None:
        key = element.name, *getattr(shape, "values", shape)
        if element.is_ptr() or key not in blocks:
            new_block(block_self, element, shape)
            blocks[key] = vars(block_self)
        vars(block_self).update(blocks[key])

    def with_element(block_self: tl.block_type, element: tl.dtype) -> tl.block_type:
        return block_self if element is block_self.element_ty else tl.block_type(element, block_self.shape)

    def broadcast(semantic: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if alike else as_one(semantic, lhs, rhs)

    @functools.cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def tensor(tensor_self: tl.tensor, handle: Any, type_: tl.dtype) -> None:
        tensor_self.handle, tensor_self.type, tensor_self.dtype = handle, type_, type_.scalar
        tensor_self.numel, tensor_self.shape = constants(tuple(type_.shape) if type_.is_block() else ())

    def untyped(values: Any, fields: Any = None) -> Any:  # of a tuple nothing asks for more than its fields' names
        return tl.core.tuple_type([], fields)

    integers = [tl.int1, *(getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))]
    scalars = [*integers, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv]
    builder, convert_float = interpreter.InterpreterBuilder, interpreter._convert_float
    new_block, as_one = tl.block_type.__init__, TritonSemantic.broadcast_impl_value
    store = builder.create_masked_store
    unsanitized = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    dtypes = {element: interpreter._get_np_dtype(element) for element in scalars}
    fma = builder.create_fma if hasattr(interpreter._interpreter, "fma_fp32") else _fma
    owners = [tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.condition, tl.core.tensor_descriptor_base]
    before = [dict(vars(owner)) for owner in owners]
    done = types.SimpleNamespace(restore=lambda: None)
    try:
        interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        tl.tensor.__index__ = lambda value: value.handle.data.item()  # NumPy 2.4 refuses how Triton 3.6 does it
        with (
            mock.patch.object(interpreter, "_patch_lang", lambda function: done),
            mock.patch.object(interpreter, "_convert_float", convert),
            # what costs half of the interpreter's time: overflow looked for in each integer sum, and types made anew
            mock.patch.object(interpreter.interpreter_builder, "options", unsanitized),
            mock.patch.object(interpreter, "_get_np_dtype", dtype_of),
            mock.patch.object(tl.core, "_type_for_tuple_values", untyped),
            mock.patch.object(tl.tensor, "__init__", tensor),
            mock.patch.object(tl.block_type, "__init__", block),
            mock.patch.object(tl.block_type, "with_element_ty", with_element),
            mock.patch.object(TritonSemantic, "broadcast_impl_value", broadcast),
            mock.patch.object(JITFunction, "__call__", call),
            mock.patch.object(builder, "create_fma", fma),
            mock.patch.object(builder, "create_masked_store", masked_store),
            # where one is NaN the other counts; before Triton 3.8, NaN
            mock.patch.object(
                builder, "create_minnumf", lambda builder_self, x, y: builder_self.binary_op(x, y, numpy.fmin)
            ),
            mock.patch.object(
                builder, "create_maxnumf", lambda builder_self, x, y: builder_self.binary_op(x, y, numpy.fmax)
            ),
            numpy.errstate(all="ignore"),  # infinities and NaN are meant
            warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        ):
            yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            _restore(owner, attributes)
