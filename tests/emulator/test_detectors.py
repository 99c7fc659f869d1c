"""Each kind of fault and undefined result on a GPU is found; beside each, the right program passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import emulator
from emulator.memory import GlobalMemory
from tests.support.emulated import Unwritten, all_storages
from tests.support.ptx import launch, module

PLACE = "mul.wide.u32 %d1, %n, 4; add.s64 %d1, %d1, %a0;"  # of a thread's 32 bits in the first array


def finds(message: str, body: str, *arrays: np.ndarray, **options: Any) -> None:
    with pytest.raises(emulator.Fault, match=message):
        launch(body, *arrays, **options)


def words(count: int = 32) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


# --- global memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "access",
    ["ld.global.b32 %r1, [%d1+{}]", "st.global.b32 [%d1+{}], %r1", "red.global.gpu.relaxed.max.s32 [%d1+{}], %r1"],
)
def test_bounds_of_global_memory(access: str) -> None:
    assert launch(f"{PLACE}{access.format(0)};", words())
    finds("out of bounds: 4 bytes .* by 1 lanes", f"{PLACE}{access.format(4)};", words())
    finds("out of bounds", f"{PLACE}{access.format(-4)};", words())
    finds("misaligned access of 4 bytes", f"{PLACE}{access.format(2)};", words())


def test_vectors_in_global_memory() -> None:
    data = source()
    body = "mul.wide.u32 %d1, %n, 16; add.s64 %d1, %d1, %a0; st.global.v4.b32 [%d1+{}], {{%t, %t, %t, %t}};"
    launch(body.format(0), data)
    assert (data == np.repeat(np.arange(32), 4)).all()
    finds("misaligned access of 16 bytes", body.format(4), data)
    finds("out of bounds: 16 bytes", body.format(16), data)


def test_a_masked_access_is_not_checked() -> None:
    data = words(20)
    launch(f"{PLACE} setp.lt.u32 %p1, %t, 20; @%p1 ld.global.b32 %r1, [%d1]; @%p1 st.global.b32 [%d1], 3;", data)
    assert (data == 3).all()


def test_two_lanes_write_different_values_to_one_place() -> None:
    launch("st.global.b32 [%a0], 5;", words())
    finds("race", "st.global.b32 [%a0], %t;", words())
    finds("race", "st.shared.b32 [memory], %t;", shared=64)


def test_global_memory_that_nobody_wrote() -> None:
    load = f"{PLACE} ld.global.b32 %r1, [%d1];"
    launch(f"{PLACE} st.global.b32 [%d1], %t;{load}", words(), unwritten=[0])
    for stores in ("", "setp.gt.u32 %p1, %t, 0; @%p1 st.global.b32 [%d1], %t;"):
        finds("nobody wrote", f"{PLACE} {stores} {load}", words(), unwritten=[0])


def read_tensor(tensor: torch.Tensor, memory: Unwritten, is_argument: bool) -> None:
    """A launch that reads the tensor's first bytes."""
    spans = memory.spans([tensor.untyped_storage()] if is_argument else [])
    global_memory = GlobalMemory(spans, more=lambda: memory.spans(all_storages()))
    values = [tensor.data_ptr().to_bytes(8, "little")]
    emulator.run(module("ld.global.b32 %r1, [%a0];", 1), (1, 1, 1), values, 0, global_memory, emulator.Options())


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_argument", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(64, dtype=torch.int32),
        lambda: torch.empty(64, dtype=torch.uint8).view(torch.int32),
        lambda: torch.zeros(64, dtype=torch.int32).new_empty(64)[:32],
        lambda: torch.empty_like(torch.zeros(4, 4)),
    ],
)
def test_tensors_that_nobody_wrote(make: Any, is_argument: bool) -> None:
    with Unwritten() as memory:
        tensor = make()
        with pytest.raises(emulator.Fault, match="nobody wrote"):
            read_tensor(tensor, memory, is_argument)
        tensor.view(-1)[1:].zero_()
        with pytest.raises(emulator.Fault, match="nobody wrote"):
            read_tensor(tensor, memory, is_argument)
        tensor.view(-1)[:1].fill_(3)
        read_tensor(tensor, memory, is_argument)
        read_tensor(torch.zeros(4), memory, is_argument)


