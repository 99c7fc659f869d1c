"""Compiled kernels: Triton's code for several architectures, run by the emulator of PTX.

Each kernel once or twice for sm_90, a product for sm_89, sm_100 and sm_120 too; in the full set more, and casts.
All other tests of kernels run so by ``./dev test --compiled sm_90``.
"""

import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from emulator import Options
from octavo.granularity import Tile
from octavo.kernels.triton import cases
from tests.kernels import (
    test_cast_statistics,
    test_cross_entropy,
    test_matmul,
    test_multi_tensor_cast,
    test_norm,
    test_note_faults,
    test_rotary,
)
from tests.kernels.conftest import ops_of
from tests.kernels.triton import test_delayed_update, test_grouped_library, test_grouped_matmul
from tests.support import triton_kernels
from tests.support.casts import E4M3, Call
from tests.support.casts import check as check_cast
from tests.support.emulated import emulating
from tests.support.groups import offsets_of
from tests.support.optimizer_both import ADAM, OTHER, SCHEMES, SGD, Both, update_of
from tests.support.product_cases import BLOCK, MX, SQUARE, of_flat, rows_in_groups, terms_in_groups
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself")
SHAPE = (33, 160)  # shapes of casts: several programs, and edges
# sums of columns in several parts, and two parts of tall blocks
SHAPES = {"cast+transpose+sum+commit": (130, 160), "cast 1x128 + 128x1": (130, 160), "five weights at once": (33, 70)}
PRODUCT = (48, 144, 272)  # M, N, K
CASTS = ["cast+transpose dynamic", "cast rows", "cast rows + columns", "cast 1x128 + 128x1", "cast+transpose 128x128"]
PRODUCTS = ["tensor . tensor, Triton", "1x128 . 128x128, Triton"]
SCALED = ["1x32 . 1x32, Triton", "grouped products of MX"]  # by Blackwell's tensor cores themselves
SIZES = [40, 0, 17]  # of groups; three rows more are in none


def _grouped_products(kernels: TritonKernels, tiles: tuple[Tile, Tile] = (BLOCK, SQUARE)) -> None:
    test_grouped_matmul.check(kernels, *rows_in_groups(SIZES, 3, tiles, 24, 144), None, torch.bfloat16, False)
    terms = terms_in_groups(SIZES, 3, tiles[:1] * 2, 24, 40)
    test_grouped_matmul.check(kernels, *terms, None, torch.bfloat16, False, 16)


def _around_torchs_grouped_product(kernels: TritonKernels) -> None:
    known = kernels.module("library_matmul")._known
    known.clear()
    test_grouped_library.test_torch_s_product(rows_in_groups, SIZES, 3, kernels)
    test_grouped_library.test_torch_s_product_of_1x32(SIZES, 3, kernels)
    known.clear()


def _extreme_scales(kernels: TritonKernels) -> None:
    product = of_flat(kernels.module("matmul").triton_matmul)
    test_matmul.check_extremes(product, (-126, 126, 1.5), (BLOCK, SQUARE))
    test_matmul.check_extremes(product, test_matmul.TOO_SMALL, (BLOCK, BLOCK))


def _grouped_rows(kernels: TritonKernels) -> None:
    how, offsets = (None, 0, E4M3, (1, -1), False, 0, True, 16), {"offsets": offsets_of(SIZES)}
    check_cast(kernels.cast, Call("cast", (torch.randn(60, 48), *how), offsets), True)


def _weights_in_blocks(kernels: TritonKernels) -> None:
    test_multi_tensor_cast.check(test_multi_tensor_cast.CASES[4], ops_of(kernels))


def _optimizer(kernels: TritonKernels) -> None:
    updates = [update_of(shape, SCHEMES["fp8"], "split24", number=n) for n, shape in enumerate([(3, 150), (20, 1)])]
    updates[0].master.weight[0, :9] = math.nan  # beside remainders of any size, which must not make it a number
    Both(kernels, updates, [ADAM, OTHER]).steps(1)


