"""Rounding errors of Adam's moments: derived, and by Monte-Carlo with the reference's own codes.

Second moments are run with gradients N(0, sigma^2), whose sigma is spread evenly over two octaves, and compared with
the exact average of the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import E4M3, E5M2
from octavo.formats import Format
from octavo.kernels.moment_codes import decode_moment, encode_moment
from octavo.kernels.reference.optimizer_state import round_to_bf16
from octavo.optim import E4M4, AdamW
from octavo.optim.state import as_fp32

BLOCK = 128
FALL = 8.0  # what gradients fall by
FORMATS = (E4M3, E5M2, E4M4)


@dataclass(frozen=True)
class Row:
    """One number: derived, measured or both."""

    study: str
    case: str
    quantity: str
    derived: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class Sizes:
    """The numbers of samples, elements and steps of a run.

    ``steps``: of a second moment, before gradients fall and again after. The last three: steps of a GPT.
    """

    samples: int = 1 << 20
    elements: int = 4096
    steps: int = 3000
    trained: int = 300
    scaled: int = 600
    compared: int = 300


TOY = Sizes(samples=1 << 12, elements=256, steps=20, trained=3, scaled=2, compared=2)


@dataclass(frozen=True)
class Stored:
    """A way to keep a second moment; ``fmt`` None: bf16. One scale is fixed, and has room."""

    fmt: Format | None
    root: bool
    stochastic: bool
    blocks: bool

    def __str__(self) -> str:
        name = f"{'√v' if self.root else 'v'}, {self.fmt or 'bf16'}, {'stochastic' if self.stochastic else 'nearest'}"
        return name if self.fmt is None else f"{name}, {'blocks' if self.blocks else 'one scale'}"

    def round(self, v: Tensor, generator: torch.Generator) -> Tensor:
        """Return the value that is read of v after it was stored."""
        bits = None
        if self.stochastic:
            bits = torch.randint(-(1 << 31), 1 << 31, v.shape, dtype=torch.int32, generator=generator)
        if self.fmt is None:
            return v.bfloat16().float() if bits is None else round_to_bf16(v, bits).float()
        wide = v.sqrt() if self.root else v
        scale = torch.tensor(self.fmt.max / 64.0)
        if self.blocks:
            amax = wide.view(-1, BLOCK).amax(1, keepdim=True)
            scale = torch.where(amax > 0, self.fmt.max / amax, 1.0).expand(-1, BLOCK).reshape(-1)
        read = rounded(wide * scale, self.fmt, bits) / scale
        return read.square() if self.root else read


STORED = (
    Stored(E4M3, False, False, False),
    Stored(E4M3, True, False, False),
    Stored(E4M4, True, False, False),
    Stored(None, False, False, False),
    Stored(E4M3, False, False, True),
    Stored(E4M3, True, False, True),
    Stored(E4M4, True, False, True),
    Stored(None, False, True, False),
    Stored(E4M4, True, True, False),
    Stored(E4M3, False, True, True),
    Stored(E4M3, True, True, True),
    Stored(E4M4, True, True, True),
)


def rounded(scaled: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """Return scaled numbers rounded to codes and back."""
    return decode_moment(encode_moment(scaled.clone(), fmt, bits), fmt)


# 1. one rounding


def one_rounding(sizes: Sizes) -> list[Row]:
    """Return the error of Adam's update by one rounding, in the range of normal numbers."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for kind, fmt in [(k, f) for k in ("v", "√v", "m") for f in FORMATS if k != "m" or f.signed]:
        octaves = math.log2(fmt.max / fmt.smallest_normal)
        x = torch.exp2(torch.rand(sizes.samples, generator=generator, dtype=torch.float64) * octaves)
        x = (x * fmt.smallest_normal).float().clamp(max=fmt.max)
        bits = torch.randint(-(1 << 31), 1 << 31, x.shape, dtype=torch.int32, generator=generator)
        for way, drawn in (("nearest", None), ("stochastic", bits)):
            read = rounded(x, fmt, drawn)
            error = {"v": (x / read).sqrt() - 1, "√v": x / read - 1, "m": read / x - 1}[kind]
            worst, rms = derived_error(kind, fmt, drawn is not None)
            rows.append(Row("error", f"{kind}, {fmt}", f"worst, {way}, %", 100 * worst, 100 * float(error.abs().max())))
            measured = float(error.square().mean().sqrt())
            rows.append(Row("error", f"{kind}, {fmt}", f"rms, {way}, %", 100 * rms, 100 * measured))
    return rows