# --- shared memory ----------------------------------------------------------------------------------------------------

SHARED = "mul.lo.s32 %r9, %t, 4; mov.b32 %r8, memory; add.s32 %r9, %r9, %r8;"  # %r9: a thread's 32 bits


def test_bounds_of_shared_memory() -> None:
    store = f"{SHARED} st.shared.b32 [%r9+{{}}], %t;"
    launch(store.format(0), shared=128)
    finds(r"out of bounds: shared bytes 4\.\.131 of 128", store.format(4), shared=128)
    finds(r"out of bounds: shared bytes 0\.\.127 of 126", store.format(0), shared=126)
    finds("out of bounds: shared bytes -4", store.format(-4), shared=128)
    finds("misaligned access of 4", store.format(2), shared=136)


def test_shared_memory_that_nobody_wrote() -> None:
    load = f"{SHARED} ld.shared.b32 %r1, [%r9];"
    finds("nobody wrote shared bytes that are read, of the 4 at 0", load, shared=128)
    all_but_one = f"{SHARED} setp.lt.u32 %p1, %t, 31; @%p1 st.shared.b32 [%r9], %t; {load}"
    finds("nobody wrote .* the 4 at 124", all_but_one, shared=128)
    finds("nobody wrote", f"{SHARED} st.shared.b8 [%r9], %h1; {load}", shared=128)
    finds("nobody wrote", "atom.shared.add.u32 %r1, [memory], 1;", shared=128)


def races(*steps: str, schedule: str = "together") -> None:
    """Steps of two warps, each on its thread's own or on its neighbour warp's 32 bits, with barriers only between."""
    launch(
        f"""{SHARED} xor.b32 %r7, %t, 32; mul.lo.s32 %r7, %r7, 4; add.s32 %r7, %r7, %r8; // %r7: the other warp's
        setp.lt.u32 %p1, %t, 32; {" ".join(steps)}""",
        threads=64,
        shared=256,
        schedule=schedule,
    )


OWN, OTHER = "st.shared.b32 [%r9], %t;", "st.shared.b32 [%r7], %t;"
READ, BARRIER = "ld.shared.b32 %r1, [%r7];", "bar.sync 0;"
LOOK_AT, ADD = "ld.shared.b32 %r1, [memory];", "atom.shared.add.u32 %r1, [memory], 1;"
RACES = {
    "read after write": (OWN, BARRIER, READ),
    "write after read": (OWN, BARRIER, READ, BARRIER, "st.shared.b32 [%r9], %r9;"),
    "write after write": (OWN, BARRIER, OTHER),
    "write after a read by both": (OWN, BARRIER, LOOK_AT, BARRIER, "@%p1 st.shared.b32 [memory], 1;"),
    "write by the other after a read by both": (OWN, BARRIER, LOOK_AT, BARRIER, "@!%p1 st.shared.b32 [memory], 1;"),
    "a read after an atomic": (OWN, BARRIER, ADD, BARRIER, LOOK_AT),
    "an atomic after a read": (OWN, BARRIER, READ, BARRIER, ADD),
}


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize("steps", RACES.values(), ids=RACES)
def test_races_between_warps(steps: tuple[str, ...], schedule: str) -> None:
    races(*steps, schedule=schedule)
    for place in [place for place, step in enumerate(steps) if step == BARRIER]:
        left_out = [*steps[:place], *steps[place + 1 :]]
        with pytest.raises(emulator.Fault, match=r"race|nobody wrote"):
            races(*left_out, schedule=schedule)


def test_no_race_within_a_warp_or_between_atomics() -> None:
    races(OWN, "ld.shared.b32 %r1, [%r9];", OWN)
    races(OWN, BARRIER, "atom.shared.add.u32 %r1, [memory], 1;", "atom.shared.add.u32 %r1, [memory], 1;")