def _sgd(kernels: TritonKernels) -> None:
    updates = [update_of((3, cols), SCHEMES["fp8"][:1], number=number) for number, cols in enumerate((150, 31))]
    both = Both(kernels, [updates[0]._replace(measured=True), updates[1]], [SGD, SGD._replace(nesterov=True)])
    both.step(measures=True)


def _gradients_of_heads(kernels: TritonKernels) -> None:
    case = HEADS | {"positions": 9, "layout": "slice", "shared": False, "half": True}
    test_rotary.check_casts(ops_of(kernels), case, "tensor")


DELAYED: dict[str, Any] = test_delayed_update.test_update.pytestmark[0].args[1][0].values[0]  # type: ignore[attr-defined]
LONG = {"length": 100, "reduce": "most_recent"}
STATISTICS = {name: values[0] for name, values in test_cast_statistics.CAST.items()} | {"shape": (1, 270)}
OF_GROUPS = {name: values[0] for name, values in test_cast_statistics.IN_GROUPS.items()} | {"sizes": [0, 1]}
BF16 = torch.bfloat16
OF_A_SUM = {"shape": (33, 160), "kind": "rms_norm", "dtype": BF16, "gamma_dtype": BF16, "beta": False, "residual": True}
HEADS = {"batch": 2, "positions": 37, "heads": (5, 2), "width": 34, "dtype": BF16, "of_angles": BF16}
OF_CODES = {"shape": (130, 70), "dtype": BF16, "smoothing": 0.1, "softcap": 30.0, "scale": 5.0, "ignored": True}
OF_CODES |= {"layout": "rows", "dtype_of_codes": torch.float8_e5m2, "pad": 16, "first": 16, "written": (True, True)}
ROWS = {"shape": (2, 9000), "dtype": BF16, "smoothing": 0.1, "softcap": 30.0, "scale": 5.0, "ignored": False}
CALLS: dict[str, Callable[[TritonKernels], None]] = {
    "grouped products": _grouped_products,
    "grouped products of MX": functools.partial(_grouped_products, tiles=(MX, MX)),
    "around torch's grouped product": _around_torchs_grouped_product,
    "grouped cast by rows": _grouped_rows,
    "weights in blocks": _weights_in_blocks,
    "statistics": lambda kernels: test_cast_statistics.check(ops_of(kernels), STATISTICS, 1),
    "statistics of groups": lambda kernels: test_cast_statistics.check_groups(ops_of(kernels), OF_GROUPS),
    "delayed update": lambda kernels: test_delayed_update.test_update(kernels, DELAYED),
    "delayed update, long history": lambda kernels: test_delayed_update.test_update(kernels, DELAYED | LONG),
    "extreme scales": _extreme_scales,
    "optimizer": _optimizer,
    "optimizer, SGD": _sgd,
    "norm of a sum": lambda kernels: test_norm.check_norm(
        ops_of(kernels), OF_A_SUM | {"layout": "rows", "residual_layout": "rows"}
    ),
    "rotary": lambda kernels: test_rotary.check(
        ops_of(kernels), HEADS | {"layout": "attention's", "shared": True, "inverse": True, "half": False}
    ),
    "gradients of heads": _gradients_of_heads,
    "cross entropy": lambda kernels: test_cross_entropy.check(
        ops_of(kernels), ROWS | {"layout": "rows", "expanded": True}
    ),
    "codes of its gradient": lambda kernels: test_cross_entropy.check_codes(ops_of(kernels), OF_CODES),
    "faults": lambda kernels: test_note_faults.test_the_group_of_a_fault_is_found(ops_of(kernels)),
}
WITHOUT_CODES = "norm of a sum", "rotary", "cross entropy"
ONCE = [
    *("five weights at once", "cast+transpose+sum+commit", "swiglu gradient + 1x128 + 128x1 + sum"),
    "swiglu gradient and swiglu + cast+transpose+sum+commit",
    *("grouped cast columns, transposed", "grouped cast 1x128", "grouped cast 128x1, transposed"),
    *("grouped cast+transpose delayed", "dequantize 1x128", "rmsnorm + cast+transpose dynamic", "rmsnorm + rows"),
    *("rmsnorm + 1x128", "layernorm gradient + residual", "cast 1x32 + 32x1"),
]
ALL_CASES = [
    *((90, name) for name in (*CASTS, *ONCE, *PRODUCTS, SCALED[0], *CALLS) if name != SCALED[1]),
    *((capability, name) for capability in (89, 100, 120) for name in (*CASTS, *PRODUCTS)),
    *((capability, name) for capability in (100, 120) for name in SCALED),
    *(
        (capability, name)
        for capability in (89, 100, 120)
        for name in ("extreme scales", "codes of its gradient", "gradients of heads", ONCE[3], *WITHOUT_CODES)
    ),
]
# for sm_90, what launches no kernel that others do not, which compiles for a second or more
AGAIN = {*CASTS[3:], *PRODUCTS[1:], SCALED[0], "cast 1x32 + 32x1", "gradients of heads", "optimizer, SGD"}
AGAIN |= {"swiglu gradient and swiglu + cast+transpose+sum+commit", "rmsnorm + cast+transpose dynamic"}
AGAIN |= {"grouped cast 128x1, transposed", "grouped cast+transpose delayed", "delayed update, long history"}
QUICK = {89: PRODUCTS[1:], 100: SCALED[:1], 120: SCALED[:1]}  # tensor cores of each kind
BY_DEFAULT = [case for case in ALL_CASES if (case[1] not in AGAIN if case[0] == 90 else case[1] in QUICK[case[0]])]
_launched: dict[tuple[int, str], set[str]] = {}


