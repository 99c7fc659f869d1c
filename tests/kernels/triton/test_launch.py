"""Configurations, the scratch that programs share, and that all launches are made in one place."""

import ast
import json
import re
import types
from pathlib import Path

import pytest
import torch

from octavo.granularity import PADDING
from tests.support.casts import ALL, E4M3
from tests.support.damage import damaged_json
from tests.support.triton_cases import assert_counters_are_zero
from tests.support.triton_kernels import TritonKernels

pytestmark = pytest.mark.gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_table(kernels: TritonKernels) -> None:
    launch = kernels.module("launch")
    for kernel, rows in launch.TABLE.items():
        assert rows, kernel
        if "transpose" in kernel:
            assert rows[-1][1] % 32 == 0, f"{kernel}: of large tensors transposed rows fill sectors of 32 bytes"
        limits = [row[0] for row in rows]
        assert limits == sorted(set(limits)), f"{kernel}: sizes must ascend"
        for _, *row in rows:
            config = launch.Config(*row)
            for size in (config.tile_r, config.tile_c):
                assert size.bit_count() == 1 and size <= 2**14, kernel
            assert config.tile_c % PADDING == 0, f"{kernel}: rows are padded"
            assert config.tile_r * config.tile_c <= 2**20, f"{kernel}: more than Triton allows"
            assert config.num_warps in (1, 2, 4, 8, 16) and config.depth >= 1, kernel