def test_a_barrier_of_one_program_is_not_another_s() -> None:
    """Programs meet at barriers by themselves: a barrier that only program 0 reaches orders nothing in program 1."""
    body = f"""{SHARED} {OWN} xor.b32 %r7, %t, 32; mul.lo.s32 %r7, %r7, 4; add.s32 %r7, %r7, %r8;
        setp.lt.u32 %p2, %c, {{}}; @!%p2 bra go; bar.sync 0; go: {READ}"""
    launch(body.format(2), threads=64, programs=2, shared=256)
    finds("race", body.format(1), threads=64, programs=2, shared=256)


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_matrices_are_checked_too(schedule: str) -> None:
    rows = "mul.lo.s32 %r9, %t, 16; mov.b32 %r8, memory; add.s32 %r9, %r9, %r8; and.b32 %r7, %r9, 2047;"
    matrix = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];"
    finds("nobody wrote", rows + matrix, shared=512, schedule=schedule)
    finds("misaligned", f"{rows} add.s32 %r9, %r9, 8; {matrix}", shared=1024, schedule=schedule)
    finds("lanes are missing", f"{rows} setp.lt.u32 %p1, %t, 16; @%p1 {matrix}", shared=1024, schedule=schedule)


# --- asynchronous copies ----------------------------------------------------------------------------------------------

COPY = """and.b32 %r9, %t, 31; mul.lo.s32 %r9, %r9, 16; mov.b32 %r8, memory; add.s32 %r9, %r9, %r8;
mul.wide.u32 %d1, %n, 16;
add.s64 %d1, %d1, %a0; cp.async.cg.shared.global [%r9], [%d1], 16;"""
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group {};"
LOOK = "ld.shared.b32 %r1, [%r9]; mul.wide.u32 %d2, %n, 4; add.s64 %d2, %d2, %a1; st.global.b32 [%d2], %r1;"