def derived_error(kind: str, fmt: Format, stochastic: bool) -> tuple[float, float]:
    """Return (worst, rms) relative error of the update; mantissas log-uniform for the rms, to first order."""
    most = 2.0**-fmt.mantissa_bits * (1.0 if stochastic else 0.5)  # relative to a power of two
    one = 2.0**-fmt.mantissa_bits / math.sqrt(6.0 if stochastic else 12.0) * math.sqrt(3 / (8 * math.log(2)))
    if kind == "v":
        return math.sqrt(1 + most) - 1, one / 2
    if kind == "√v":
        return most, one
    return (most if stochastic else most / (1 + most)), one


# 3. averages


def limits(sizes: Sizes) -> list[Row]:
    """Return the beta2 from which some code, and every code, stands still to nearest without any gradient."""
    rows = []
    for root in (False, True):
        for fmt in (*FORMATS, None):
            some, every = derived_limits(fmt, root)
            codes = torch.arange(1 << 10, 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
            if fmt is not None:
                codes = decode_moment(torch.arange(fmt.nan_code, dtype=torch.uint8), fmt)
                codes = codes[(codes > fmt.smallest_normal) & codes.isfinite()]
            codes = codes[codes.isfinite()]
            case = f"{'√v' if root else 'v'}, {fmt or 'bf16'}"
            rows.append(Row("limit", case, "some code stands from β2 =", some, bisected(codes, fmt, root, False)))
            rows.append(Row("limit", case, "every code from β2 =", every, bisected(codes, fmt, root, True)))
    return [row for row in rows if row.case != "√v, bf16"]


def derived_limits(fmt: Format | None, root: bool) -> tuple[float, float]:
    """Return the limits of beta2: relative to the code, half a step down is most at 1 + 2^-m, and least at 1."""
    bits = 7 if fmt is None else fmt.mantissa_bits
    some, every = 1 - 1 / (2 * (2**bits + 1)), 1 - 2.0 ** -(bits + 2)
    return (some**2, every**2) if root else (some, every)


def bisected(codes: Tensor, fmt: Format | None, root: bool, every: bool) -> float:
    """Return the least beta2 at which some code or every code stays as it was when v becomes beta2 v."""
    low, high = 0.5, 1.0
    for _ in range(20):
        beta2 = (low + high) / 2
        wide = codes * (math.sqrt(beta2) if root else beta2)
        falls = (wide.bfloat16().float() if fmt is None else rounded(wide, fmt, None)) < codes
        low, high = (low, beta2) if not bool(falls.any() if every else falls.all()) else (beta2, high)
    return low


def averages(sizes: Sizes) -> list[Row]:
    """Return √v as it is kept over the exact one: while gradients stay, and after they fell."""
    rows = []
    for beta2 in (0.999, 0.95):
        old = beta2**sizes.steps  # the weight of gradients from before the fall
        stalled = 1 / math.sqrt((1 - old) / FALL**2 + old)
        for stored in STORED:
            steady, all_fell, half_fell = followed(stored, beta2, 1.0, sizes)
            from_zero, _, _ = followed(stored, beta2, 0.0, sizes)
            stands = not stored.stochastic and not stored.blocks and beta2 >= derived_limits(stored.fmt, stored.root)[1]
            begun = derived_from_zero(stored, 1 - beta2, sizes.steps) if stands and beta2 > 0.99 else None
            cases = [("begun at the truth", None, steady), ("begun at 0", begun, from_zero)]
            cases += [("after all fell", steady * stalled if stands else None, all_fell)]
            cases += [("after every other fell", None, half_fell)]
            rows += [Row(f"average, {beta2}", str(stored), name, d, value) for name, d, value in cases]
    return rows


def derived_from_zero(stored: Stored, rate: float, steps: int) -> float | None:
    """Return the √v at which an average that began at 0 stops: the largest gradient of all lifts it by half a step.

    Only where half a step is much more than ``rate``, so that hardly any gradient lifts v.
    """
    if stored.fmt is None:
        return None
    half_step = 2.0 ** -(stored.fmt.mantissa_bits + 1) / math.sqrt(2)  # of a middling mantissa
    needed = 1 + half_step / (rate / 2 if stored.root else rate)
    return math.sqrt(largest_of_squares(steps) / needed)


def followed(stored: Stored, beta2: float, start: float, sizes: Sizes) -> tuple[float, float, float]:
    """Return geometric means of √v kept over exact: steady; of blocks that fell whole; of elements that fell in others.

    From a ``start`` of 0 only the first is run.
    """
    generator = torch.Generator().manual_seed(0)
    sigma = torch.exp2(2 * torch.rand(sizes.elements, generator=generator) - 1)
    v = start * sigma.square()
    exact = v.clone()
    half = sizes.elements // 2
    steady = math.nan
    for step in range(sizes.steps * (2 if start else 1)):
        if step == sizes.steps:
            steady = mean_ratio(v, exact)
            sigma[:half] /= FALL
            sigma[half::2] /= FALL
        squares = (torch.randn(sizes.elements, generator=generator) * sigma).square()
        exact.lerp_(squares, 1 - beta2)
        v = stored.round(torch.lerp(v, squares, 1 - beta2), generator)
    if not start:
        return mean_ratio(v, exact), math.nan, math.nan
    return steady, mean_ratio(v[:half], exact[:half]), mean_ratio(v[half::2], exact[half::2])


def mean_ratio(v: Tensor, exact: Tensor) -> float:
    """Return the geometric mean of the roots' ratio, over those that are not 0."""
    held = v > 0
    return float(torch.exp2((v[held] / exact[held]).log2().mean() / 2))


def ratchet(sizes: Sizes) -> list[Row]:
    """Return rows that show: to nearest, k elements with a block's top code move with the largest gradient of the k."""
    rows = []
    for k in (1, 2, 4, 16):
        generator = torch.Generator().manual_seed(0)
        stored = Stored(E4M4, True, False, True)
        sigma = torch.full((sizes.elements // BLOCK, BLOCK), 0.25)
        sigma[:, :k] = 1.0
        sigma = sigma.view(-1)
        v, total = sigma.square(), 0.0
        for step in range(2 * sizes.steps):
            squares = (torch.randn(sigma.shape, generator=generator) * sigma).square()
            v = stored.round(torch.lerp(v, squares, 0.001), generator)
            if step >= sizes.steps:
                total += float(v.view(-1, BLOCK)[:, :k].mean())
        rows.append(Row("ratchet", f"k = {k}", "v kept / σ²", largest_of_squares(k), total / sizes.steps))
    return rows


def largest_of_squares(k: int) -> float:
    """Return the mean of the largest of k squared normal numbers."""
    x = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    return float(torch.trapezoid(1 - torch.erf((x / 2).sqrt()) ** k, x))


def noise(sizes: Sizes) -> list[Row]:
    """Return the noise that stochastic rounding adds to a steady √v, and by how much it shifts v."""
    rows = []
    cases = [Stored(E4M4, True, True, False), Stored(E4M3, True, True, False), Stored(E4M3, False, True, False)]
    cases += [Stored(E4M4, True, True, True)]
    for beta2 in (0.999, 0.95):
        for stored in cases:
            generator = torch.Generator().manual_seed(0)
            sigma = torch.exp2(2 * torch.rand(sizes.elements, generator=generator) - 1)
            v = sigma.square()
            exact, spread, shift = v.clone(), 0.0, 0.0
            for step in range(2 * sizes.steps):
                squares = (torch.randn(sigma.shape, generator=generator) * sigma).square()
                exact.lerp_(squares, 1 - beta2)
                v = stored.round(torch.lerp(v, squares, 1 - beta2), generator)
                if step >= sizes.steps:
                    spread += float(((v / exact).log() / 2).square().mean())
                    shift += float((v / exact).mean() - 1)
            sd, bias = derived_noise(stored, 1 - beta2)
            measured = 100 * math.sqrt(spread / sizes.steps)
            case = f"{stored}, β2 = {beta2}"
            rows.append(Row("noise", case, "sd of ln √v, %", None if stored.blocks else 100 * sd, measured))
            measured_bias = 100 * shift / sizes.steps
            rows.append(Row("noise", case, "bias of v, %", None if stored.blocks else 100 * bias, measured_bias))
    return rows


def derived_noise(stored: Stored, rate: float) -> tuple[float, float]:
    """Return (sd of ln √v, relative bias of v) at one scale.

    A stored number lies on a code: a step moves it by ``move`` = rate/2 (chi^2 - 1) of itself (a linear v: twice that)
    and rounding adds the variance h^2 f (1 - f) with f the fraction of move / h. The average forgets at ``rate``.
    """
    assert stored.fmt is not None
    generator = torch.Generator().manual_seed(1)
    mantissa = torch.exp2(torch.rand(1 << 18, generator=generator))
    h = 2.0**-stored.fmt.mantissa_bits / mantissa
    squares = torch.randn(h.shape, generator=generator).square()
    move = rate * (squares - 1)
    if stored.root:
        move = torch.sqrt((1 + move).clamp(min=0)) - 1
    f = (move.abs() / h).frac()
    added = float((h.square() * f * (1 - f)).mean())
    spread = added / (1 - (1 - rate) ** 2)
    return (math.sqrt(spread), added / rate) if stored.root else (math.sqrt(spread) / 2, 0.0)


def whole_updates(sizes: Sizes) -> list[Row]:
    """Return the rms error of m / √v in octavo's AdamW beside float32's, in steady noise, by the rms of the latter."""
    rows = []
    for moments in ("fp8", "bf16"):
        for betas in ((0.9, 0.999), (0.9, 0.95)):
            torch.manual_seed(0)
            shape = (sizes.elements // BLOCK, BLOCK)
            sigma = torch.exp2(2 * torch.rand(shape) - 1)
            weights = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
            stored, exact = (AdamW([w], 0.0, betas, moments=m) for w, m in zip(weights, (moments, "fp32"), strict=True))
            errors, whole = 0.0, 0.0
            for step in range(sizes.steps):
                weights[0].grad = weights[1].grad = torch.randn(shape) * sigma
                stored.step()
                exact.step()
                if step >= sizes.steps // 2 and step % 10 == 0:
                    (m, v), (m0, v0) = read(stored, weights[0]), read(exact, weights[1])
                    errors += float((m / v.sqrt() - m0 / v0.sqrt()).square().mean())
                    whole += float((m0 / v0.sqrt()).square().mean())
            derived = derived_update(betas) if moments == "fp8" else None
            measured = 100 * math.sqrt(errors / whole)
            rows.append(Row("update", f"{moments}, β = {betas}", "rms error of m / √v, %", derived, measured))
    return rows


def derived_update(betas: tuple[float, float]) -> float:
    """Return percent, of the default: m moves by more than a code in a step, so each rounding adds h^2 / 6."""
    _, one = derived_error("m", E4M3, True)
    of_v, _ = derived_noise(Stored(E4M4, True, True, False), 1 - betas[1])
    return 100 * math.sqrt(one**2 / (1 - betas[0] ** 2) + of_v**2)


def read(optimizer: AdamW, weight: torch.nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return a weight's moments, in float32."""
    pairs = zip(optimizer.names, optimizer.moments, strict=True)
    first, second = (as_fp32(name, moment, optimizer.state[weight]) for name, moment in pairs)
    return first, second


STUDIES: tuple[Callable[[Sizes], list[Row]], ...] = (one_rounding, limits, averages, ratchet, noise, whole_updates)
