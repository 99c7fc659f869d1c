from __future__ import annotations

import operator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.support.ptx import compute

BF16 = np.dtype(ml_dtypes.bfloat16)
# Bits of a significand, exponents of the smallest and the largest normal number.
FORMATS = {"f32": (24, -126, 127), "f64": (53, -1022, 1023)}
DTYPES = {"f16": np.dtype(np.float16), "bf16": BF16, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


def rounded(value: Fraction, kind: str) -> float:
    """The nearest number of a format, ties to even."""
    digits, least, most = FORMATS[kind]
    if value == 0:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, least) - digits + 1)
    nearest = round(value / step) * step
    size = abs(nearest)
    nearest = float(size) if size < Fraction(2) ** (most + 1) else np.inf
    return nearest if value > 0 else -nearest


@np.errstate(all="ignore")
def operands(kind: str, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y, z of any size, near each other, where z takes x * y away but for its last bits, and where z tips a tie."""
    random, dtype, digits = np.random.default_rng(0), DTYPES[kind], FORMATS[kind][0]
    whole = random.integers(0, 1 << 63, (3, count), np.uint64) * np.uint64(2) >> np.uint64(64 - dtype.itemsize * 8)
    x, y, z = whole.astype(f"u{dtype.itemsize}").view(dtype)
    near = random.standard_normal((3, count)) * np.exp2(random.integers(-digits, digits, (3, count)))
    x, y, z = (np.where(random.random(count) < 0.5, a, b).astype(dtype) for a, b in zip((x, y, z), near, strict=True))
    product = x.astype(np.longdouble) * y.astype(np.longdouble)
    third = random.integers(0, 4, count)
    lost = np.where(third == 0, -product * (1 + np.exp2(-digits)), z.astype(np.longdouble))
    small = np.abs(x).astype(np.longdouble) * np.exp2(-random.integers(1, 60, count))
    z = np.where(third == 1, small, lost).astype(dtype)
    # (1 + 2^-k)(1 + 2^-j) with j + k = digits ends in a tie, and a tiny z of either sign tips it
    k = random.integers(1, digits, count)
    tie = third == 2
    x = np.where(tie, (1 + np.exp2(-k.astype(float))), x.astype(np.longdouble)).astype(dtype)
    y = np.where(tie, (1 + np.exp2(k - float(digits))), y.astype(np.longdouble)).astype(dtype)
    tiny = np.exp2(-random.integers(1, -FORMATS[kind][1], count).astype(float)) * random.choice([-1, 0, 1], count)
    return x, y, np.where(tie, tiny, z.astype(np.longdouble)).astype(dtype)


def check(got: np.ndarray, exact: list[Fraction | None], kind: str) -> None:
    chosen = [index for index, value in enumerate(exact) if value]  # zero and infinities have other results
    assert len(chosen) > 500
    want = np.array([rounded(exact[index], kind) for index in chosen]).astype(got.dtype)
    wrong = np.flatnonzero(bits_of(got[chosen]) != bits_of(want))
    assert wrong.size == 0, (len(wrong), chosen[wrong[0]], got[chosen][wrong[0]], want[wrong[0]])


def fractions(*values: np.ndarray) -> list[tuple[Fraction, ...] | None]:
    rows = zip(*(value.astype(np.float64).tolist() for value in values), strict=True)
    return [tuple(map(Fraction, row)) if np.isfinite(row).all() else None for row in rows]


def test_fma_is_rounded_once() -> None:
    with np.errstate(all="ignore"):
        x, y, z = operands("f32", 3000)
        naive = (x.astype(np.float64) * y + z).astype(np.float32)
    got = compute("fma.rn.f32", x, y, z)
    exact = [row and row[0] * row[1] + row[2] for row in fractions(x, y, z)]
    check(got, exact, "f32")
    assert (bits_of(naive) != bits_of(got))[[bool(value) for value in exact]].any()  # rounded twice is not the same


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_sums_and_products(name: str, kind: str) -> None:
    x, y, z = operands(kind, 1000)
    second = y if name == "mul" else z
    got = compute(f"{name}.rn.{kind}", x, second)
    function = getattr(operator, name)
    check(got, [row and function(*row) for row in fractions(x, second)], kind)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_quotients_and_roots(kind: str) -> None:
    x, y, _ = operands(kind, 1000)
    check(compute(f"div.rn.{kind}", x, y), [row and row[1] and row[0] / row[1] for row in fractions(x, y)], kind)
    root = compute(f"sqrt.rn.{kind}", np.abs(x))
    digits = FORMATS[kind][0]
    for value, actual in zip(np.abs(x).tolist(), root.tolist(), strict=True):
        if np.isfinite(value) and value > 0:  # the exact root is between the found number's neighbours' midpoints
            half = Fraction(2) ** (int(np.floor(np.log2(actual))) - digits)
            assert (Fraction(actual) - half) ** 2 <= Fraction(value) <= (Fraction(actual) + half) ** 2


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_of_float32(name: str) -> None:
    values = operands("f32", 1000)[: 3 if name == "fma" else 2]
    together = compute(f"{name}.rn.f32x2", *(value.view(np.uint64) for value in values))
    assert (together.view(np.uint32) == bits_of(compute(f"{name}.rn.f32", *values))).all()


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", BF16), ("f16", np.float16)])
def test_narrow_numbers_and_float32_add_up(kind: str, dtype: type) -> None:
    with np.errstate(all="ignore"):
        x, y, z = operands("f32", 1000)
        x, narrow = x.astype(dtype), y.astype(dtype)
    for name, function in (("add", operator.add), ("sub", operator.sub)):
        exact = [row and function(*row) for row in fractions(x, y)]
        check(compute(f"{name}.rn.f32.{kind}", x, y, out=np.float32), exact, "f32")
    exact = [row and row[0] * row[1] + row[2] for row in fractions(x, narrow, z)]
    check(compute(f"fma.rn.f32.{kind}", x, narrow, z, out=np.float32), exact, "f32")


def pairs(kind: str) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan], np.float64).astype(DTYPES[kind])
    bits_of(values)[-1] |= 1  # a NaN with a payload, and a sign
    a, b = np.meshgrid(values, values)
    return a.reshape(-1).copy(), b.reshape(-1).copy()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_nan_is_the_canonical_one(name: str, kind: str) -> None:
    a, b = pairs(kind)
    got = compute(f"{name}.rn.{kind}", a, b)
    nan = np.isnan(got.astype(np.float64))
    assert nan.sum() > 28 and (bits_of(got)[nan] == NAN[kind]).all()
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        want, fused = getattr(operator, name)(x, y), np.isnan(x * y + y)
    assert (bits_of(got)[~nan] == bits_of(want.astype(got.dtype))[~nan]).all() and (nan == np.isnan(want)).all()
    if kind == "f32":
        got = compute("fma.rn.f32", a, b, b)
        assert (bits_of(got)[fused] == NAN["f32"]).all() and (np.isnan(got) == fused).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_signs_move_without_arithmetic(kind: str) -> None:
    a, _ = pairs(kind)
    sign = 1 << (a.dtype.itemsize * 8 - 1)
    assert (bits_of(compute(f"neg.{kind}", a)) == bits_of(a) ^ bits_of(a).dtype.type(sign)).all()
    assert (bits_of(compute(f"abs.{kind}", a)) == bits_of(a) & bits_of(a).dtype.type(sign - 1)).all()


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str) -> None:
    """-0 is below +0, of a NaN and a number the number counts, and with .NaN the NaN."""
    a, b = pairs("f32")
    x, y = a.astype(np.float64), b.astype(np.float64)
    order = np.array([x, y]), np.array([np.signbit(x), np.signbit(y)])
    chosen = np.lexsort((~order[1], order[0]), axis=0)[0 if name == "min" else 1]
    number = np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.where(chosen == 0, x, y)))
    for modifier, want in (("", number), (".NaN", np.where(np.isnan(x) | np.isnan(y), np.nan, number))):
        got, nan = compute(f"{name}{modifier}.f32", a, b), np.isnan(want)
        assert (bits_of(got)[nan] == NAN["f32"]).all()
        assert (bits_of(got)[~nan] == bits_of(want.astype(got.dtype))[~nan]).all()


# (exact, the manual's bound on the relative error, arguments)
APPROXIMATE = {
    "ex2.approx.ftz.f32": (np.exp2, 2.0**-22.5, np.linspace(-120, 120, 997)),
    "rcp.approx.ftz.f32": (lambda x: 1 / x, 2.0**-23, np.geomspace(1e-30, 1e30, 997)),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions_reach_their_bound_and_do_not_pass_it(name: str) -> None:
    exact, bound, x = APPROXIMATE[name]
    x = x.astype(np.float32)
    truth = exact(x.astype(np.longdouble))
    results = {where: compute(name, x, approximation=where).astype(np.longdouble) for where in (-1, 0, 1)}
    errors = {where: (result - truth) / truth / bound for where, result in results.items()}
    for where, error in errors.items():
        assert (np.abs(error) <= 1).all(), where
    assert errors[-1].min() < -0.8 and errors[1].max() > 0.8 and np.abs(errors[0]).max() < 0.8
    assert (errors[-1] <= errors[0]).all() and (errors[0] <= errors[1]).all()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_comparisons_with_nan(kind: str) -> None:
    a, b = pairs(kind)
    x, y = a.astype(np.float32), b.astype(np.float32)
    nan = np.isnan(x) | np.isnan(y)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        plain = getattr(operator, name)(x, y)
        assert (compute(f"setp.{name}.{kind}", a, b, out=bool) == (plain & ~nan)).all(), name
        assert (compute(f"setp.{name}u.{kind}", a, b, out=bool) == (plain | nan)).all(), name
    if kind == "f32":
        assert (compute("setp.num.f32", a, b, out=bool) == ~nan).all()
