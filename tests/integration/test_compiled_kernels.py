"""The kernels' machine code, made without a GPU and checked by ``compiled`` of benchmarks/."""

import ast
import csv
import importlib
import math

import pytest
import torch

from tests.support.combinations import in_full
from tests.support.processes import ROOT

triton = pytest.importorskip("triton")
compiled = importlib.import_module("benchmarks.machine_code.compiled")
cases = importlib.import_module("benchmarks.machine_code.compiled_cases")
machine_code = importlib.import_module("benchmarks.machine_code.machine_code")
predictions = importlib.import_module("benchmarks.machine_code.predictions")
predicted_products = importlib.import_module("benchmarks.machine_code.predicted_products")
launch = importlib.import_module("octavo.kernels.triton.launch")

KERNELS = ROOT / "octavo/kernels/triton"


with (ROOT / "benchmarks/results/compiled.csv").open(newline="") as file:
    # of each kernel the first call that launches it
    FIRST = {row["kernel"]: (row["op"], row["case"]) for row in reversed(list(csv.DictReader(file)))}


BY_DEFAULT = {"cast_tensor_kernel"}  # and a product below; tests/kernels/triton/test_compiled.py has the PTX of each
EACH_KERNEL = [pytest.param(kernel, marks=[] if kernel in BY_DEFAULT else pytest.mark.full) for kernel in FIRST]


# What a release of Triton misses: docs/kernels.md says so.
BLOCKS = "PerBlock(1, 128) e4m3 . PerBlock(1, 128) e4m3 to bfloat16 [4096, 8192, 4096]"
SPILLS = [("matmul_kernel", "matmul", BLOCKS, "18 spills, 56 bytes of stack")]
GROUPS = "PerBlock(1, 128) e4m3 . the same to bfloat16 [2048, 2048, 16384], terms in 8 groups"


def spills_in_groups(spills: int, stack: int) -> list[tuple[str, ...]]:
    return [("terms_in_groups_kernel", "grouped_matmul", GROUPS, f"{spills} spills, {stack} bytes of stack")]


def spills_of_gradient(
    activation: str, dtype: str, spills: int, stack: int, op: str = "cast", rule: str = " delayed"
) -> tuple[str, ...]:
    case = f"PerTensor() e5m2 transposed{rule} column sum {activation} gradient of {dtype} [4096, 8192]"
    return "cast_tensor_kernel", op, case, f"{spills} spills, {stack} bytes of stack"


KNOWN = {
    ("3.6", "matmul", 89): SPILLS,
    ("3.6", "matmul", 120): SPILLS,
    ("3.6", "grouped", 89): spills_in_groups(23, 72),
    ("3.6", "activations", 120): [
        spills_of_gradient("swiglu", "bfloat16", 29, 96),
        spills_of_gradient("geglu", "bfloat16", 35, 112),
        spills_of_gradient("geglu_tanh", "bfloat16", 33, 104),
        spills_of_gradient("reglu", "bfloat16", 45, 128),
        spills_of_gradient("swiglu", "float32", 26, 80),
        spills_of_gradient("swiglu", "bfloat16", 30, 96, "cast_and_commit", ""),
    ],
    ("3.7", "activations", 120): [spills_of_gradient("swiglu", "float32", 37, 104)],
    ("3.7", "grouped", 100): spills_in_groups(28, 40),
}


def misses(rows: list[tuple[dict[str, object], list[str]]]) -> list[tuple[object, ...]]:
    return [(row["kernel"], row["op"], row["case"], miss) for row, misses in rows for miss in misses]


@pytest.mark.full
@pytest.mark.parametrize("capability", compiled.CAPABILITIES)
@pytest.mark.parametrize("group", compiled.GROUPS)
def test_machine_code(group: str, capability: int) -> None:
    rows = list(compiled.compiled(capability, group))
    release = ".".join(triton.__version__.split(".")[:2])
    assert rows and misses(rows) == KNOWN.get((release, group, capability), [])


@pytest.mark.parametrize("kernel", EACH_KERNEL)
def test_machine_code_of_one_of_each_kernel(kernel: str) -> None:
    rows = list(compiled.compiled(90, compiled.group_of_cases()[FIRST[kernel]], FIRST[kernel]))
    assert kernel in {row["kernel"] for row, _ in rows}, f"{FIRST[kernel]}: run benchmarks compiled, which writes it"
    assert misses(rows) == []


def test_every_kernel_is_compiled() -> None:
    modules = [importlib.import_module(f"octavo.kernels.triton.{file.stem}") for file in KERNELS.glob("[a-z]*.py")]
    jitted = (value for module in modules for value in vars(module).values() if hasattr(value, "raw_src"))
    assert {f.__name__ for f in jitted if f.__name__.endswith("_kernel")} == FIRST.keys()