def check(name: str, kernels: TritonKernels) -> None:
    """Hold a case's results against the reference's."""
    if name in CALLS:
        CALLS[name](kernels)
    else:
        shape = PRODUCT if name in cases.PRODUCTS else SHAPES.get(name, SHAPE)
        assert kernels.module("octavo.kernels.triton.cases").ALL_CASES[name].wrong(shape) == ""


@pytest.mark.parametrize(
    ("capability", "name"),
    [pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.full) for case in ALL_CASES],
)
def test_it_is_the_reference(capability: int, name: str) -> None:
    with emulating(capability) as launches:
        check(name, triton_kernels.load(False))
    assert launches
    _launched[capability, name] = {launch.kernel for launch in launches}


@pytest.mark.parametrize("name", ["cast columns", "cast 1x32 + 32x1"])
def test_stores_fill_sectors(name: str) -> None:
    """Stores of rows of codes fill whole sectors; a warp's other stores lie together too."""
    with emulating(90, Options(counts=True)) as launches:
        assert cases.ALL_CASES[name].wrong((64, 256)) == ""
    accesses = [access for one in launches for access in one.launch.counts.items()]
    counts = [count for (line, space), count in accesses if space == "global" and line.name.startswith(("st", "red"))]
    assert counts and all(count.got <= 1.05 * count.least for count in counts)


def test_each_kernel_was_launched() -> None:
    """Each kernel was launched by the tests above, which one worker runs."""
    if not {*BY_DEFAULT} <= _launched.keys():
        pytest.skip("not all of them ran")
    folder = Path(cases.__file__).parent
    kernels = set()
    for path in folder.glob("*.py"):
        module = importlib.import_module(f"octavo.kernels.triton.{path.stem}") if path.stem != "__init__" else None
        kernels |= {name for name, value in vars(module).items() if isinstance(value, JITFunction)} if module else set()
    entries = {name for name in kernels if name.endswith("_kernel")}
    assert len(entries) == 31
    assert entries == set().union(*_launched.values())
