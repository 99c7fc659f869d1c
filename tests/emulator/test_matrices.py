"""Matrix instructions: the lane of each element, by the PTX manual, and what may run before a product has ended."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulator
from tests.support.ptx import launch

FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def small(shape: tuple[int, int], dtype: Any, seed: int) -> np.ndarray:
    """Integers from -4 to 4, whose products any tensor core adds exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32).T


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 16 bytes."""
    raw = np.zeros(data.nbytes + 16, np.uint8)
    raw = raw[-raw.ctypes.data % 16 :][: data.nbytes]
    raw[:] = data.view(np.uint8).reshape(-1)
    return raw


def load(first: int, count: int, array: int, access: str = "ld.global.b32 %r{0}, [%d9+{1}];") -> str:
    """Registers %r{first}... of each thread from its 32-bit words of an array."""
    place = f"mul.wide.u32 %d9, %n, {4 * count}; add.s64 %d9, %d9, %a{array};"
    return " ".join([place, *(access.format(first + index, 4 * index) for index in range(count))])


store = partial(load, access="st.global.b32 [%d9+{1}], %r{0};")  # the same to the array


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + index}" for index in range(count)) + "}"


# --- mma.sync ---------------------------------------------------------------------------------------------------------


def factors(codes: np.ndarray) -> np.ndarray:
    """Return the factors that E8M0's codes stand for."""
    return np.exp2(codes.astype(np.float32) - 127)


