"""What the lanes of a warp see of each other, against the manual's words."""

from __future__ import annotations

import numpy as np
import pytest

import emulator
from tests.support.ptx import compute, launch

VALUES = np.random.default_rng(0).integers(0, 1 << 32, 128, dtype=np.uint64).astype(np.uint32)


def shuffled(mode: str, lane: int, by: int, clamp: int) -> tuple[int, bool]:
    """The lane read, and whether it is in range: the manual's pseudocode."""
    mask, bound = clamp >> 8 & 31, clamp & 31
    most, least = (lane & mask) | (bound & ~mask), lane & mask
    other = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | (by & ~mask)}[mode]
    inside = other >= most if mode == "up" else other <= most
    return (other if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [0, 0b11000 << 8, 0b10000 << 8])
def test_shuffles(mode: str, segment: int) -> None:
    for by in (0, 1, 3, 16, 31):
        clamp = segment | (0 if mode == "up" else 31)
        got = compute(f"shfl.sync.{mode}.b32", VALUES, by, clamp, -1)
        inside = compute(f"shfl.sync.{mode}.b32", VALUES, by, clamp, -1, form="_|{d}, {s}", out=bool)
        want = [shuffled(mode, lane % 32, by, clamp) for lane in range(128)]
        assert got.tolist() == [VALUES[lane // 32 * 32 + other] for lane, (other, _) in enumerate(want)]
        assert inside.tolist() == [one for _, one in want]


@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_reductions(name: str, kind: str) -> None:
    given = VALUES.view(np.int32) if kind == "s32" else VALUES
    rows = given.reshape(4, 32)
    want = rows.sum(1, dtype=given.dtype) if name == "add" else getattr(rows, name)(axis=1)
    assert (compute(f"redux.sync.{name}.{kind}", VALUES, -1) == np.repeat(want, 32).view(np.uint32)).all()


def test_reductions_of_floats_pass_over_nan() -> None:
    given = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    given[::7], given[96:] = np.nan, -np.nan
    got = compute("redux.sync.max.f32", given, -1, target="sm_100a").reshape(4, 32)
    assert (got[:3] == np.nanmax(given[:96].reshape(3, 32), 1, keepdims=True)).all()
    assert (got[3].view(np.uint32) == 0x7FFFFFFF).all()


def test_of_some_lanes() -> None:
    """The lanes that are named take part; others that come are a fault."""
    out = np.zeros(32, np.int32)
    end = "mul.wide.u32 %d1, %n, 4; add.s64 %d1, %d1, %a0; @%p1 st.global.b32 [%d1], %r1;"
    body = "setp.lt.u32 %p1, %t, 8; @%p1 redux.sync.{}.s32 %r1, %t, {};"
    for name, want in (("add", 28), ("max", 7), ("min", 0)):
        launch(body.format(name, 255) + end, out)
        assert out.tolist() == [want] * 8 + [0] * 24
    for name in ("redux.sync.add.s32 %r1, %t", "vote.sync.ballot.b32 %r1, %p1", "elect.sync %r1|%p2"):
        for members in (127, 511):
            with pytest.raises(emulator.Fault, match="members are not the lanes"):
                launch(f"setp.lt.u32 %p1, %t, 8; @%p1 {name}, {members};")
    with pytest.raises(emulator.Fault, match="lanes are missing"):
        launch("setp.lt.u32 %p1, %t, 8; @%p1 shfl.sync.bfly.b32 %r1, %t, 1, 31, -1;")


def test_ballots_and_elections() -> None:
    got = compute("setp.lt.u32 %p1, %r1, 0x80000000; vote.sync.ballot.b32", VALUES, form="{d}, %p1, -1")
    said = (VALUES < 1 << 31).reshape(4, 32)
    assert (got.reshape(4, 32) == [[sum(int(bit) << place for place, bit in enumerate(row))] for row in said]).all()
    out = np.zeros(64, np.uint32)
    end = "mul.wide.u32 %d1, %n, 4; add.s64 %d1, %d1, %a0; @%p2 st.global.b32 [%d1], %r1;"
    launch("setp.gt.u32 %p2, %t, 5; @%p2 elect.sync %r1|%p2, 0xFFFFFFC0;" + end, out, threads=32, programs=2)
    assert out[[6, 38]].tolist() == [6, 6] and out.sum() == 12
