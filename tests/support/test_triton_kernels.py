"""The interpreter is for the tests that ask for it: others compile the same modules."""

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from octavo.kernels import triton as package
from octavo.kernels.triton import tiles
from tests.support import triton_kernels

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")


@triton.jit
def max_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK)), 0))


@without_gpu
@pytest.mark.gpu
def test_the_interpreted_modules_are_a_copy() -> None:
    kernels = triton_kernels.load(True)
    assert kernels.device.type == "cpu"
    copy = kernels.module("tiles")
    assert isinstance(copy.encode, InterpretedFunction) and isinstance(tiles.encode, JITFunction)
    assert sys.modules["octavo.kernels.triton.tiles"] is tiles is package.tiles
    assert kernels.module("octavo.kernels.triton") is not package
    assert vars(kernels.module("cast_kernels"))["workspace"] is kernels.module("launch").workspace
    assert kernels.cast is not package.KERNELS["cast"]
    assert triton_kernels.load(True) is kernels


@without_gpu
@pytest.mark.gpu
def test_what_is_interpreted_leaves_the_compiler_as_it_was() -> None:
    before = {owner: dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype)}
    with triton_kernels.running() as kernels:
        assert kernels.amax(torch.tensor([[1.0, -3.0]]), (-1, -1)).item() == 3.0
    assert all(dict(vars(owner)) == attributes for owner, attributes in before.items())
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tl.max(None)
    source = ASTSource(max_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": "constexpr"}, {(2,): 128})
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert "max" in compiled.asm["ptx"]
