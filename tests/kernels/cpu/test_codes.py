import itertools
import re
from collections.abc import Callable
from ctypes import CDLL, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.formats import E2M1
from octavo.kernels.arguments import CastTarget, Scaling
from octavo.kernels.cpu import codes
from octavo.kernels.cpu.codes import described, described_packed, row_slices, threads_for


@pytest.mark.parametrize("unit", [1, 3, 128])
@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (17, 130), (1000, 7), (128, 128)], ids=str)
def test_slices_of_rows(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], runs: int, unit: int) -> None:
    monkeypatch.setattr(codes, "CHUNK", 300)
    slices = row_slices(shape, unit, torch.device("cpu"), runs)
    assert slices[0].start == 0 and slices[-1].stop == shape[0]
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    sizes = [rows.stop - rows.start for rows in slices]
    assert all(size == sizes[0] and size % unit == 0 for size in sizes[:-1]) and sizes[-1] <= max(sizes[0], unit)
    assert sizes[0] * shape[1] <= max(runs * 300, unit * shape[1])
    assert len(sizes) == 1 or (sizes[0] + unit) * shape[1] > runs * 300  # no smaller than need be


def test_threads_are_as_many_as_the_elements_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert [threads_for(elements) for elements in (0, 100, 1 << 17, 1 << 20)] == [1, 1, 2, 3]


def test_fields_of_a_target_are_packed_in_the_order_of_the_source() -> None:
    delayed, (rows, cols) = torch.zeros(3, 7), (5, 9)
    q, t, scale_inv, amax = (torch.zeros(shape) for shape in ((11, 13), (17, 19), (23, 29), (31, 37)))
    tensors = {"codes": q, "transposed": t, "scale_inv": scale_inv, "amax": amax, "delayed_scale": delayed[2]}
    fields: dict[str, float] = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    fields |= {"rows": rows, "cols": cols, "codes_stride": 13, "transposed_stride": 19}
    fields |= {"scale_row_stride": 29, "scale_col_stride": 1}
    target = CastTarget(Scaling(torch.float8_e5m2, (2, 3), True, 1, delayed, 2), q, t, scale_inv, amax)
    of_float8 = {"amax_row_stride": 37, "amax_col_stride": 1, "tile_rows": 2, "tile_cols": 3, "limit": 57344.0 / 2}
    of_float8 |= {"is_e8m0": False, "is_e5m2": True, "power_of_two": True}
    assert described(target, (rows, cols)) == codes.TARGET.pack(**fields, **of_float8)
    scaling = Scaling(E2M1.dtype, (16, 16), False, 0, delayed, 2, rotation=3, seed=4, place=(6, 7))
    of_e2m1 = {
        "block_lanes": 16,
        "lanes_are_columns": False,
        "rotation": 3,
        "seed": 4,
        "first_lane": 6,
        "first_term": 7,
    }
    packed = described_packed(target._replace(scaling=scaling), (rows, cols))
    assert packed == codes.PACKED.pack(**fields, **of_e2m1, limit=E2M1.limit)


@pytest.mark.parametrize(("name", "load"), [("cast", codes.compiled), ("nvfp4", codes.compiled_packed)])
def test_functions_take_the_parameters_of_their_source(name: str, load: Callable[[Tensor], CDLL | None]) -> None:
    functions, source = load(torch.ones(1)), Path(codes.__file__).with_name(f"{name}.cpp").read_text(encoding="utf-8")
    declared = re.findall(r'^extern "C" \w+ (octavo_\w+)\(([^)]*)\)', source, re.MULTILINE)
    assert functions is not None and declared
    for function, parameters in declared:
        types = [parameter.split()[-1 if "*" in parameter else 0] for parameter in parameters.split(",")]
        numbers = {"int": c_int, "int64_t": c_int64, "*s": c_char_p, "*t": c_char_p}
        assert getattr(functions, function).argtypes == [numbers.get(of, c_void_p) for of in types], function
