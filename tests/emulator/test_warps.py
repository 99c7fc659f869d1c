"""The values that lanes of a warp read from each other, against the manual's words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import emulator
from tests.support.ptx import compute, launch

VALUES = np.random.default_rng(0).integers(0, 1 << 32, 128, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize(
    ("mode", "clamp", "other"),
    [
        ("up", 0, lambda lane, by: lane - by if by <= lane else lane),
        ("bfly", 31, lambda lane, by: lane ^ by),
        ("idx", 31, lambda lane, by: by),
    ],
)
def test_shuffles(mode: str, clamp: int, other: Callable[[int, int], int]) -> None:
    """Lanes shuffle by one number of all lanes, and by each lane's own, of which five bits count."""
    for by in (0, 1, 3, 16, 31, VALUES):
        got = compute(f"shfl.sync.{mode}.b32", VALUES, by, clamp, -1)
        steps = np.broadcast_to(by, 128) & 31
        want = [VALUES[lane // 32 * 32 + other(lane % 32, int(step))] for lane, step in enumerate(steps)]
        assert got.tolist() == want


@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_reductions(name: str, kind: str) -> None:
    operand = VALUES.view(np.int32) if kind == "s32" else VALUES
    rows = operand.reshape(4, 32)
    want = rows.sum(1, dtype=operand.dtype) if name == "add" else getattr(rows, name)(axis=1)
    assert (compute(f"redux.sync.{name}.{kind}", VALUES, -1) == np.repeat(want, 32).view(np.uint32)).all()


def test_reductions_of_floats_pass_over_nan() -> None:
    numbers = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    numbers[::7], numbers[96:] = np.nan, -np.nan
    for name, values in {"max": numbers, "max.abs": np.abs(numbers)}.items():
        got = compute(f"redux.sync.{name}.f32", numbers, -1, target="sm_100a").reshape(4, 32)
        assert (got[:3] == np.nanmax(values[:96].reshape(3, 32), 1, keepdims=True)).all()
        assert (got[3].view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize(
    "name",
    [
        "redux.sync.add.s32 %r1, %t",
        "vote.sync.ballot.b32 %r1, %p1",
        "elect.sync %r1|%p2",
        "bar.warp.sync",
        "shfl.sync.up.b32 %r1, %t, 1, 0",
    ],
)
def test_of_some_lanes(name: str) -> None:
    """All lanes of a warp come, and the instruction names them all."""
    launch(f"{name}, -1; mov.b32 %r2, -1; {name}, %r2;")
    with pytest.raises(emulator.Fault, match="lanes are missing"):
        launch(f"setp.lt.u32 %p1, %t, 8; @%p1 {name}, -1;")
    for members in (255, "%r2"):
        with pytest.raises(emulator.Unsupported, match="some of a warp's lanes"):
            launch(f"mov.b32 %r2, 0xFFFF; {name}, {members};")


def test_of_some_warps() -> None:
    out = np.zeros(64, np.uint32)
    end = "mul.wide.u32 %d1, %n, 4; add.s64 %d1, %d1, %a0; @%p1 st.global.b32 [%d1], %r1;"
    launch(f"setp.gt.u32 %p1, %t, 31; @%p1 redux.sync.max.s32 %r1, %t, -1; {end}", out, threads=64)
    assert out.tolist() == [0] * 32 + [63] * 32


def test_ballots_and_elections() -> None:
    got = compute("setp.lt.u32 %p1, %r1, 0x80000000; vote.sync.ballot.b32", VALUES, form="{d}, %p1, -1")
    said = (VALUES < 1 << 31).reshape(4, 32)
    assert (got.reshape(4, 32) == [[sum(int(bit) << place for place, bit in enumerate(row))] for row in said]).all()
    out = np.full(64, 9, np.uint32)
    end = "mul.wide.u32 %d1, %n, 4; add.s64 %d1, %d1, %a0; @%p2 st.global.b32 [%d1], %r1;"
    launch("elect.sync %r1|%p2, 0xFFFFFFFF;" + end, out, threads=32, programs=2)
    assert out[[0, 32]].tolist() == [0, 0] and (out == 9).sum() == 62