def test_config_goes_by_size(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = kernels.module("launch")
    small, large = [16, 32, 1, 4], [64, 64, 2, 8]
    monkeypatch.setitem(launch.TABLE, "some kernel", [[20, *small], [30, *large]])
    configs = [[*launch.config("some kernel", size)] for size in (0, 20, 21, 30, 31, 60)]
    assert configs == [small, small, large, large, large, large]


def test_workspace(kernels: TritonKernels) -> None:
    launch = kernels.module("launch")
    x = torch.empty(0, device=kernels.device)
    work = launch.workspace(x, 5)
    assert work.dtype == torch.int32 and work.device == x.device and work.numel() == launch.WORK
    assert not work.any()
    assert launch.workspace(x, launch.WORK).data_ptr() == work.data_ptr()
    more = launch.workspace(x, launch.WORK + 1)  # for which none is kept
    assert more.numel() > launch.WORK and not more.any() and more.data_ptr() != work.data_ptr()


def test_more_strips_than_there_are_counters(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = kernels.module("launch")
    monkeypatch.setattr(launch, "WORK", 3)
    for workspaces in ("_work", "_pools"):  # those of three numbers go with this test
        monkeypatch.setattr(launch, workspaces, {})
    x = torch.randn(40, 600).to(kernels.device)
    for tile in (ALL, (1, 128)):
        *_, amax, sums = kernels.cast(x, None, 0, E4M3, tile, False, 0, True, 1, True)
        assert amax.max() == x.abs().max()
        assert torch.allclose(sums.double(), x.double().sum(0), rtol=0, atol=1e-4)
    assert_counters_are_zero(kernels)


def test_what_a_stream_captures_has_another_workspace(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be replayed beside later work on its stream, as torch hands the stream out again."""
    launch = kernels.module("launch")
    streams, is_capturing = iter([7, 7, 7, 8]), iter([False, True, True, True])
    monkeypatch.setattr(launch, "_work", {})
    monkeypatch.setattr(launch, "_pools", {})
    monkeypatch.setattr(launch, "current_raw_stream", lambda index: next(streams))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(is_capturing))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    x = types.SimpleNamespace(get_device=lambda: 0, device=torch.device("cpu"))
    eager, first, second, other = (launch.workspace(x, 5).data_ptr() for _ in range(4))
    assert first == second and len({eager, first, other}) == 3


def test_a_step_outside_of_captures_makes_scratch_for_the_next_ones(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More streams capture than a pool has workspaces; a step on the first stream, which has its own, comes between."""
    launch, current = kernels.module("launch"), types.SimpleNamespace(stream=0, captures=False)
    for name in ("_work", "_pools"):
        monkeypatch.setattr(launch, name, {})
    monkeypatch.setattr(launch, "WORK", 3)
    monkeypatch.setattr(launch, "current_raw_stream", lambda index: current.stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current.captures)
    x = types.SimpleNamespace(get_device=lambda: 0, device=torch.device("cpu"))

    def address(stream: int, captures: bool) -> int:
        current.stream, current.captures = stream, captures
        return launch.workspace(x, 1).data_ptr()

    addresses = set()
    for first in range(0, 70, 7):
        addresses |= {address(0, False), *(address(first + i, True) for i in range(7))}
    assert len(addresses) == 1 + 70
    with pytest.raises(RuntimeError, match="run the step once before capturing"):
        for stream in range(70, 170):
            address(stream, True)


@needs_gpu
def test_a_stream_has_its_own_workspace(kernels: TritonKernels) -> None:
    workspace = kernels.module("launch").workspace
    x = torch.empty(0, device=kernels.gpu)
    addresses = {}
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            addresses[stream.cuda_stream] = workspace(x, 5).data_ptr()
            assert workspace(x, 5).data_ptr() == addresses[stream.cuda_stream]
    assert len({*addresses.values()}) == len(addresses) == 3


@needs_gpu
def test_the_first_launch_may_not_be_captured(kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = kernels.module("launch")
    monkeypatch.setattr(launch, "_work", {})
    monkeypatch.setattr(launch, "_pools", {})
    x = torch.randn(4, 4, device=kernels.gpu)
    first_launch = pytest.raises(RuntimeError, match="run the step once before capturing")
    with first_launch, torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.amax(x + 1, ALL)
    assert kernels.amax(x, ALL).item() == x.abs().max()


def test_every_launch_is_made_by_launch() -> None:
    """Every launch goes through ``launch``, which says whether multiply-adds fuse: Triton 3.9 warns of others."""
    root, files = Path(__file__).parents[3], set()
    for file in (file for folder in ("octavo", "tests", "benchmarks") for file in (root / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "triton" in text and re.search(r"\w\[.*\]\(", text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name, grid = ast.unparse(node.func.value), node.func.slice
                if name.endswith("kernel") or (isinstance(grid, ast.Tuple) and name != "dict"):
                    files.add(str(file.relative_to(root)))
    assert files == {"octavo/kernels/triton/launch.py"}


tuned = pytest.importorskip("octavo.kernels.triton.launch")


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that holds the tuned table of a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = tuned.TileTable.tuned_file()
    assert path is not None and path.is_relative_to(tmp_path) and "NVIDIA-H200" in path.name
    path.parent.mkdir()
    return Path(path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"configs": 3}', '{"library": [[[1], [1, 2], true]]}'])
def test_a_spoilt_one_is_not(table_file: Path, content: str) -> None:
    table_file.write_text(content)
    assert tuned.TileTable.read(tuned.TileTable.tuned_file()) == tuned.TileTable.read(None)


def test_a_damaged_one_is_not_or_has_rows(table_file: Path) -> None:
    for seed in range(40):
        table_file.write_bytes(damaged_json(json.loads(tuned.SHIPPED.read_text()), seed))
        table = tuned.TileTable.read(tuned.TileTable.tuned_file())
        assert table.configs.keys() == tuned.TileTable.read(None).configs.keys()
        for rows in table.configs.values():
            assert rows and all(type(number) is int and number > 0 for row in rows for number in row)
            assert {len(row) for row in rows} == {5}


def test_a_tile_holds_the_padding_of_the_transposed_rows_that_it_writes() -> None:
    """A tile of fewer rows than those are padded to would leave codes unwritten, whoever wrote the table's row."""
    for kind in ("norm_cast_transpose", "cast_lines", "norm_cast"):
        with tuned.TileTable.using({kind: [[64, PADDING // 2, 512, 1, 8]]}):
            least = PADDING // 2 if kind == "norm_cast" else PADDING
            assert tuned.config(kind, 20) == tuned.Config(least, 512, 1, 8)


def test_other_kernels_have_another(table_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "configs.json"
    changed.write_text("{}")
    monkeypatch.setattr(tuned, "SHIPPED", changed)
    assert tuned.TileTable.tuned_file() != table_file