def test_every_configuration_is_compiled() -> None:
    logs = [(rows * cols).bit_length() for rows, cols in cases.SIZES]
    for kernel, rows in launch.TABLE.items():
        assert {launch.config(kernel, log) for log in logs} == {launch.Config(*row[1:]) for row in rows}


def test_every_op_is_compiled() -> None:
    ops = {op for op, _ in compiled.group_of_cases()}
    kinds = {"cast_two_scalings", "grouped_cast", "norm_cast", "norm_cast_two_scalings"}  # of cast, by what it casts
    assert ops == {*cases.KERNELS, "optimizer_step", *kinds} - {"scales_of_pass"}  # which has no kernel of ours


def test_rows_of_other_groups_and_architectures_stay() -> None:
    others = compiled._others([90], ["matmul", "grouped"])
    assert compiled._others(compiled.CAPABILITIES, compiled.GROUPS) == []
    products = {(row["capability"], row["op"]) for row in others if "matmul" in row["op"]}
    assert products == {(f"sm_{it}", op) for it in (89, 100, 120) for op in ("matmul", "grouped_matmul")}
    assert {row["op"] for row in others if row["capability"] == "sm_90"} >= {"cast", "optimizer_step"}


@pytest.mark.full
def test_narrow_accesses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = torch.empty(1024, 1025, dtype=torch.bfloat16)[:, 1:]
    monkeypatch.setitem(compiled.GROUPS, "narrow", lambda: iter([cases.plain(False, cases.ROW, x=shifted, pad=1)]))
    ((row, missed),) = compiled.compiled(90, "narrow")
    assert row["load_bits"] == "16" and missed == ["loads of [16] bits"]


def test_no_kernel_makes_codes_by_tritons_own_conversion() -> None:
    """``narrow`` makes them: Triton before 3.9 rounds twice for Ada."""
    for file in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
                is_bitcast = any(keyword.arg == "bitcast" for keyword in node.keywords)
                assert is_bitcast or "float8" not in ast.unparse(node.args), f"{file.name}:{node.lineno}"


def test_codes_that_ptxas_12_loses_are_found() -> None:
    """A fault of ptxas 12 is seen: an earlier transposing cast's results on an H100 were a register's leftovers."""
    convert = "cvt.rn.satfinite.e4m3x2.f32 {}, %f1, %f2;\n".format
    pack, read = "mov.b32 %r1, {%rs1, %rs2};\n", "cvt.u32.u16 %r2, %rs{};\n".format
    both = convert("%rs1") + convert("%rs2")
    assert machine_code.lost_codes(both + pack + read(1)) == 1
    for harmless in (both + pack, both + pack + read(2), convert("%rs1") + pack + read(1), both + read(1) + read(2)):
        assert machine_code.lost_codes(harmless) == 0


def test_predictions_are_of_what_was_counted() -> None:
    """Scattered stores move whole sectors, and wavefronts take the first cache's time."""
    with compiled.offline(90) as launches:
        cases.two_scalings_of(cases.MX, (32, 1), True, False).call()
    counts = {"loaded_bytes_an_element": "4", "stored_bytes_an_element": "2.25", "wavefronts_an_element": "0.05"}
    elements, device = math.prod(cases.LARGE), predictions.DEVICES[90]
    plain, scattered, conflicting = (
        predictions.predict(launches[0], counts | more, 0, device, elements)
        for more in ({}, {"stored_bytes_an_element": "4.5"}, {"wavefronts_an_element": "4"})
    )
    assert plain.limiter == scattered.limiter == "bandwidth" and conflicting.limiter == "first cache"
    assert scattered.seconds - plain.seconds == pytest.approx(2.25 * elements / device.bandwidth)
    assert conflicting.seconds > plain.seconds


@pytest.mark.parametrize("capability", [90, *in_full(*((it,) for it in compiled.CAPABILITIES if it != 90))])
def test_a_short_accumulator_sums_one_step(capability: int) -> None:
    """On Ada and Hopper an FADD an element adds the accumulator's sum to the earlier ones."""
    with compiled.offline(capability) as launches:
        cases.product(cases.LARGE, cases.E4M3, cases.ROW, cases.ROW).call()
    ((kernel, *_),) = launches
    (loop,) = (loop for loop in machine_code.loops(kernel) if any("MMA" in i.name for i in loop))
    added = sum(i.name.startswith("FADD") for i in loop)
    assert added == (128 * 128 // 256 if capability < 100 else 0)  # of 256 threads
    assert machine_code.examine(kernel)[1] == []


def test_the_block_product_takes_one_instruction_an_element_and_step() -> None:
    row = predicted_products.row_of("1x128 . 128x128", (4096, 4096, 4096), 90)
    rows, cols, _ = map(int, row["tile"].split("x"))
    added = dict(entry.split(":") for entry in row["adds"].split())
    assert int(added["FFMA"]) == rows * cols / (32 * row["warps"])
    assert int(added["FMUL"]) <= 4  # scales of a thread's rows
    assert float(row["tflops"]) >= predicted_products.AIM