def source() -> np.ndarray:
    """Numbers that begin at a multiple of 16."""
    data = np.arange(132, dtype=np.uint32)
    return data[-data.ctypes.data // 4 % 4 :][:128]


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_a_copy_that_is_read_before_its_wait(schedule: str) -> None:
    data, out = source(), words()
    launch(COPY + COMMIT + WAIT.format(0) + LOOK, data, out, shared=512, schedule=schedule)
    assert (out == data[::4]).all()
    for wait in ("", COMMIT, COMMIT + WAIT.format(1), WAIT.format(0)):
        body = COPY + wait + LOOK
        finds("a copy under way writes shared bytes that are read", body, data, out, shared=512, schedule=schedule)


def test_a_copy_that_other_warps_read_without_a_barrier() -> None:
    copy = COPY.replace("cp.async.cg", "setp.lt.u32 %p1, %t, 32; @%p1 cp.async.cg")
    body = f"{copy} {COMMIT} {WAIT.format(0)} {{}} @!%p1 ld.shared.b32 %r1, [%r9];"
    launch(body.format("bar.sync 0;"), source(), threads=64, shared=512)
    finds("race", body.format(""), source(), threads=64, shared=512)


def test_a_store_where_a_copy_will_land() -> None:
    finds("race: a copy under way", COPY + COMMIT + "st.shared.b32 [%r9], 1;", source(), shared=512)
    finds("race: a copy under way", COPY + COMMIT + "cp.async.cg.shared.global [%r9], [%d1], 16;", source(), shared=512)


def test_a_copy_reads_as_late_as_its_wait() -> None:
    """A copy takes what is written to its source after it began."""
    body = f"{COPY} {COMMIT} st.global.b32 [%d1], 77; {WAIT.format(0)} {LOOK}"
    data, out = source(), words()
    launch(body, data, out, shared=512)
    assert (out == 77).all()


def test_groups_of_copies_end_in_their_order() -> None:
    again = "add.s32 %r9, %r9, 512; cp.async.cg.shared.global [%r9], [%d1], 16;"
    body = f"{COPY}{COMMIT}{again}{COMMIT}{WAIT.format(1)} add.s32 %r9, %r9, {{}}; {LOOK}"
    launch(body.format(-512), source(), words(), shared=1024)
    finds("a copy under way", body.format(0), source(), words(), shared=1024)


def test_a_masked_copy_writes_zeros_and_reads_nothing() -> None:
    out = words()
    masked = COPY.replace("], 16;", "], 16, %r5;")
    body = f"setp.lt.u32 %p1, %t, 16; selp.b32 %r5, 16, 0, %p1; {masked} {COMMIT} {WAIT.format(0)} {LOOK}"
    data = source()[:64]
    launch(body, data, out, shared=512)
    assert (out == np.where(np.arange(32) < 16, np.resize(data[::4], 32), 0)).all()
    finds("out of bounds", f"{COPY} {COMMIT} {WAIT.format(0)}", data, shared=512)


# --- who runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["together", "programs", "warps"])
@pytest.mark.parametrize(
    "body",
    [
        "setp.lt.u32 %p1, %t, 32; @%p1 bar.sync 0;",  # of two warps one
        "setp.lt.u32 %p1, %t, 40; @%p1 bar.sync 0;",  # part of a warp
        "setp.lt.u32 %p1, %t, 32; @%p1 ret; bar.sync 0;",  # the others have ended
        "setp.lt.u32 %p1, %t, 32; @%p1 bra other; bar.sync 0; bra done; other: bar.sync 0; done:",  # two barriers
        "setp.lt.u32 %p1, %t, 32; @%p1 bar.sync 0; bar.sync 0;",
    ],
)
def test_a_barrier_that_not_all_reach(body: str, schedule: str) -> None:
    finds("a barrier that not all reach", body, threads=64, programs=2, schedule=schedule)


@pytest.mark.parametrize("schedule", ["together", "programs", "warps"])
def test_a_loop_that_does_not_end(schedule: str) -> None:
    finds("more than 3000 instructions", "again: bra again;", schedule=schedule, most=3000)
    assert emulator.Options().most < 10**6  # seconds


def test_orders_are_random_and_repeatable() -> None:
    """Orders are drawn by a seed: programs, and lanes in one atomic, take tickets in some order."""
    body = f"{PLACE} atom.global.gpu.relaxed.add.u32 %r1, [%a1], 1; st.global.b32 [%d1], %r1;"
    tickets = []
    for seed in (0, 0, 1):
        out = words(32 * 8)
        launch(body, out, np.zeros(4, np.uint32), programs=8, schedule="warps", seed=seed)
        assert sorted(out.tolist()) == list(range(256))
        tickets.append(out.tolist())
    assert tickets[0] == tickets[1] != tickets[2] and tickets[0] != sorted(tickets[0])


@pytest.mark.parametrize("schedule", ["programs", "warps"])
def test_what_only_some_orders_show(schedule: str) -> None:
    """Whoever comes last is to see all sums; a program that looks too soon does not, in most orders."""
    begin, add = "setp.eq.u32 %p1, %t, 0;", "@%p1 red.global.gpu.relaxed.add.f32 [%a0], 0f3F800000;"
    ticket = "@%p1 atom.global.gpu.acq_rel.add.u32 %r1, [%a1], 1;"
    tail = "@!%p1 mov.b32 %r1, 0; setp.eq.s32 %p2, %r1, 3;"
    tail += " @%p2 ld.global.cg.b32 %r2, [%a0]; @%p2 st.global.b32 [%a2], %r2;"
    wrong = 0
    for seed in range(10):
        sums, tickets, out = np.zeros(4, np.float32), np.zeros(4, np.uint32), np.zeros(4, np.float32)
        launch(begin + add + ticket + tail, sums, tickets, out, programs=4, schedule=schedule, seed=seed)
        assert out[0] == 4
        launch(begin + ticket + add + tail, sums * 0, tickets * 0, out, programs=4, schedule=schedule, seed=seed)
        wrong += out[0] != 4
    assert wrong