@pytest.mark.parametrize(
    ("kinds", "target", "scaled"),
    [
        (("f16", "f16"), "sm_90a", False),
        (("e4m3", "e5m2"), "sm_89", False),
        (("e5m2", "e4m3"), "sm_120a", False),
        (("e5m2", "e4m3"), "sm_120a", True),
        (("e4m3", "e4m3"), "sm_89", False),
    ],
)
def test_fragments_of_a_warp(kinds: tuple[str, str], target: str, scaled: bool) -> None:
    dtypes = [FP8.get(kind, np.float16) for kind in kinds]
    each = 4 // np.dtype(dtypes[0]).itemsize  # elements of a register
    depth = 8 * each
    a, b, c = small((16, depth), dtypes[0], 0), small((8, depth), dtypes[1], 1), small((16, 8), np.float32, 2)
    thread = np.arange(32)
    row, place = thread[:, None, None] // 4, thread[:, None, None] % 4 * each + np.arange(each)
    number = np.arange(4)[:, None]
    held_a = a[row + number % 2 * 8, place + number // 2 * depth // 2]  # [thread, register, element]
    held_b = b[row, place + number[:2] * depth // 2]
    held_c = c[row[..., 0] + number[:, 0] // 2 * 8, thread[:, None] % 4 * 2 + number[:, 0] % 2]
    out = np.zeros((32, 4), np.float32)
    product = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kinds[0]}.{kinds[1]}.f32"
    product += f" {names(10, 4)}, {names(0, 4)}, {names(4, 2)}, {names(6, 4)}"
    want, scales = exact(a, b), np.random.default_rng(3).integers(120, 135, (32, 2)).astype(np.uint32)
    if scaled:  # of a's rows in the first two lanes of four, of b's in the first
        product = product.replace("col.", "col.kind::mxf8f6f4.block_scale.scale_vec::1X.")
        product = product.replace(".f32 ", ".f32.ue8m0 ") + ", %r14, {0, 0}, %r15, {0, 0}"
        rows, columns = np.concatenate([scales[::4, 0], scales[1::4, 0]]), scales[::4, 1]
        want = want * factors(rows)[:, None] * factors(columns)
        scales |= 0xABCD00  # other bytes
    body = f"{load(0, 4, 0)} {load(4, 2, 1)} {load(6, 4, 2)} {load(14, 2, 4)} {product};"
    arrays = aligned(held_a), aligned(held_b), aligned(held_c), out, scales
    launch(body + store(10, 4, 3), *arrays, target=target)
    want += c
    for other in ("{1, 0}", "{0, 1}") if scaled else ():
        with pytest.raises(emulator.Unsupported, match="scales in other bytes or lanes"):
            launch(body.replace("{0, 0};", f"{other};"), *arrays, target=target)
    assert (out == want[row[..., 0] + number[:, 0] // 2 * 8, thread[:, None] % 4 * 2 + number[:, 0] % 2]).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposes", [False, True])
def test_matrices_in_shared_memory(count: int, transposes: bool) -> None:
    """ldmatrix: of matrix m a lane gets row lane / 4, columns lane % 4 * 2 and the next; stmatrix is its inverse."""
    memory = aligned(np.random.default_rng(0).integers(0, 1 << 16, (count, 8, 8)).astype(np.uint16))
    rows = f"mov.b32 %r50, memory; and.b32 %r51, %t, {8 * count - 1}; mul.lo.s32 %r51, %r51, 16;"
    fill = f"{rows} add.s32 %r50, %r50, %r51; mul.wide.u32 %d1, %r51, 1; add.s64 %d1, %d1, %a0;"
    fill += f"ld.global.v4.b32 {names(40, 4)}, [%d1]; st.shared.v4.b32 [%r50], {names(40, 4)};"
    name = f"sync.aligned.m8n8.x{count}{'.trans' if transposes else ''}.shared.b16"
    held, back = np.zeros((32, count), np.uint32), aligned(np.zeros_like(memory))
    again = f"stmatrix.{name} [%r50+512], {names(0, count)}; ld.shared.v4.b32 {names(40, 4)}, [%r50+512];"
    end = "add.s64 %d1, %d1, %a2; sub.s64 %d1, %d1, %a0; st.global.v4.b32 [%d1], {%r40, %r41, %r42, %r43};"
    body = f"{fill} ldmatrix.{name} {names(0, count)}, [%r50]; {store(0, count, 1)} {again} {end}"
    launch(body, memory, held, back, shared=1024)
    matrices = memory.view(np.uint16).reshape(count, 8, 8)
    matrices = matrices.swapaxes(1, 2) if transposes else matrices
    want = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, 32).T
    assert (held == want).all() and (back == memory).all()


# --- wgmma ------------------------------------------------------------------------------------------------------------

SWIZZLED = {128: 1, 64: 2, 32: 3}  # bytes of a row: what descriptors of wgmma say


def image(codes: np.ndarray, swizzle: int) -> np.ndarray:
    """Bytes [rows, swizzle] as they lie in shared memory: 16 bytes trade places by bits of their address."""
    rows, width = codes.shape
    row, byte = np.arange(rows)[:, None], np.arange(width)[None, :]
    at = row * swizzle + byte
    at = at ^ (at >> 7 & swizzle // 16 - 1) << 4
    swizzled = np.zeros(rows * width, np.uint8)
    swizzled[at] = codes
    return swizzled


def descriptor(start: int, swizzle: int, code: int) -> int:
    return (start >> 4) | 1 << 16 | (8 * swizzle >> 4) << 32 | code


def to_shared(array: int, offset: int, size: int) -> str:
    """An array's bytes to shared memory, by 128 threads."""
    lines = []
    for first in range(0, size, 2048):
        lines.append(
            f"mul.wide.u32 %d9, %t, 16; add.s64 %d9, %d9, %a{array}; ld.global.v4.b32 {names(150, 4)}, [%d9+{first}]; "
            f"mul.lo.s32 %r149, %t, 16; mov.b32 %r148, memory; add.s32 %r149, %r149, %r148; "
            f"st.shared.v4.b32 [%r149+{offset + first}], {names(150, 4)};"
        )
    return " ".join(lines)


A_BYTES, B_BYTES = 64 * 128, 64 * 128  # of 128 bytes along K


class Wgmma:
    """A product [64, 64] of 128 bytes along K, in four instructions."""

    def __init__(self, swizzle: int) -> None:
        self.a, self.b = small((64, 128), FP8["e4m3"], 0), small((64, 128), FP8["e5m2"], 1)
        parts = range(0, 128, swizzle)
        self.images = [
            aligned(np.concatenate([image(each.view(np.uint8)[:, k : k + swizzle], swizzle) for k in parts]))
            for each in (self.a, self.b)
        ]
        self.fill = f"{to_shared(0, 0, A_BYTES)} {to_shared(1, A_BYTES, B_BYTES)} bar.sync 0;"
        lines = []
        for k in range(0, 128, 32):
            first = k // swizzle * 64 * swizzle + k % swizzle
            for place, start in enumerate((1024 + first, 1024 + A_BYTES + first)):
                lines.append(f"mov.b64 %d{place + 1}, {descriptor(start, swizzle, SWIZZLED[swizzle] << 62)};")
            name = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2"
            lines.append(f"{name} {names(0, 32)}, %d1, %d2, {min(k, 1)}, 1, 1;")
        self.products = f"wgmma.fence.sync.aligned; {' '.join(lines)}"

    def launch(self, body: str, **options: Any) -> np.ndarray:
        thread, number = np.arange(128)[:, None], np.arange(32)
        out, product = np.zeros((128, 32), np.float32), np.zeros((64, 64), np.float32)
        launch(f"{body} {store(0, 32, 2)}", *self.images, out, threads=128, shared=A_BYTES + B_BYTES, **options)
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (number // 2 % 2)
        product[row, 8 * (number // 4) + thread % 4 * 2 + number % 2] = out
        return product


COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("options", [{}, {"schedule": "warps"}])
@pytest.mark.parametrize("swizzle", SWIZZLED)
def test_products_of_a_warpgroup(swizzle: int, options: dict[str, Any]) -> None:
    one = Wgmma(swizzle)
    assert (one.launch(f"{one.fill} {one.products} {COMMIT} {WAIT}", **options) == exact(one.a, one.b)).all()


def test_registers_of_a_product_before_its_wait() -> None:
    one = Wgmma(128)
    begin = f"{one.fill} {one.products}"
    for body in (
        begin,
        begin + COMMIT,
        begin + COMMIT + "add.f32 %r5, %r5, %r5;" + WAIT,
        begin + COMMIT + "mov.b32 %r5, 0;" + WAIT,
        begin + COMMIT + "wgmma.wait_group.sync.aligned 1;",
        begin + WAIT,  # not committed
    ):
        with pytest.raises(emulator.Fault, match="that a product under way will write is used before a wait"):
            one.launch(body)
    one.launch(begin + COMMIT + "add.f32 %r40, %r41, %r41;" + WAIT)  # another register


@pytest.mark.parametrize("schedule", ["together", "warps"])
@pytest.mark.parametrize(
    "write", ["st.shared.b32 [memory+{}], 0;", "cp.async.cg.shared.global [memory+{}], [%a0], 16;"]
)
def test_a_buffer_that_a_product_reads_is_written(write: str, schedule: str) -> None:
    one = Wgmma(128)
    for place in (0, A_BYTES):
        body = f"{one.fill} {one.products} {COMMIT} setp.eq.u32 %p1, %t, 0; @%p1 {write.format(place)}"
        with pytest.raises(emulator.Fault, match=r"race|copy under way"):
            one.launch(f"{body} {WAIT}", schedule=schedule)
    end = f"{WAIT} bar.sync 0; setp.eq.u32 %p1, %t, 0; @%p1 {write.format(0)}"
    one.launch(f"{one.fill} {one.products} {COMMIT} {end}", schedule=schedule)


def test_a_warpgroup_s_wait_is_for_itself_alone() -> None:
    """After its wait any warp of a warpgroup may write what the product read, another one's only after a barrier."""
    one = Wgmma(128)
    product = f"{one.fill} {one.products} {COMMIT} {WAIT}"
    write = "setp.eq.u32 %p1, %t, {}; @%p1 st.shared.b32 [memory], 0;"
    one.launch(product + write.format(64))
    for fill in ("ld.global.v4", "st.shared.v4"):  # of the first warpgroup
        product = product.replace(fill, f"@%p8 {fill}")
    for barrier, is_race in (("", True), ("bar.sync 0;", False)):
        with pytest.raises(emulator.Fault, match="race") if is_race else nullcontext():
            body = f"setp.lt.u32 %p8, %t, 128; {product} {barrier} {write.format(192)}"
            launch(body, *one.images, threads=256, shared=A_BYTES + B_BYTES)


def test_operands_that_are_not_there() -> None:
    one = Wgmma(128)
    for left_out in (one.fill[: one.fill.index("mul.wide", 10)] + "bar.sync 0;", "bar.sync 0;"):
        with pytest.raises(emulator.Fault, match="nobody wrote"):
            one.launch(f"{left_out} {one.products} {COMMIT} {WAIT}")
    with pytest.raises(emulator.Fault, match="race"):
        one.launch(f"{one.fill.replace('bar.sync 0;', '')} {one.products} {COMMIT} {WAIT}")
    first = descriptor(1024, 128, 1 << 62)
    with pytest.raises(emulator.Fault, match="out of bounds"):
        far = one.products.replace(str(first), str(descriptor(1024 + A_BYTES + 4096, 128, 1 << 62)))
        one.launch(f"{one.fill} {far}")
    for other in (first | 1 << 49, first & (1 << 62) - 1):
        with pytest.raises(emulator.Unsupported, match="swizzle or base offset"):
            one.launch(f"{one.fill} {one.products.replace(str(first), str(other))}")
    with pytest.raises(emulator.Fault, match="a descriptor differs"):
        one.launch(f"{one.fill} {one.products.replace(f'mov.b64 %d1, {first}', 'cvt.u64.u32 %d1, %t')}")


# --- tcgen05 ----------------------------------------------------------------------------------------------------------

ALLOCATE = "setp.lt.u32 %p1, %t, 32; @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [memory+{}], 64;"
ALLOCATE += " bar.sync 0;"
BARRIER = 128 * 32 + 64 * 32  # its place in shared memory; the address of tensor memory is 16 bytes on
SHAPE = (1 << 4) | (64 >> 3) << 17 | (128 >> 4) << 24  # float32, e4m3 both, 128 x 64


class Tcgen05:
    """A product [128, 64] of 32 bytes along K, twice: d = a . b, then d += a . b."""

    def __init__(self) -> None:
        self.a, self.b = small((128, 32), FP8["e4m3"], 0), small((64, 32), FP8["e4m3"], 1)
        self.images = [aligned(image(each.view(np.uint8), 32)) for each in (self.a, self.b)]
        first, second = (descriptor(start, 32, 6 << 61) for start in (1024, 1024 + 4096))
        self.begin = (
            f"{to_shared(0, 0, 4096)} {to_shared(1, 4096, 2048)} {ALLOCATE.format(BARRIER + 16)}"
            f"setp.eq.u32 %p2, %t, 0; @%p2 mbarrier.init.shared::cta.b64 [memory+{BARRIER}], 1; bar.sync 0;"
            f"ld.shared.b32 %r99, [memory+{BARRIER + 16}]; mov.b64 %d1, {first}; mov.b64 %d2, {second};"
        )
        mma = f"@%p2 tcgen05.mma.cta_group::1.kind::f8f6f4 [%r99], %d1, %d2, {SHAPE}, "
        self.products = f"setp.ne.u32 %p3, %t, %t; {mma} %p3; {mma} %p2;"
        self.commit = f"@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [memory+{BARRIER}];"
        self.wait = f"again: mbarrier.try_wait.parity.shared::cta.b64 %p4, [memory+{BARRIER}], 0; @!%p4 bra again;"
        self.look = "and.b32 %r98, %t, 96; shl.b32 %r98, %r98, 16; add.s32 %r98, %r98, %r99; "
        self.look += f"tcgen05.ld.sync.aligned.32x32b.x64.b32 {names(0, 64)}, [%r98]; tcgen05.wait::ld.sync.aligned;"

    def launch(self, body: str, *more: np.ndarray, **options: Any) -> np.ndarray:
        out = np.zeros((128, 64), np.float32)
        launch_options = {"shared": BARRIER + 32, "target": "sm_100a", "threads": 128} | options
        launch(f"{body} {store(0, 64, 2)}", *self.images, out, *more, **launch_options)
        return out


class Scaled(Tcgen05):
    """The same by scales of blocks: a row's two are bytes of its cell, in columns behind the result's."""

    TO_CELLS = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%r98+64], {%r0, %r1, %r2, %r3}; "
    TO_CELLS += "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r98+68], {%r4, %r5};"
    SHAPES = tuple(0x08800000 | (64 >> 3) << 17 | number << 29 | number << 4 for number in (1, 3))

    def __init__(self, form: str = "scale_vec::1X") -> None:
        super().__init__()
        draw = np.random.default_rng(2).integers
        self.codes = [draw(124, 130, (rows, 4), np.uint8) for rows in (128, 64)]
        cells = [codes.reshape(-1, 32, 4).swapaxes(0, 1).copy().view(np.uint32)[..., 0] for codes in self.codes]
        self.cells = np.concatenate([np.concatenate(cells, 1)] * 4)  # each warp's lanes hold all: [128, 4 + 2]
        self.lane = self.look[: self.look.index("tcgen05")]
        self.begin = self.begin.replace("], 64;", "], 128;")
        self.begin += f"{load(0, 6, 3)} {self.lane} {self.TO_CELLS} tcgen05.wait::st.sync.aligned; bar.sync 0;"
        mma = f"@%p2 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.{form} [%r99], %d1, %d2, "
        self.products = "add.s32 %r96, %r99, 64; add.s32 %r97, %r99, 68; setp.ne.u32 %p3, %t, %t;"
        for shape, adds in zip(self.SHAPES, ("%p3", "%p2"), strict=True):
            self.products += f" {mma} {shape}, [%r96], [%r97], {adds};"

    def launch(self, body: str, *more: np.ndarray, **options: Any) -> np.ndarray:
        return super().launch(body, self.cells, *more, **options)


@pytest.mark.parametrize("options", [{}, {"schedule": "warps"}, {"schedule": "programs"}])
@pytest.mark.parametrize("form", ["scale_vec::1X", "block32"])
def test_scaled_products(form: str, options: dict[str, Any]) -> None:
    one = Scaled(form)
    out = one.launch(one.begin + one.products + one.commit + one.wait + one.look, **options)
    both = sum(np.outer(*(factors(codes[:, number]) for codes in one.codes)) for number in (1, 3))
    assert (out == exact(one.a, one.b) * both).all()


def test_what_may_not_be_done_with_scales() -> None:
    one = Scaled()
    begin, after = one.begin + one.products, one.commit + one.wait + one.look
    write = "bar.sync 0; mov.b32 %r0, 0;" + one.lane + one.TO_CELLS
    faults = {
        begin.replace(one.TO_CELLS, "") + after: "nobody wrote",
        begin + write + after: "scales that a product under way reads were written",
        begin.replace("tcgen05.st", "mad.lo.s32 %r0, %t, 256, %r0; tcgen05.st", 1) + after: "hold different scales",
        begin.replace("%r99, 68;", "%r99, 127;") + after: "out of bounds",
        begin.replace("%r99, 68;", "%r99, 65604;") + after: "out of bounds",
    }
    for body, message in faults.items():
        with pytest.raises(emulator.Fault, match=message):
            one.launch(body)
    one.launch(begin + one.commit + one.wait + write + one.look)
    for bit in (0, 6, 8, 13, 23, 24, 28, 31):
        with pytest.raises(emulator.Unsupported, match="instruction descriptor"):
            one.launch(begin.replace(str(one.SHAPES[0]), str(one.SHAPES[0] ^ 1 << bit)) + after)


@pytest.mark.parametrize("schedule", ["together", "programs", "warps"])
def test_a_wait_that_stands_before_what_it_waits_for(schedule: str) -> None:
    """A wait may stand before its event, as in Triton 3.7: one warp jumps behind the others' loop and comes back."""
    one = Tcgen05()
    body = f"{one.begin} setp.lt.u32 %p6, %t, 32; @%p6 bra first; second: {one.wait} {one.look} bra last;"
    out = one.launch(f"{body} first: {one.products} {one.commit} bra second; last:", schedule=schedule, most=3000)
    assert (out == 2 * exact(one.a, one.b)).all()


@pytest.mark.parametrize("schedule", ["together", "warps"])
def test_what_may_not_be_done_with_tensor_memory(schedule: str) -> None:
    one = Tcgen05()
    begin, after = one.begin + one.products, one.commit + one.wait + one.look
    faults = {
        begin + one.commit + one.look: "a product under way does",
        one.begin + one.look: "nobody wrote this tensor memory",
        begin.replace("%p3;", "%p2;") + after: "nobody wrote the tensor memory that a product adds to",
        begin + after.replace("[%r98]", "[%r98+32]"): "out of bounds: column",
        begin + after.replace("and.b32 %r98, %t, 96", "and.b32 %r98, %t, 32"): "another's lanes",
        begin + one.wait + one.look: "more than",  # nobody arrives
        begin.replace("mbarrier.init.", "mbarrier.inval.").replace("], 1;", "];") + after: "no mbarrier was made",
        begin.replace(ALLOCATE.format(BARRIER + 16), f"st.shared.b32 [memory+{BARRIER + 16}], 0;")
        + after: "out of bounds",
        begin + "@%p2 st.shared.b32 [memory], 0;" + after: "race",
    }
    for body, message in faults.items():
        with pytest.raises(emulator.Fault, match=message):
            one.launch(body, schedule=schedule, most=4000)


def test_what_is_read_and_written_in_tensor_memory() -> None:
    one = Tcgen05()
    write = one.look.replace("ld.sync", "st.sync").replace(f"{names(0, 64)}, [%r98]", f"[%r98], {names(0, 64)}")
    fill = " ".join(f"mul.lo.s32 %r{place}, %t, {place + 1};" for place in range(64))
    clear = " ".join(f"mov.b32 %r{place}, 0;" for place in range(64))
    out = one.launch(f"{one.begin} {fill} {write} {clear} {one.look}").view(np.uint32)
    assert (out == np.arange(128)[:, None] * np.arange(1, 65)).all()


def test_phases_of_an_mbarrier() -> None:
    """A wait for the phase before the first one passes; a second phase needs its own arrivals."""
    one = Tcgen05()
    # .shared is .shared::cta, and how Triton 3.6 writes it
    passes = f"mbarrier.try_wait.parity.shared.b64 %p5, [memory+{BARRIER}], {{}}; selp.b32 %r{{}}, 1, 0, %p5;"
    body = one.begin + passes.format(1, 0) + passes.format(0, 1) + one.commit + one.wait + passes.format(1, 2)
    body += one.commit + passes.format(1, 3)
    out = one.launch(body + " ".join(f"mov.b32 %r{place}, 0;" for place in range(4, 64))).view(np.uint32)
    assert (out[:, :4] == [1, 0, 0, 1]).all()
